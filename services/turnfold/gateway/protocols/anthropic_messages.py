"""Anthropic messages: request to `ModelCall`, `Answer` to response or stream, errors.

Every field that changes what is sampled is honoured, refused by name, or, where it would constrain
the output, kept as a constraint of the call; so is a field that nobody knows. `thinking` and
`output_config.effort` are wishes that only a model trained for them understands: whether this one
thinks is for its template to say, and `thinking.display` decides what is shown of it. Fields that
change nothing here (`metadata`, `service_tier`, `cache_control`, …) are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from turnfold.gateway.calls import ModelCall
from turnfold.gateway.constraints import Constraint
from turnfold.gateway.protocols.anthropic_answer import PING
from turnfold.gateway.protocols.anthropic_answer import answer_body as answer_body
from turnfold.gateway.protocols.anthropic_answer import answer_events as answer_events
from turnfold.gateway.protocols.anthropic_answer import begin_stream as begin_stream
from turnfold.gateway.protocols.anthropic_answer import error_body as error_body
from turnfold.gateway.protocols.anthropic_answer import error_event as error_event
from turnfold.gateway.protocols.anthropic_content import read_conversation, read_tools
from turnfold.gateway.protocols.request_fields import (
    SamplingFields,
    at_least_one,
    constraining_fields,
    decode_known_fields,
    refuse_unsupported,
    sampling_params,
)
from turnfold.gateway.refusals import invalid

NAME = "anthropic_messages"
KEEPALIVE = PING


class _Prompt(SamplingFields, kw_only=True):
    """What is counted; `Any` where Anthropic allows several shapes."""

    messages: list[dict[str, Any]]
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    # Accepted where they change nothing, refused by name otherwise.
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    # Not supported; each would change what is sampled.
    compaction: Any = None
    container: Any = None
    mcp_servers: Any = None
    thread: Any = None
    # A constraint.
    output_format: Any = None
    # They change nothing here.
    anthropic_beta: Any = None
    anthropic_version: Any = None
    betas: Any = None
    billing_policy: Any = None
    cache_control: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: Any = None
    metadata: Any = None
    service_tier: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class _Request(_Prompt, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None


_UNSUPPORTED = {
    "compaction": "the history is the agent's to edit",
    "container": "there is no code execution",
    "mcp_servers": "connect to them in the agent and offer their tools",
    "thread": "send the whole history as `messages`",
}

_FORCING = ("any", "tool")
_FORCED = (
    "tool_choice.type: expected `auto` or `none`; a call cannot be forced without constraining the "
    "output"
)

_request_decoder = msgspec.json.Decoder(_Request)
_prompt_decoder = msgspec.json.Decoder(_Prompt)


def read_call(body: bytes) -> ModelCall:
    """The request as a call. Raises Refusal naming the field that is wrong or not supported."""
    request, unknown = decode_known_fields(body, _request_decoder)
    call = _prompt_call(request)
    if call.messages[-1].role == "assistant":
        raise invalid(
            "messages: the last one is the assistant's, and a reply cannot be begun for the model",
            "messages",
        )
    return msgspec.structs.replace(
        call,
        params=sampling_params(
            request,
            max_tokens=at_least_one(request.max_tokens, "max_tokens"),
            stop=request.stop_sequences or (),
            stop_field="stop_sequences",
        ),
        is_streamed=bool(request.stream),
        constraints=(*call.constraints, *unknown),
    )


def read_count(body: bytes) -> ModelCall:
    """The request of `count_tokens` as the call whose prompt is counted. Raises Refusal."""
    prompt, _ = decode_known_fields(body, _prompt_decoder)  # the others do not lengthen it
    return _prompt_call(prompt)


def _prompt_call(request: _Prompt) -> ModelCall:
    refuse_unsupported(request, _UNSUPPORTED)
    _refuse_edits(request.context_management or {})
    return ModelCall(
        protocol=NAME,
        model=request.model,
        messages=read_conversation(request.system, request.messages),
        tools=read_tools(request.tools or ()),
        is_calling_allowed=_is_calling_allowed(request.tool_choice or {"type": "auto"}),
        constraints=tuple(_constraints(request)),
        is_reasoning_hidden=_is_reasoning_hidden(request.thinking or {"type": "disabled"}),
    )


def _constraints(request: _Prompt) -> Iterator[Constraint]:
    choice = request.tool_choice or {}
    if choice.get("disable_parallel_tool_use"):
        yield Constraint(
            field="tool_choice.disable_parallel_tool_use",
            message="tool_choice.disable_parallel_tool_use is not supported: the model decides how "
            "many calls it makes",
        )
    if choice.get("type") in _FORCING:
        yield Constraint(field="tool_choice.type", message=_FORCED)
    if (request.output_config or {}).get("format") is not None:
        yield Constraint(
            field="output_config.format",
            message="output_config.format is not supported: output is not constrained",
        )
    yield from constraining_fields(request, "output_format")


def _refuse_edits(context_management: dict[str, Any]) -> None:
    for edit in context_management.get("edits") or ():
        keeps_all = isinstance(edit, dict) and edit.get("keep") == "all"
        if not (keeps_all and str(edit.get("type")).startswith("clear_thinking")):
            raise invalid(
                "context_management.edits is not supported: the history is the agent's to edit",
                "context_management.edits",
            )


def _is_calling_allowed(tool_choice: dict[str, Any]) -> bool:
    if tool_choice.get("type") not in ("auto", "none", *_FORCING):
        raise invalid(_FORCED, "tool_choice.type")
    return bool(tool_choice["type"] != "none")


def _is_reasoning_hidden(thinking: dict[str, Any]) -> bool:
    if thinking.get("type") not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise invalid(
            f"thinking.type: {thinking.get('type')!r} is not supported here", "thinking.type"
        )
    return thinking.get("display") == "omitted"


def count_body(num_prompt_tokens: int) -> bytes:
    """The answer of `count_tokens`."""
    return msgspec.json.encode({"input_tokens": num_prompt_tokens})

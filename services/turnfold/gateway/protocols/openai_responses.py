"""OpenAI responses: request to `ModelCall`, `Answer` to response or stream, errors.

The id of a response is that of its turn, so `previous_response_id` names a turn of the session and
the log is the store: `store` makes no difference. Every other field that changes what is sampled is
honoured, refused by name, or, where it would constrain the output, kept as a constraint; so is a
field that nobody knows. `reasoning` and `text.verbosity` are wishes that only a model trained for
them understands. Fields that change nothing here (`user`, `metadata`, …) are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from turnfold.gateway.calls import CallParams, ModelCall
from turnfold.gateway.constraints import Constraint
from turnfold.gateway.protocols.openai_choices import (
    call_constraints,
    form_constraint,
    is_calling_allowed,
)
from turnfold.gateway.protocols.openai_items import read_flat_tools, read_input
from turnfold.gateway.protocols.openai_responses_answer import ID_PREFIX
from turnfold.gateway.protocols.openai_responses_answer import answer_body as answer_body
from turnfold.gateway.protocols.openai_responses_answer import answer_events as answer_events
from turnfold.gateway.protocols.openai_responses_answer import begin_stream as begin_stream
from turnfold.gateway.protocols.openai_responses_answer import error_body as error_body
from turnfold.gateway.protocols.openai_responses_answer import error_event as error_event
from turnfold.gateway.protocols.request_fields import (
    SamplingFields,
    at_least_one,
    constraining_fields,
    decode_known_fields,
    refuse_unsupported,
    sampling_params,
)
from turnfold.gateway.refusals import Refusal, invalid
from turnfold.schemas.messages import ChatMessage

NAME = "openai_responses"
KEEPALIVE = b": keepalive\n\n"

_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"


class _Request(SamplingFields, kw_only=True):
    """The fields that are read; `Any` where OpenAI allows several shapes."""

    input: str | list[dict[str, Any]] | None = None
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None
    include: list[str] | None = None
    # Accepted with the one value that changes nothing, refused by name otherwise.
    top_logprobs: int | None = None
    truncation: str | None = None
    # Constraints, except for the value that changes nothing.
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    response_format: Any = None
    # Not supported; each would change what is sampled, or how it is asked for.
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    prompt: Any = None
    messages: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    moderation: Any = None
    # A wish that only a model trained for it understands: the template decides.
    reasoning: Any = None
    # They change nothing here: what they are about is refused, or happens on the provider's side.
    access_programs: Any = None
    background_options: Any = None
    image: Any = None
    max_tool_calls: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    stream_options: Any = None
    user: Any = None


_UNSUPPORTED = {
    "background": "keep the connection open",
    "context_management": "the history is the agent's to edit",
    "conversation": "use `previous_response_id`",
    "prompt": "send its text as `instructions`",
    "messages": "use `input`",
    "max_tokens": "use `max_output_tokens`",
    "max_completion_tokens": "use `max_output_tokens`",
    "moderation": "nobody looks at the answer before the agent",
}

_decoder = msgspec.json.Decoder(_Request)


def read_call(body: bytes) -> ModelCall:
    """The request as a call. Raises Refusal naming the field that is wrong or not supported."""
    request, unknown = decode_known_fields(body, _decoder)
    _refuse_unsupported(request)
    previous_turn_id = _turn_id(request.previous_response_id)
    messages, references = read_input([] if request.input is None else request.input)
    if not messages and not previous_turn_id:
        raise invalid("input: expected at least one item", "input")
    instructions = request.instructions or ""
    if instructions:
        messages = (ChatMessage(role="system", content=instructions), *messages)
        references = tuple(replace(r, message=r.message + 1) for r in references)
    include = request.include or ()
    return ModelCall(
        protocol=NAME,
        model=request.model,
        messages=messages,
        has_instructions=bool(instructions),
        previous_turn_id=previous_turn_id,
        tools=read_flat_tools(request.tools or ()),
        is_calling_allowed=is_calling_allowed(request.tool_choice),
        params=_params(request),
        is_streamed=bool(request.stream),
        has_logprobs=_LOGPROBS in include,
        is_reasoning_sealed=_SEALED in include,
        constraints=(*_constraints(request), *unknown),
        references=references,
    )


def read_retrieval(response_id: str, query: Iterable[tuple[str, str]]) -> tuple[str, ModelCall]:
    """The turn whose response is asked for again, and the call that it answers as far as that can
    be known: the log has what was said, not the form that it was asked in. Raises Refusal."""
    options = list(query)
    include = {value for name, value in options if name.partition("[")[0] == "include"}
    if any(name == "starting_after" for name, _ in options):
        raise invalid(
            "starting_after is not supported: a stream is told from its start", "starting_after"
        )
    if not response_id.startswith(ID_PREFIX):
        raise Refusal("not_found", f"Response with id {response_id!r} not found.")
    call = ModelCall(
        protocol=NAME,
        model="",
        messages=(),
        is_streamed=("stream", "true") in options,
        has_logprobs=_LOGPROBS in include,
        is_reasoning_sealed=_SEALED in include,
    )
    return response_id.removeprefix(ID_PREFIX), call


def read_count(body: bytes) -> ModelCall:
    """The request of `input_tokens` as the call whose prompt is counted. Raises Refusal."""
    return read_call(body)


def _refuse_unsupported(request: _Request) -> None:
    refuse_unsupported(request, _UNSUPPORTED)
    if request.top_logprobs not in (None, 0):
        raise invalid("top_logprobs is not supported: only the sampled token's", "top_logprobs")
    if request.truncation not in (None, "disabled"):
        raise invalid(
            "truncation: only `disabled` is supported: the history is the agent's to edit",
            "truncation",
        )


def _constraints(request: _Request) -> Iterator[Constraint]:
    yield from call_constraints(request.tool_choice, request.parallel_tool_calls)
    yield from form_constraint((request.text or {}).get("format"), "text.format")
    yield from constraining_fields(request, "response_format")


def _turn_id(response_id: str | None) -> str:
    if not response_id:
        return ""
    if not response_id.startswith(ID_PREFIX):
        raise invalid(
            f"previous_response_id: expected an id that begins with `{ID_PREFIX}`",
            "previous_response_id",
        )
    return response_id.removeprefix(ID_PREFIX)


def _params(request: _Request) -> CallParams:
    return sampling_params(
        request,
        max_tokens=at_least_one(request.max_output_tokens, "max_output_tokens"),
        stop=[request.stop] if isinstance(request.stop, str) else request.stop or (),
        stop_field="stop",
    )


def count_body(num_prompt_tokens: int) -> bytes:
    """The answer of `input_tokens`."""
    return msgspec.json.encode(
        {"object": "response.input_tokens", "input_tokens": num_prompt_tokens}
    )

"""OpenAI chat completions: request to `ModelCall`, `Answer` to response or stream, errors.

Every field that changes what is sampled is honoured, refused by name, or, where it would constrain
the output, kept as a constraint of the call; so is a field that nobody knows. Fields that change
nothing here (`user`, `metadata`, `store`, …) are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from turnfold.gateway.calls import CallParams, ModelCall
from turnfold.gateway.constraints import Constraint
from turnfold.gateway.protocols.openai_chat_answer import answer_body as answer_body
from turnfold.gateway.protocols.openai_chat_answer import answer_events as answer_events
from turnfold.gateway.protocols.openai_chat_answer import begin_stream as begin_stream
from turnfold.gateway.protocols.openai_chat_answer import error_body as error_body
from turnfold.gateway.protocols.openai_chat_answer import error_event as error_event
from turnfold.gateway.protocols.openai_choices import (
    call_constraints,
    form_constraint,
    is_calling_allowed,
)
from turnfold.gateway.protocols.openai_messages import read_messages, read_tools
from turnfold.gateway.protocols.request_fields import (
    SamplingFields,
    at_least_one,
    constraining_fields,
    decode_known_fields,
    refuse_unsupported,
    sampling_params,
)
from turnfold.gateway.refusals import invalid

NAME = "openai_chat"
KEEPALIVE = b": keepalive\n\n"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(SamplingFields, kw_only=True):
    """The fields that are read; `Any` where OpenAI allows several shapes."""

    messages: list[msgspec.Raw]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    # Accepted with the one value that changes nothing, refused by name otherwise.
    n: int | None = None
    top_logprobs: int | None = None
    modalities: list[str] | None = None
    # Constraints, except for the value that changes nothing.
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    # Not supported; each would change what is sampled.
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    moderation: Any = None
    web_search_options: Any = None
    # Wishes that only a model trained for them understands: the template decides.
    reasoning: Any = None
    reasoning_effort: Any = None
    thinking: Any = None
    verbosity: Any = None
    # They change nothing here.
    metadata: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    provider: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    usage: Any = None
    user: Any = None


_UNSUPPORTED = {
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "audio": "only text is generated",
    "moderation": "nobody looks at the answer before the agent",
    "web_search_options": "there is no web search",
}

_decoder = msgspec.json.Decoder(_Request)


def read_call(body: bytes) -> ModelCall:
    """The request as a call. Raises Refusal naming the field that is wrong or not supported."""
    request, unknown = decode_known_fields(body, _decoder)
    _refuse_unsupported(request)
    options = request.stream_options
    return ModelCall(
        protocol=NAME,
        model=request.model,
        messages=read_messages(request.messages),
        tools=read_tools(request.tools or []),
        is_calling_allowed=is_calling_allowed(request.tool_choice),
        params=_params(request),
        is_streamed=bool(request.stream),
        is_usage_streamed=bool(options and options.include_usage),
        has_logprobs=bool(request.logprobs),
        constraints=(*_constraints(request), *unknown),
    )


def _refuse_unsupported(request: _Request) -> None:
    refuse_unsupported(request, _UNSUPPORTED)
    if request.n not in (None, 1):
        raise invalid(f"n: expected 1, got {request.n}; start one rollout for each sample", "n")
    if request.top_logprobs not in (None, 0):
        raise invalid("top_logprobs is not supported: only the sampled token's", "top_logprobs")
    if set(request.modalities or ()) - {"text"}:
        raise invalid("modalities: only `text` is generated", "modalities")


def _constraints(request: _Request) -> Iterator[Constraint]:
    yield from call_constraints(request.tool_choice, request.parallel_tool_calls)
    yield from form_constraint(request.response_format, "response_format")
    yield from constraining_fields(request)


def _params(request: _Request) -> CallParams:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return sampling_params(request, max_tokens=_max_tokens(request), stop=stop, stop_field="stop")


def _max_tokens(request: _Request) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = at_least_one(getattr(request, name), name)
        if value is not None:
            return value
    return None

"""OpenAI chat completions: request to `ModelCall`, `Answer` to response or stream, errors.

Every field that changes what is sampled is honoured or refused by name. Fields that change nothing
here (`user`, `metadata`, `store`, …) and fields that nobody knows are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from turnfold.gateway.calls import Answer, CallParams, ModelCall
from turnfold.gateway.protocols.openai_choices import is_calling_allowed, refuse_single_calls
from turnfold.gateway.protocols.openai_errors import error_object
from turnfold.gateway.protocols.openai_messages import read_messages, read_tools
from turnfold.gateway.protocols.request_fields import (
    SamplingFields,
    at_least_one,
    decode_request,
    refuse_unsupported,
    sampling_params,
)
from turnfold.gateway.protocols.tool_arguments import arguments_text
from turnfold.gateway.refusals import Refusal, invalid
from turnfold.schemas.messages import ToolCall

NAME = "openai_chat"
KEEPALIVE = b": keepalive\n\n"

_DONE = b"data: [DONE]\n\n"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(SamplingFields, kw_only=True):
    """The fields that are read; `Any` where OpenAI allows several shapes."""

    messages: list[dict[str, Any]]
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
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    # Not supported; each would change what is sampled.
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None


_UNSUPPORTED = {
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "audio": "only text is generated",
    "web_search_options": "there is no web search",
}

_decoder = msgspec.json.Decoder(_Request)


def read_call(body: bytes) -> ModelCall:
    """The request as a call. Raises Refusal naming the field that is wrong or not supported."""
    request = decode_request(body, _decoder)
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
    )


def _refuse_unsupported(request: _Request) -> None:
    refuse_unsupported(request, _UNSUPPORTED)
    if request.n not in (None, 1):
        raise invalid(f"n: expected 1, got {request.n}; start one rollout for each sample", "n")
    if request.top_logprobs not in (None, 0):
        raise invalid("top_logprobs is not supported: only the sampled token's", "top_logprobs")
    refuse_single_calls(request.parallel_tool_calls)
    if (request.response_format or {}).get("type", "text") != "text":
        raise invalid(
            "response_format: only `text` is supported: output is not constrained",
            "response_format",
        )
    if set(request.modalities or ()) - {"text"}:
        raise invalid("modalities: only `text` is generated", "modalities")


def _params(request: _Request) -> CallParams:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return sampling_params(request, max_tokens=_max_tokens(request), stop=stop, stop_field="stop")


def _max_tokens(request: _Request) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = at_least_one(getattr(request, name), name)
        if value is not None:
            return value
    return None


def answer_body(answer: Answer, call: ModelCall) -> bytes:
    """The whole response."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.reply.content or None,
        "refusal": None,
        **_reasoning(answer),
    }
    if answer.reply.tool_calls:
        message["tool_calls"] = [_tool_call(call) for call in answer.reply.tool_calls]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(answer),
        "finish_reason": finish_reason(answer),
    }
    return msgspec.json.encode(
        {
            **_envelope(answer, "chat.completion"),
            "choices": [choice],
            "usage": _usage(answer),
        }
    )


def answer_events(answer: Answer, call: ModelCall) -> Iterator[bytes]:
    """The response as chunks: role, reasoning, content, each call, the end, usage, `[DONE]`."""
    yield _chunk(answer, {"role": "assistant", "content": ""})
    if answer.reply.reasoning:
        yield _chunk(answer, _reasoning(answer))
    if answer.reply.content or answer.logprobs is not None:
        yield _chunk(answer, {"content": answer.reply.content}, logprobs=_logprobs(answer))
    for index, made in enumerate(answer.reply.tool_calls):
        whole = {"index": index, **_tool_call(made)}
        opening = whole | {"function": {"name": made.name, "arguments": ""}}
        yield _chunk(answer, {"tool_calls": [opening]})
        arguments = {"index": index, "function": {"arguments": arguments_text(made)}}
        yield _chunk(answer, {"tool_calls": [arguments]})
    yield _chunk(answer, {}, finish_reason=finish_reason(answer))
    if call.is_usage_streamed:
        last = {**_envelope(answer, "chat.completion.chunk"), "choices": []}
        yield _event(last | {"usage": _usage(answer)})
    yield _DONE


def finish_reason(answer: Answer) -> Literal["tool_calls", "length", "stop"]:
    """A reply that calls tools says so even when it was cut after the calls."""
    if answer.reply.tool_calls:
        return "tool_calls"
    return "length" if answer.finish_reason == "length" else "stop"


def error_body(refusal: Refusal, request_id: str) -> bytes:
    """OpenAI's error object, with the request id that the log knows it by."""
    return msgspec.json.encode({"error": error_object(refusal, request_id)})


def error_event(refusal: Refusal, request_id: str) -> bytes:
    """An error in a stream that has begun: SDKs raise it instead of ending quietly."""
    return b"data: " + error_body(refusal, request_id) + b"\n\n"


def _envelope(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.turn_id}",
        "object": kind,
        "created": answer.created,
        "model": answer.model,
        "service_tier": None,
        "system_fingerprint": None,
    }


def _chunk(
    answer: Answer,
    delta: dict[str, Any],
    *,
    finish_reason: str | None = None,
    logprobs: dict[str, Any] | None = None,
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
    return _event({**_envelope(answer, "chat.completion.chunk"), "choices": [choice]})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments_text(call)}
    return {"id": call.id, "type": "function", "function": function}


def _reasoning(answer: Answer) -> dict[str, str]:
    reasoning = answer.reply.reasoning
    return {"reasoning_content": reasoning} if reasoning else {}


def _usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_output_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_output_tokens,
    }


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in answer.logprobs
    ]
    return {"content": content, "refusal": None}

"""OpenAI chat completions: request to `ModelCall`, `Answer` to response or stream, errors.

Every field that changes what is sampled is honoured or refused by name. Fields that change nothing
here (`user`, `metadata`, `store`, …) and fields that nobody knows are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from turnfold.gateway.calls import Answer, CallParams, ModelCall
from turnfold.gateway.protocols.openai_messages import read_messages, read_tools
from turnfold.gateway.refusals import Kind, Refusal, invalid
from turnfold.schemas.messages import ToolCall

NAME = "openai_chat"

_DONE = b"data: [DONE]\n\n"

_ERROR_TYPES: dict[Kind, str] = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "invalid_request_error",
    "conflict": "invalid_request_error",
    "too_large": "invalid_request_error",
    "bad_gateway": "server_error",
    "unavailable": "server_error",
    "internal": "server_error",
}


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct, kw_only=True):
    """The fields that are read; `Any` where OpenAI allows several shapes."""

    messages: list[dict[str, Any]]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
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
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    stop_token_ids: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    bad_words: Any = None
    best_of: Any = None
    echo: Any = None
    prompt_logprobs: Any = None


_UNSUPPORTED = {
    "functions": "use `tools`",
    "function_call": "use `tool_choice`",
    "audio": "only text is generated",
    "web_search_options": "there is no web search",
    "chat_template": "the model's own template is used",
    "chat_template_kwargs": "the model's own template is used as it is",
    "continue_final_message": "each call opens a new assistant message",
    "structured_outputs": "output is not constrained",
    "guided_json": "output is not constrained",
    "guided_regex": "output is not constrained",
    "guided_choice": "output is not constrained",
    "guided_grammar": "output is not constrained",
    "stop_token_ids": "use `stop`",
    "min_tokens": "the model decides where it stops",
    "ignore_eos": "the model decides where it stops",
    "bad_words": "output is not constrained",
    "best_of": "one choice is sampled",
    "echo": "the prompt is not repeated",
    "prompt_logprobs": "logprobs are given for sampled tokens",
}

_decoder = msgspec.json.Decoder(_Request)


def read_call(body: bytes) -> ModelCall:
    """The request as a call. Raises Refusal naming the field that is wrong or not supported."""
    request = _decode(body)
    _refuse_unsupported(request)
    options = request.stream_options
    return ModelCall(
        protocol=NAME,
        model=request.model,
        messages=read_messages(request.messages),
        tools=read_tools(request.tools or []),
        is_calling_allowed=_is_calling_allowed(request.tool_choice),
        params=_params(request),
        is_streamed=bool(request.stream),
        is_usage_streamed=bool(options and options.include_usage),
        has_logprobs=bool(request.logprobs),
    )


def _decode(body: bytes) -> _Request:
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        raise invalid(f"{param or 'body'}: {what}", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error


def _refuse_unsupported(request: _Request) -> None:
    for name, why in _UNSUPPORTED.items():
        if getattr(request, name) not in (None, False, [], {}):
            raise invalid(f"{name} is not supported: {why}", name, "unsupported_parameter")
    if request.n not in (None, 1):
        raise invalid(f"n: expected 1, got {request.n}; start one rollout for each sample", "n")
    if request.top_logprobs not in (None, 0):
        raise invalid("top_logprobs is not supported: only the sampled token's", "top_logprobs")
    if request.parallel_tool_calls is False:
        raise invalid(
            "parallel_tool_calls: false is not supported: the model decides how many calls it makes",
            "parallel_tool_calls",
        )
    if (request.response_format or {}).get("type", "text") != "text":
        raise invalid(
            "response_format: only `text` is supported: output is not constrained",
            "response_format",
        )
    if set(request.modalities or ()) - {"text"}:
        raise invalid("modalities: only `text` is generated", "modalities")


def _is_calling_allowed(tool_choice: Any) -> bool:
    if tool_choice in (None, "auto"):
        return True
    if tool_choice == "none":
        return False
    raise invalid(
        "tool_choice: expected `auto` or `none`; a call cannot be forced without constraining the "
        "output",
        "tool_choice",
    )


def _params(request: _Request) -> CallParams:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if any(not text for text in stop):
        raise invalid("stop: a stop sequence is empty", "stop")
    return CallParams(
        max_tokens=_max_tokens(request),
        temperature=_in_range(request, "temperature", 0.0, 2.0),
        seed=request.seed,
        stop=tuple(stop),
        top_p=_in_range(request, "top_p", 0.0, 1.0),
        top_k=request.top_k,
        min_p=_in_range(request, "min_p", 0.0, 1.0),
        presence_penalty=_in_range(request, "presence_penalty", -2.0, 2.0),
        frequency_penalty=_in_range(request, "frequency_penalty", -2.0, 2.0),
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
    )


def _max_tokens(request: _Request) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value: int | None = getattr(request, name)
        if value is None:
            continue
        if value < 1:
            raise invalid(f"{name}: expected at least 1, got {value}", name)
        return value
    return None


def _in_range(request: _Request, name: str, low: float, high: float) -> float | None:
    value: float | None = getattr(request, name)
    if value is not None and not low <= value <= high:
        raise invalid(f"{name}: expected {low:g} to {high:g}, got {value:g}", name)
    return value


def answer_body(answer: Answer) -> bytes:
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


def answer_events(answer: Answer, is_usage_included: bool) -> Iterator[bytes]:
    """The response as chunks: role, reasoning, content, each call, the end, usage, `[DONE]`."""
    yield _chunk(answer, {"role": "assistant", "content": ""})
    if answer.reply.reasoning:
        yield _chunk(answer, _reasoning(answer))
    if answer.reply.content or answer.logprobs is not None:
        yield _chunk(answer, {"content": answer.reply.content}, logprobs=_logprobs(answer))
    for index, call in enumerate(answer.reply.tool_calls):
        whole = {"index": index, **_tool_call(call)}
        opening = whole | {"function": {"name": call.name, "arguments": ""}}
        yield _chunk(answer, {"tool_calls": [opening]})
        arguments = {"index": index, "function": {"arguments": arguments_text(call)}}
        yield _chunk(answer, {"tool_calls": [arguments]})
    yield _chunk(answer, {}, finish_reason=finish_reason(answer))
    if is_usage_included:
        last = {**_envelope(answer, "chat.completion.chunk"), "choices": []}
        yield _event(last | {"usage": _usage(answer)})
    yield _DONE


def finish_reason(answer: Answer) -> Literal["tool_calls", "length", "stop"]:
    """A reply that calls tools says so even when it was cut after the calls."""
    if answer.reply.tool_calls:
        return "tool_calls"
    return "length" if answer.finish_reason == "length" else "stop"


def arguments_text(call: ToolCall) -> str:
    """Arguments as the model meant them: its order and its types, without spacing.

    >>> arguments_text(ToolCall(name="write", arguments={"text": "a", "path": "b"}))
    '{"text":"a","path":"b"}'
    """
    if isinstance(call.arguments, str):
        return call.arguments
    return msgspec.json.encode(call.arguments).decode()


def error_body(refusal: Refusal, request_id: str) -> bytes:
    """OpenAI's error object, with the request id that the log knows it by."""
    error = {
        "message": refusal.message,
        "type": _ERROR_TYPES[refusal.kind],
        "param": refusal.param,
        "code": refusal.code,
        "request_id": request_id,
    }
    return msgspec.json.encode({"error": error})


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

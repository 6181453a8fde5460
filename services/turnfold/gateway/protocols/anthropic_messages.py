"""Anthropic messages: request to `ModelCall`, `Answer` to response or stream, errors.

Every field that changes what is sampled is honoured or refused by name. `thinking` and
`output_config.effort` are wishes that only a model trained for them understands: whether this one
thinks is for its template to say, and `thinking.display` decides what is shown of it. Fields that
change nothing here (`metadata`, `service_tier`, `cache_control`, …) and fields that nobody knows
are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from turnfold.gateway.calls import Answer, ModelCall
from turnfold.gateway.protocols.anthropic_content import read_conversation, read_tools
from turnfold.gateway.protocols.request_fields import (
    SamplingFields,
    at_least_one,
    decode_request,
    refuse_unsupported,
    sampling_params,
)
from turnfold.gateway.protocols.sealed_reasoning import seal
from turnfold.gateway.protocols.server_sent_events import named_event
from turnfold.gateway.protocols.tool_arguments import arguments_object
from turnfold.gateway.refusals import ContextLengthExceeded, Kind, Refusal, invalid

NAME = "anthropic_messages"
KEEPALIVE = named_event({"type": "ping"})

_ERROR_TYPES: dict[Kind, str] = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "conflict": "conflict_error",
    "too_large": "request_too_large",
    "rate_limited": "rate_limit_error",
    "bad_gateway": "api_error",
    "unavailable": "overloaded_error",
    "internal": "api_error",
}


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
    container: Any = None
    mcp_servers: Any = None
    output_format: Any = None


class _Request(_Prompt, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None


_UNSUPPORTED = {
    "container": "there is no code execution",
    "mcp_servers": "connect to them in the agent and offer their tools",
    "output_format": "output is not constrained",
}

_request_decoder = msgspec.json.Decoder(_Request)
_prompt_decoder = msgspec.json.Decoder(_Prompt)


def read_call(body: bytes) -> ModelCall:
    """The request as a call. Raises Refusal naming the field that is wrong or not supported."""
    request = decode_request(body, _request_decoder)
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
    )


def read_count(body: bytes) -> ModelCall:
    """The request of `count_tokens` as the call whose prompt is counted. Raises Refusal."""
    return _prompt_call(decode_request(body, _prompt_decoder))


def _prompt_call(request: _Prompt) -> ModelCall:
    refuse_unsupported(request, _UNSUPPORTED)
    _refuse_constrained(request.output_config or {})
    _refuse_edits(request.context_management or {})
    return ModelCall(
        protocol=NAME,
        model=request.model,
        messages=read_conversation(request.system, request.messages),
        tools=read_tools(request.tools or ()),
        is_calling_allowed=_is_calling_allowed(request.tool_choice or {"type": "auto"}),
        is_reasoning_hidden=_is_reasoning_hidden(request.thinking or {"type": "disabled"}),
    )


def _refuse_constrained(output_config: dict[str, Any]) -> None:
    if output_config.get("format") is not None:
        raise invalid(
            "output_config.format is not supported: output is not constrained",
            "output_config.format",
        )


def _refuse_edits(context_management: dict[str, Any]) -> None:
    for edit in context_management.get("edits") or ():
        keeps_all = isinstance(edit, dict) and edit.get("keep") == "all"
        if not (keeps_all and str(edit.get("type")).startswith("clear_thinking")):
            raise invalid(
                "context_management.edits is not supported: the history is the agent's to edit",
                "context_management.edits",
            )


def _is_calling_allowed(tool_choice: dict[str, Any]) -> bool:
    if tool_choice.get("disable_parallel_tool_use"):
        raise invalid(
            "tool_choice.disable_parallel_tool_use is not supported: the model decides how many "
            "calls it makes",
            "tool_choice.disable_parallel_tool_use",
        )
    if tool_choice.get("type") not in ("auto", "none"):
        raise invalid(
            "tool_choice.type: expected `auto` or `none`; a call cannot be forced without "
            "constraining the output",
            "tool_choice.type",
        )
    return bool(tool_choice["type"] == "auto")


def _is_reasoning_hidden(thinking: dict[str, Any]) -> bool:
    if thinking.get("type") not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise invalid(
            f"thinking.type: {thinking.get('type')!r} is not supported here", "thinking.type"
        )
    return thinking.get("display") == "omitted"


def answer_body(answer: Answer, call: ModelCall) -> bytes:
    """The whole response."""
    reason = stop_reason(answer)
    return msgspec.json.encode(
        {
            **_envelope(answer),
            "content": list(_blocks(answer, call)),
            "stop_reason": reason,
            "stop_sequence": answer.stop_reason if reason == "stop_sequence" else None,
            "usage": _usage(answer, answer.num_output_tokens),
        }
    )


def answer_events(answer: Answer, call: ModelCall) -> Iterator[bytes]:
    """The response as events: its start, each block, the reason that it ended, its end."""
    message = {
        **_envelope(answer),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer, 0),
    }
    yield named_event({"type": "message_start", "message": message})
    yield KEEPALIVE
    for index, block in enumerate(_blocks(answer, call)):
        yield from _block_events(index, block)
    reason = stop_reason(answer)
    sequence = answer.stop_reason if reason == "stop_sequence" else None
    yield named_event(
        {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": _usage(answer, answer.num_output_tokens),
        }
    )
    yield named_event({"type": "message_stop"})


def _block_events(index: int, block: dict[str, Any]) -> Iterator[bytes]:
    """A block that begins empty, what it holds, its end."""

    def delta(kind: str, **content: str) -> bytes:
        held = {"type": kind, **content}
        return named_event({"type": "content_block_delta", "index": index, "delta": held})

    def start(**empty: Any) -> bytes:
        begun = block | empty
        return named_event({"type": "content_block_start", "index": index, "content_block": begun})

    match block["type"]:
        case "thinking":
            yield start(thinking="", signature="")
            if block["thinking"]:
                yield delta("thinking_delta", thinking=block["thinking"])
            yield delta("signature_delta", signature=block["signature"])
        case "tool_use":
            yield start(input={})
            arguments = msgspec.json.encode(block["input"]).decode()
            yield delta("input_json_delta", partial_json=arguments)
        case _:
            yield start(text="")
            yield delta("text_delta", text=block["text"])
    yield named_event({"type": "content_block_stop", "index": index})


def stop_reason(answer: Answer) -> Literal["tool_use", "max_tokens", "stop_sequence", "end_turn"]:
    """A reply that calls tools says so even when it was cut after the calls."""
    if answer.reply.tool_calls:
        return "tool_use"
    if answer.finish_reason == "length":
        return "max_tokens"
    return "stop_sequence" if isinstance(answer.stop_reason, str) else "end_turn"


def _blocks(answer: Answer, call: ModelCall) -> Iterator[dict[str, Any]]:
    """Thinking, text, calls; a reply that says nothing has an empty text, so that it comes back."""
    reply = answer.reply
    if reply.reasoning:
        shown = "" if call.is_reasoning_hidden else reply.reasoning
        yield {"type": "thinking", "thinking": shown, "signature": seal(reply.reasoning)}
    if reply.content or not reply.tool_calls:
        yield {"type": "text", "text": reply.content}
    for made in reply.tool_calls:
        arguments = arguments_object(made)
        yield {"type": "tool_use", "id": made.id, "name": made.name, "input": arguments}


def count_body(num_prompt_tokens: int) -> bytes:
    """The answer of `count_tokens`."""
    return msgspec.json.encode({"input_tokens": num_prompt_tokens})


def error_body(refusal: Refusal, request_id: str) -> bytes:
    """Anthropic's error object, with the request id that the log knows it by."""
    return msgspec.json.encode(_error(refusal, request_id))


def error_event(refusal: Refusal, request_id: str) -> bytes:
    """An error in a stream that has begun: SDKs raise it instead of ending quietly."""
    return named_event(_error(refusal, request_id))


def _error(refusal: Refusal, request_id: str) -> dict[str, Any]:
    message = refusal.message
    if isinstance(refusal, ContextLengthExceeded):
        # Agents look for these words to know that they must compact the conversation.
        message = (
            f"prompt is too long: {refusal.num_prompt_tokens} tokens > {refusal.limit} maximum"
        )
    error = {"type": _ERROR_TYPES[refusal.kind], "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def _envelope(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.turn_id}",
        "type": "message",
        "role": "assistant",
        "model": answer.model,
    }


def _usage(answer: Answer, num_output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": answer.num_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": num_output_tokens,
    }

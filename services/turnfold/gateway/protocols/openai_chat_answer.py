"""Chat completions: an answer as one response, or as chunks while it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from turnfold.gateway.calls import Answer, AnswerHead, AnswerPiece, ModelCall, TokenLogprob
from turnfold.gateway.protocols.answer_stream import whole
from turnfold.gateway.protocols.openai_errors import error_object
from turnfold.gateway.protocols.tool_arguments import arguments_text
from turnfold.gateway.refusals import Refusal
from turnfold.schemas.messages import ToolCall

_DONE = b"data: [DONE]\n\n"


def answer_body(answer: Answer, call: ModelCall) -> bytes:
    """The whole response."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.reply.content or None,
        "refusal": None,
    }
    if answer.reply.reasoning:
        message["reasoning_content"] = answer.reply.reasoning
    if answer.reply.tool_calls:
        message["tool_calls"] = [_tool_call(call) for call in answer.reply.tool_calls]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None if answer.logprobs is None else _logprobs(answer.logprobs),
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
    return whole(begin_stream(answer, call), answer)


def begin_stream(head: AnswerHead, call: ModelCall) -> ChatStream:
    """The chunks of a response that is yet to come."""
    return ChatStream(head, call)


class ChatStream:
    """Chunks of one response; see AnswerStream. Text and calls come in any order."""

    def __init__(self, head: AnswerHead, call: ModelCall) -> None:
        self._envelope = _envelope(head, "chat.completion.chunk")
        self._is_usage_streamed = call.is_usage_streamed
        self._num_calls = 0

    def begin(self) -> Iterator[bytes]:
        """The role."""
        yield self._chunk({"role": "assistant", "content": ""})

    def add(self, piece: AnswerPiece) -> Iterator[bytes]:
        """A chunk of text; for a call one with its name and one with its arguments."""
        if piece.tool_call is not None:
            yield from self._call_chunks(piece.tool_call)
        elif piece.reasoning:
            yield self._chunk({"reasoning_content": piece.reasoning}, logprobs=piece.logprobs)
        else:
            yield self._chunk({"content": piece.content}, logprobs=piece.logprobs)

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The finish reason, the usage if it was asked for, `[DONE]`."""
        yield self._chunk({}, finish_reason=finish_reason(answer))
        if self._is_usage_streamed:
            yield _event({**self._envelope, "choices": [], "usage": _usage(answer)})
        yield _DONE

    def error(self, refusal: Refusal, request_id: str) -> bytes:
        """The error; no `[DONE]` follows."""
        return error_event(refusal, request_id)

    def _call_chunks(self, call: ToolCall) -> Iterator[bytes]:
        whole_call = {"index": self._num_calls, **_tool_call(call)}
        opening = whole_call | {"function": {"name": call.name, "arguments": ""}}
        yield self._chunk({"tool_calls": [opening]})
        arguments = {"index": self._num_calls, "function": {"arguments": arguments_text(call)}}
        yield self._chunk({"tool_calls": [arguments]})
        self._num_calls += 1

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        finish_reason: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": _logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }
        return _event({**self._envelope, "choices": [choice]})


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


def _envelope(head: AnswerHead, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{head.turn_id}",
        "object": kind,
        "created": head.created,
        "model": head.model,
        "service_tier": None,
        "system_fingerprint": None,
    }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments_text(call)}
    return {"id": call.id, "type": "function", "function": function}


def _usage(answer: Answer) -> dict[str, Any]:
    usage: dict[str, Any] = {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_output_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_output_tokens,
        "completion_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
    }
    if answer.num_cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": answer.num_cached_tokens}
    return usage


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}

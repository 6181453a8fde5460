"""Anthropic messages: an answer as one response, or as events while it comes, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from turnfold.gateway.calls import Answer, AnswerHead, AnswerPiece, ModelCall
from turnfold.gateway.protocols.answer_stream import whole
from turnfold.gateway.protocols.sealed_reasoning import seal
from turnfold.gateway.protocols.server_sent_events import named_event
from turnfold.gateway.protocols.tool_arguments import arguments_object
from turnfold.gateway.refusals import ContextLengthExceeded, Kind, Refusal
from turnfold.schemas.messages import ToolCall

PING = named_event({"type": "ping"})

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


def answer_body(answer: Answer, call: ModelCall) -> bytes:
    """The whole response."""
    return msgspec.json.encode(
        {
            **_envelope(answer),
            "content": list(_blocks(answer, call)),
            **_ending(answer),
            "usage": _usage_of(answer),
        }
    )


def _blocks(answer: Answer, call: ModelCall) -> Iterator[dict[str, Any]]:
    """Thinking, text, calls; a reply that says nothing has an empty text, so that it comes back."""
    reply = answer.reply
    if reply.reasoning:
        shown = "" if call.is_reasoning_hidden else reply.reasoning
        yield {"type": "thinking", "thinking": shown, "signature": seal(reply.reasoning)}
    if reply.content or not reply.tool_calls:
        yield {"type": "text", "text": reply.content}
    for made in reply.tool_calls:
        yield _tool_use(made, arguments_object(made))


def answer_events(answer: Answer, call: ModelCall) -> Iterator[bytes]:
    """The response as events: its start, each block, the reason that it ended, its end."""
    return whole(begin_stream(answer, call), answer)


def begin_stream(head: AnswerHead, call: ModelCall) -> MessageStream:
    """The events of a response that is yet to come."""
    return MessageStream(head, call)


class MessageStream:
    """Events of one response; see AnswerStream.

    Blocks come one after another, in the order in which the model writes them: text that follows a
    call is a block of its own.
    """

    def __init__(self, head: AnswerHead, call: ModelCall) -> None:
        self._head = head
        self._is_reasoning_hidden = call.is_reasoning_hidden
        self._index = -1
        self._open: Literal["thinking", "text"] | None = None
        self._reasoning: list[str] = []
        """Of the thinking block that is open."""
        self._has_said = False

    def begin(self) -> Iterator[bytes]:
        """The message without content."""
        message = {
            **_envelope(self._head),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self._head.num_prompt_tokens, 0),
        }
        yield named_event({"type": "message_start", "message": message})
        yield PING

    def add(self, piece: AnswerPiece) -> Iterator[bytes]:
        """More of the block that is open, or the next block."""
        if piece.tool_call is not None:
            yield from self._call_events(piece.tool_call)
        elif piece.reasoning:
            yield from self._thinking_events(piece.reasoning)
        elif piece.content:
            yield from self._text_events(piece.content)

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The end of the last block, the reason, the end."""
        if not self._has_said:
            yield from self._text_events("")
        yield from self._close()
        yield named_event(
            {
                "type": "message_delta",
                "delta": _ending(answer),
                "usage": _usage_of(answer),
            }
        )
        yield named_event({"type": "message_stop"})

    def error(self, refusal: Refusal, request_id: str) -> bytes:
        """The error; neither a stop reason nor `message_stop` follows."""
        return error_event(refusal, request_id)

    def _thinking_events(self, text: str) -> Iterator[bytes]:
        if self._open != "thinking":
            yield from self._start({"type": "thinking", "thinking": "", "signature": ""})
            self._open = "thinking"
        self._reasoning.append(text)
        if not self._is_reasoning_hidden:
            yield self._delta({"type": "thinking_delta", "thinking": text})

    def _text_events(self, text: str) -> Iterator[bytes]:
        if self._open != "text":
            yield from self._start({"type": "text", "text": ""})
            self._open = "text"
        self._has_said = True
        yield self._delta({"type": "text_delta", "text": text})

    def _call_events(self, call: ToolCall) -> Iterator[bytes]:
        self._has_said = True
        arguments = msgspec.json.encode(arguments_object(call)).decode()
        yield from self._start(_tool_use(call, {}))
        yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        yield self._stop()

    def _start(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._index += 1
        begun = {"type": "content_block_start", "index": self._index, "content_block": block}
        yield named_event(begun)

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            signature = seal("".join(self._reasoning))
            self._reasoning.clear()
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._open is not None:
            self._open = None
            yield self._stop()

    def _delta(self, held: dict[str, str]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": held})

    def _stop(self) -> bytes:
        return named_event({"type": "content_block_stop", "index": self._index})


def _tool_use(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _ending(answer: Answer) -> dict[str, Any]:
    reason = stop_reason(answer)
    sequence = answer.stop_reason if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": sequence}


def stop_reason(answer: Answer) -> Literal["tool_use", "max_tokens", "stop_sequence", "end_turn"]:
    """A reply that calls tools says so even when it was cut after the calls."""
    if answer.reply.tool_calls:
        return "tool_use"
    if answer.finish_reason == "length":
        return "max_tokens"
    return "stop_sequence" if isinstance(answer.stop_reason, str) else "end_turn"


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


def _envelope(head: AnswerHead) -> dict[str, Any]:
    return {
        "id": f"msg_{head.turn_id}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
    }


def _usage_of(answer: Answer) -> dict[str, int]:
    return _usage(answer.num_prompt_tokens, answer.num_output_tokens, answer.num_cached_tokens or 0)


def _usage(
    num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int = 0
) -> dict[str, int]:
    """The parts of the prompt add up to it: `input_tokens` does not count what was cached."""
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }

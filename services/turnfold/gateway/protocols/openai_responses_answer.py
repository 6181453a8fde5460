"""Responses: an answer as one response, or as numbered events while it comes, and errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import msgspec

from turnfold.gateway.calls import Answer, AnswerHead, AnswerPiece, ModelCall, pieces_of
from turnfold.gateway.protocols.answer_stream import whole
from turnfold.gateway.protocols.openai_errors import error_object
from turnfold.gateway.protocols.openai_items import flat_tool
from turnfold.gateway.protocols.openai_responses_items import Data, OutputItems
from turnfold.gateway.protocols.server_sent_events import named_event
from turnfold.gateway.refusals import Refusal

ID_PREFIX = "resp_"
"""An id of a response is this and the id of its turn."""


def answer_body(answer: Answer, call: ModelCall) -> bytes:
    """The whole response."""
    items = OutputItems(answer, call)
    events = chain.from_iterable(map(items.add, pieces_of(answer)))
    for _ in chain(events, items.end(answer)):
        pass  # only the items are of interest
    return msgspec.json.encode(_finished(answer, answer, call, items.done))


def answer_events(answer: Answer, call: ModelCall) -> Iterator[bytes]:
    """The response as numbered events: its start, each item with its parts, its end."""
    return whole(begin_stream(answer, call), answer)


def begin_stream(head: AnswerHead, call: ModelCall) -> ResponseStream:
    """The events of a response that is yet to come."""
    return ResponseStream(head, call)


class ResponseStream:
    """Events of one response; see AnswerStream."""

    def __init__(self, head: AnswerHead, call: ModelCall) -> None:
        self._head = head
        self._call = call
        self._items = OutputItems(head, call)
        self._num_events = 0

    def begin(self) -> Iterator[bytes]:
        """The response without output."""
        begun = _response(self._head, self._call)
        yield from self._numbered(
            {"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")
        )

    def add(self, piece: AnswerPiece) -> Iterator[bytes]:
        """More of the item that is open, or the next item."""
        yield from self._numbered(self._items.add(piece))

    def end(self, answer: Answer) -> Iterator[bytes]:
        """The end of the last text, the calls, the whole response."""
        yield from self._numbered(self._items.end(answer))
        finished = _finished(self._head, answer, self._call, self._items.done)
        last = {"type": f"response.{finished['status']}", "response": finished}
        yield from self._numbered([last])

    def error(self, refusal: Refusal, request_id: str) -> bytes:
        """The error; the response is not completed."""
        (event,) = self._numbered([_error(refusal, request_id)])
        return event

    def _numbered(self, datas: Iterable[Data]) -> Iterator[bytes]:
        for data in datas:
            yield named_event(data | {"sequence_number": self._num_events})
            self._num_events += 1


def _finished(head: AnswerHead, answer: Answer, call: ModelCall, output: list[Data]) -> Data:
    is_cut = answer.finish_reason == "length"
    return _response(head, call) | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "usage": _usage(answer),
    }


def _response(head: AnswerHead, call: ModelCall) -> Data:
    """The response before its first item."""
    return {
        "id": ID_PREFIX + head.turn_id,
        "object": "response",
        "created_at": head.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": call.messages[0].content if call.has_instructions else None,
        "max_output_tokens": call.params.max_tokens,
        "metadata": {},
        "model": head.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": _response_id(call.previous_turn_id),
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": call.params.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto" if call.is_calling_allowed else "none",
        "tools": [flat_tool(tool) for tool in call.tools],
        "top_p": call.params.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _response_id(turn_id: str) -> str | None:
    return ID_PREFIX + turn_id if turn_id else None


def _usage(answer: Answer) -> dict[str, Any]:
    """Details that OpenAI's SDK expects and nobody told are 0."""
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": answer.num_cached_tokens or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": answer.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
        "total_tokens": answer.num_prompt_tokens + answer.num_output_tokens,
    }


def error_body(refusal: Refusal, request_id: str) -> bytes:
    """OpenAI's error object, with the request id that the log knows it by."""
    return msgspec.json.encode({"error": error_object(refusal, request_id)})


def error_event(refusal: Refusal, request_id: str) -> bytes:
    """An error in a stream in which nothing was said yet."""
    return named_event(_error(refusal, request_id) | {"sequence_number": 0})


def _error(refusal: Refusal, request_id: str) -> Data:
    """The documented fields are for clients that read events; SDKs raise what is under `error`."""
    return {
        "type": "error",
        "code": refusal.code,
        "message": refusal.message,
        "param": refusal.param,
        "error": error_object(refusal, request_id),
    }

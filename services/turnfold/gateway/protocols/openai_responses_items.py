"""Responses: the items of an answer, and the events that tell of them while they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from turnfold.gateway.calls import Answer, AnswerHead, AnswerPiece, ModelCall, TokenLogprob
from turnfold.gateway.protocols.sealed_reasoning import seal
from turnfold.gateway.protocols.tool_arguments import arguments_text
from turnfold.schemas.messages import ToolCall

Data = dict[str, Any]
"""An event without its number."""

_PREFIXES = {"reasoning": "rs", "message": "msg"}
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}


class OutputItems:
    """Turns the pieces of an answer into items.

        reasoning, content, call, content      items: reasoning, message, function_call

    Calls wait for the end of the reply: a client that sends the items back, perhaps without their
    ids, can then be understood to mean one turn. A reply that says nothing has an empty message, so
    that it comes back.
    """

    def __init__(self, head: AnswerHead, call: ModelCall) -> None:
        self.done: list[Data] = []
        self._turn_id = head.turn_id
        self._is_sealed = call.is_reasoning_sealed
        self._open: _TextItem | None = None
        self._num_begun = {"reasoning": 0, "message": 0}
        self._calls: list[ToolCall] = []
        self._logprobs: list[TokenLogprob] = []
        """Of tokens since the last text of the message."""

    def add(self, piece: AnswerPiece) -> Iterator[Data]:
        """More of the item that is open, or the next item."""
        self._logprobs += piece.logprobs
        if piece.tool_call is not None:
            self._calls.append(piece.tool_call)
        elif piece.reasoning:
            yield from self._add_text("reasoning", piece.reasoning)
        elif piece.content:
            yield from self._add_text("message", piece.content)

    def end(self, answer: Answer) -> Iterator[Data]:
        """The end of the item that is open, the calls."""
        is_silent = not self._num_begun["message"] and not self._calls
        if is_silent or (self._logprobs and self._is_open("message")):
            yield from self._add_text("message", "")
        yield from self._close("incomplete" if answer.finish_reason == "length" else "completed")
        for number, call in enumerate(self._calls):
            yield from self._call_events(number, call)

    def _add_text(self, kind: Literal["reasoning", "message"], text: str) -> Iterator[Data]:
        if not self._is_open(kind):
            yield from self._close("completed")
            number = self._num_begun[kind]
            self._num_begun[kind] += 1
            suffix = f"_{number}" if number else ""
            item_id = f"{_PREFIXES[kind]}_{self._turn_id}{suffix}"
            self._open = _TextItem(kind, item_id, len(self.done), is_sealed=self._is_sealed)
            yield from self._open.begin()
        assert self._open is not None
        if kind == "message":
            yield self._open.add(text, self._logprobs)
            self._logprobs = []
        else:
            yield self._open.add(text, ())

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open.kind == kind

    def _close(self, status: str) -> Iterator[Data]:
        if self._open is not None:
            item = self._open.item(status)
            yield from self._open.end(item)
            self.done.append(item)
            self._open = None

    def _call_events(self, number: int, call: ToolCall) -> Iterator[Data]:
        arguments = arguments_text(call)
        item: Data = {
            "id": f"fc_{self._turn_id}_{number}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": arguments,
            "status": "completed",
        }
        index = len(self.done)
        place = {"output_index": index, "item_id": item["id"]}
        kind = "response.function_call_arguments"
        yield _added(index, item | {"arguments": "", "status": "in_progress"})
        yield {"type": f"{kind}.delta", **place, "delta": arguments}
        yield {"type": f"{kind}.done", **place, "arguments": arguments, "name": call.name}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
        self.done.append(item)


class _TextItem:
    """A reasoning item or a message while it is written; it has one part."""

    def __init__(
        self, kind: Literal["reasoning", "message"], item_id: str, index: int, *, is_sealed: bool
    ) -> None:
        self.kind = kind
        self._id = item_id
        self._index = index
        self._is_sealed = is_sealed
        self._place = {"output_index": index, "item_id": item_id, "content_index": 0}
        self._event = f"response.{_PARTS[kind]}"
        self._texts: list[str] = []
        self._logprobs: list[Data] = []

    def begin(self) -> Iterator[Data]:
        yield _added(self._index, self.item("in_progress") | {"content": []})
        yield {"type": "response.content_part.added", **self._place, "part": self._part("", [])}

    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> Data:
        told = _logprobs(logprobs)
        self._texts.append(text)
        self._logprobs += told
        return {"type": f"{self._event}.delta", **self._place, "delta": text} | self._given(told)

    def end(self, item: Data) -> Iterator[Data]:
        (part,) = item["content"]
        whole = {"text": part["text"], **self._given(self._logprobs)}
        yield {"type": f"{self._event}.done", **self._place, **whole}
        yield {"type": "response.content_part.done", **self._place, "part": part}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}

    def item(self, status: str) -> Data:
        """The item as far as it is written."""
        text = "".join(self._texts)
        content = [self._part(text, self._logprobs)]
        if self.kind == "message":
            return {
                "id": self._id,
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": content,
            }
        return {
            "id": self._id,
            "type": "reasoning",
            "summary": [],
            "content": content,
            "encrypted_content": seal(text) if self._is_sealed and text else None,
            "status": status,
        }

    def _part(self, text: str, logprobs: list[Data]) -> Data:
        part: Data = {"type": _PARTS[self.kind], "text": text}
        if self.kind == "message":
            part["annotations"] = []
        return part | self._given(logprobs)

    def _given(self, logprobs: list[Data]) -> Data:
        # Only text that the client reads has logprobs.
        return {"logprobs": logprobs} if self.kind == "message" else {}


def _added(index: int, item: Data) -> Data:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def _logprobs(tokens: Sequence[TokenLogprob]) -> list[Data]:
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in tokens
    ]

"""The parts of a reply in the order they are read, with the white space between them settled.

A template writes line breaks of its own around reasoning and calls. Those are taken off, so that a
message rendered again differs from what was sampled as little as it can.
"""

from __future__ import annotations

from itertools import groupby

from turnfold.gateway.parsing.replies import (
    CallMade,
    ContentText,
    MalformedCall,
    MalformedReason,
    ReasoningSpan,
    ReasoningText,
    ReplyPart,
)
from turnfold.schemas.messages import ToolCall


class ReplyWriter:
    """Collects parts; `take` hands over those that are settled.

    `newlines_before_call` of the text before the first call belong to the template. Blank text
    beside calls is dropped; other text around calls is joined by a line break.
    """

    def __init__(self, *, newlines_before_call: int, is_content_flush: bool) -> None:
        self._newlines_before_call = newlines_before_call
        self._is_content_flush = is_content_flush
        """Whether line breaks between reasoning and content are the template's."""
        self._parts: list[ReplyPart] = []
        self._reasoning = _Piece(is_flush=True)
        self._content = _Piece(is_flush=False)
        self._has_reasoning = False
        self._has_content = False
        self._num_calls = 0
        self._rehearsed: list[tuple[ToolCall, int, int]] = []

    def reasoning(self, text: str) -> None:
        """More reasoning; line breaks at its edges are left out."""
        is_joined = self._has_reasoning and not self._reasoning.is_begun
        settled = self._reasoning.add(text)
        if settled:
            self._has_reasoning = True
            self._parts.append(ReasoningText(text="\n" + settled if is_joined else settled))

    def reasoned(self, start: int, end: int) -> None:
        """The sampled text from `start` to `end` was reasoning."""
        if start < end:
            self._parts.append(ReasoningSpan(start=start, end=end))

    def end_reasoning(self) -> None:
        """The thinking block was closed."""
        self._content = _Piece(is_flush=self._is_content_flush)

    def content(self, text: str) -> None:
        """More content."""
        is_joined = self._has_content and not self._content.is_begun
        settled = self._content.add(text)
        if settled:
            self._write_content("\n" + settled if is_joined else settled)

    def new_message(self) -> None:
        """What follows is a message of its own: a line break goes between it and what was said."""
        if self._reasoning.is_begun:
            self._reasoning = _Piece(is_flush=True)
        if self._content.is_begun:
            self._content = _Piece(is_flush=True)

    def call(self, call: ToolCall) -> None:
        """A call that is made."""
        if self._num_calls == 0 and self._content.is_begun:
            held = self._content.held()
            self._write_content(held[: max(0, len(held) - self._newlines_before_call)])
        self._content = _Piece(is_flush=True)
        self._parts.append(CallMade(index=self._num_calls, call=call))
        self._num_calls += 1

    def rehearsed(self, call: ToolCall, start: int, end: int) -> None:
        """A readable call inside the reasoning; the end of the reply decides about it."""
        self._rehearsed.append((call, start, end))

    def malformed(self, reason: MalformedReason, start: int, end: int) -> None:
        """A call that is not made; its text is written apart from this."""
        self._parts.append(MalformedCall(reason=reason, start=start, end=end))

    def end(self) -> None:
        """The reply is over.

        A call inside the reasoning was meant when nothing else came of the reply; otherwise the
        model went on without it.
        """
        is_meant = self._num_calls == 0 and not self._has_content
        for call, start, end in self._rehearsed:
            if is_meant:
                self.call(call)
            else:
                self.malformed("inside_reasoning", start, end)
        if self._num_calls == 0:
            self._write_content(self._content.held())

    def take(self) -> list[ReplyPart]:
        """The parts since the last time; neighbouring texts are one."""
        taken: list[ReplyPart] = []
        for kind, group in groupby(self._parts, type):
            parts = list(group)
            if kind is ReasoningText or kind is ContentText:
                text = "".join(part.text for part in parts if isinstance(part, kind))
                taken.append(kind(text=text))
            else:
                taken += parts
        self._parts.clear()
        return taken

    def _write_content(self, text: str) -> None:
        if text:
            self._has_content = self._has_content or bool(text.strip())
            self._parts.append(ContentText(text=text))


class _Piece:
    """A run of text. Blank text at its beginning and line breaks at its end wait for more."""

    def __init__(self, *, is_flush: bool) -> None:
        self.is_begun = False
        self._is_flush = is_flush
        """Whether line breaks at the beginning are left out."""
        self._held: list[str] = []

    def add(self, text: str) -> str:
        """What is settled by more text."""
        if not self.is_begun:
            if self._is_flush and not self._held:
                text = text.lstrip("\n")
            self.is_begun = bool(text.strip())
        body = text.rstrip("\n") if self.is_begun else ""
        if not body:
            if text:
                self._held.append(text)
            return ""
        settled = "".join([*self._held, body])
        self._held = [text[len(body) :]]
        return settled

    def held(self) -> str:
        """The text that still waits."""
        return "".join(self._held)

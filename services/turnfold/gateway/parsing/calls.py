"""What a family says about its calls, and where the calls go that are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from turnfold.gateway.parsing.broken import BrokenCall
from turnfold.gateway.parsing.replies import Situation
from turnfold.gateway.parsing.source import Marks, Reading, Source
from turnfold.gateway.parsing.writer import ReplyWriter
from turnfold.schemas.messages import Tool, ToolCall

_MAX_BROKEN = 32
"""A broken call may cost a search to the end of the text; a bounded number keeps the whole linear."""

ReadCall = Callable[[Source, int, tuple[Tool, ...]], Reading[tuple[ToolCall, int]]]
"""(source, where the call begins, tools) -> the call and its end. Raises BrokenCall."""


def _read_nothing(source: Source, calls: Calls) -> Reading[None]:
    yield from ()
    raise AssertionError("a grammar with openers has to read calls")


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """How a family writes; the markers are text as the tokenizer decodes them."""

    openers: tuple[str, ...] = ()
    """Each begins a call or a block of calls."""
    read_calls: Callable[[Source, Calls], Reading[None]] = _read_nothing
    """Called with `source.at` at an opener, which it moves behind what it has read."""
    thinking: tuple[str, str] | None = ("<think>", "</think>")
    controls: tuple[str, ...] = ()
    """Control tokens: never shown to a client, wherever they stand."""
    newlines_before_call: int = 1
    is_content_flush: bool = True
    """Line breaks between thinking and content are the template's."""


class Calls:
    """Where a family puts the calls that it reads, in the thinking or in the content."""

    def __init__(self, grammar: Grammar, situation: Situation, writer: ReplyWriter) -> None:
        self.tools = situation.tools
        self._is_allowed = situation.is_calling_allowed
        self._writer = writer
        self._grammar = grammar
        self._controls = Marks(grammar.controls).pattern
        self._num_broken = 0
        self._unread_from: int | None = None
        self.place: Literal["reasoning", "content"] = "content"

    def marks(self, *others: str) -> Marks:
        """What ends plain text: the others, control tokens, and openers when calls are allowed."""
        openers = self._grammar.openers if self._is_allowed else ()
        return Marks((*others, *openers, *self._grammar.controls))

    def is_read(self, source: Source) -> bool:
        """Whether a call is read that begins at `source.at`; noted when too many were broken."""
        if not self._is_allowed or self._num_broken < _MAX_BROKEN:
            return self._is_allowed
        if self._unread_from is None:
            self._unread_from = source.at
        return False

    def pass_over(self, source: Source, mark: str) -> None:
        """The mark at `source.at` begins no call: it stays text unless it is a control token."""
        source.at += len(mark)
        if mark not in self._grammar.controls:
            self.write(mark)

    def end(self, source: Source) -> None:
        """Report the calls that were not read because too many before them were broken."""
        if self._unread_from is not None:
            self._writer.malformed("too_many", self._unread_from, source.length)

    def write(self, text: str) -> None:
        """Plain text."""
        if self.place == "reasoning":
            self._writer.reasoning(text)
        else:
            self._writer.content(text)

    def read(
        self,
        source: Source,
        read_call: ReadCall,
        *,
        closers: tuple[str, ...] = (),
        followers: tuple[str, ...] = (),
    ) -> Reading[bool]:
        """Read the call at `source.at` and move behind it; whether it could be read.

        A broken one ends behind the first of `closers` or before the first of `followers`,
        whichever comes first; without any of these where it broke.
        """
        start = source.at
        try:
            call, end = yield from read_call(source, start, self.tools)
            self._refuse_end_of_thinking(source, start, end)
        except BrokenCall as broken:
            end = min(max(broken.at, start + 1), source.length)
            if closers or followers:
                end = yield from self._end_of_broken(source, closers, followers)
            self.broken(source, broken, end)
            return False
        self.made(source, call, end)
        return True

    def read_block(
        self,
        source: Source,
        read_call: ReadCall,
        *,
        block: tuple[str, str],
        opener: str,
        closer: str,
    ) -> Reading[None]:
        """Read the block of calls at `source.at`, each between `opener` and `closer`.

        A broken call does not touch its neighbours. A block without calls is malformed.
        """
        opening, closing = block
        here = yield from source.skip_space(source.at + len(opening))
        if not (yield from source.next_of((opener,), here)):
            is_cut = opener.startswith(source.slice(here, here + len(opener)))
            end = yield from self._end_of_broken(source, (closing,), (opening,))
            self.broken(source, BrokenCall("unclosed" if is_cut else "bad_markup", here), end)
            return
        source.at = here
        while (yield from source.next_of((opener,), here)):
            source.at = here
            if not self.is_read(source):
                return
            yield from self.read(
                source, read_call, closers=(closer,), followers=(opener, closing, opening)
            )
            here = yield from source.skip_space(source.at)
        if (yield from source.next_of((closing,), here)):
            source.at = here + len(closing)

    def made(self, source: Source, call: ToolCall, end: int) -> None:
        """The text from `source.at` to `end` is a call."""
        if self.place == "reasoning":
            self._writer.rehearsed(call, source.at, end)
        else:
            self._writer.call(call)
        source.at = end

    def broken(self, source: Source, broken: BrokenCall, end: int) -> None:
        """The text from `source.at` to `end` is no call: it stays text."""
        # Thoughts mention markers; only a call that was cut off in them is worth a report.
        is_meant = self.place == "content" or broken.reason == "unclosed"
        if broken.reason is not None and is_meant and source.at < end:
            self._writer.malformed(broken.reason, source.at, end)
        self.write(self._controls.sub("", source.slice(source.at, end)))
        self._num_broken += 1
        source.at = end

    def _refuse_end_of_thinking(self, source: Source, start: int, end: int) -> None:
        thinking = self._grammar.thinking
        if self.place == "reasoning" and thinking and thinking[1] in source.slice(start, end):
            raise BrokenCall("bad_markup", end)

    def _end_of_broken(
        self, source: Source, closers: tuple[str, ...], followers: tuple[str, ...]
    ) -> Reading[int]:
        if self.place == "reasoning" and self._grammar.thinking:
            followers += self._grammar.thinking[1:]
        found = yield from source.find(Marks(closers + followers), source.at + 1)
        if found is None:
            return source.length
        return found.end if found.mark in closers else found.start

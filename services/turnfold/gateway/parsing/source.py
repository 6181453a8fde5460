"""The sampled text as a parser reads it: from left to right, waiting where more has to come.

Parsers are generators. Each `yield` waits for more text, so a parser reads like one of a whole text
and yet takes it in pieces:

    here = yield from source.skip_space(here)
    mark = yield from source.next_of(("<a>", "<b>"), here)

Positions count characters from the beginning of the reply.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A parser that returns T; it yields when the text so far does not decide."""

_SPACE = re.compile(r"[ \t\r\n]*")

_PATIENCE = 16
"""Inside a call, text is looked at once it has grown by a sixteenth: joining it to what is there
costs the length of both, and this keeps the sum linear."""


class Marks:
    """Strings to look for together."""

    def __init__(self, marks: Iterable[str]) -> None:
        self.marks = tuple(dict.fromkeys(marks))
        longest_first = sorted(self.marks, key=len, reverse=True)
        # Without marks a pattern that never matches.
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.longest = max(map(len, self.marks), default=1)

    def num_open(self, text: str) -> int:
        """Characters at the end of the text that may be the beginning of a mark.

        >>> Marks(["<think>"]).num_open("so <th")
        3
        """
        for length in range(min(self.longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(mark.startswith(end) for mark in self.marks):
                return length
        return 0


class Found(NamedTuple):
    """A mark and where it stands."""

    mark: str
    start: int
    end: int


class Source:
    """Text that grows. A reader moves `at` over what it is done with; that is forgotten."""

    def __init__(self) -> None:
        self.at = 0
        self.is_ended = False
        self.work = 0
        """Characters searched, compared or copied so far."""
        self._text = ""
        self._base = 0
        self._waiting: list[str] = []
        self._num_waiting = 0
        self._is_patient = False

    @property
    def length(self) -> int:
        """Characters that can be looked at, the forgotten ones included."""
        return self._base + len(self._text)

    def feed(self, text: str) -> bool:
        """Add text; False when the reader need not look at it yet."""
        self._waiting.append(text)
        self._num_waiting += len(text)
        if self._is_patient and self._num_waiting * _PATIENCE < len(self._text):
            return False
        self._join()
        return True

    def end(self) -> None:
        """No more text comes."""
        self.is_ended = True
        self._join()

    def _join(self) -> None:
        self._text = "".join([self._text[self.at - self._base :], *self._waiting])
        self._base = self.at
        self.work += len(self._text)
        self._waiting.clear()
        self._num_waiting = 0

    def slice(self, start: int, end: int) -> str:
        """The text between two positions; nothing before `at` can be asked for."""
        return self._text[start - self._base : end - self._base]

    def text_until(self, marks: Marks, write: Callable[[str], None]) -> Reading[str | None]:
        """Write text as it comes, up to the first mark; `at` is then there.

        None at the end of the text. What may be the beginning of a mark is held back.
        """
        while True:
            found = self._search(marks, self.at)
            if found is not None:
                write(self.slice(self.at, found.start))
                self.at = found.start
                return found.mark
            end = self.length
            if not self.is_ended:
                end -= marks.num_open(self.slice(max(self.at, end - marks.longest), end))
            write(self.slice(self.at, end))
            self.at = end
            if self.is_ended:
                return None
            self._is_patient = False
            yield

    def find(self, marks: Marks, start: int, limit: int = sys.maxsize) -> Reading[Found | None]:
        """The first mark in the `limit` characters from `start` on; None when there is none."""
        here, stop = start, start + limit
        while True:
            found = self._search(marks, here, stop)
            if found is not None or self.is_ended or self.length >= stop:
                return found
            here = max(start, self.length - marks.longest + 1)
            yield from self.more()

    def _search(self, marks: Marks, start: int, stop: int = sys.maxsize) -> Found | None:
        end = min(self.length, stop)
        match = marks.pattern.search(self._text, start - self._base, end - self._base)
        if match is not None:
            end = self._base + match.end()
        self.work += end - start
        return match and Found(match.group(), self._base + match.start(), end)

    def next_of(self, marks: Sequence[str], at: int) -> Reading[str]:
        """The mark that stands at the position; "" when none does."""
        longest = max(map(len, marks))
        while True:
            rest = self.slice(at, at + longest)
            self.work += len(rest)
            for mark in marks:
                if rest.startswith(mark):
                    return mark
            if self.is_ended or not any(mark.startswith(rest) for mark in marks):
                return ""
            yield from self.more()

    def skip_space(self, at: int) -> Reading[int]:
        """The first position from there without white space."""
        return (yield from self.skip(_SPACE, at))

    def skip(self, run: re.Pattern[str], at: int) -> Reading[int]:
        """Where the run of characters that begins at `at` ends."""
        while True:
            if at < self.length:
                match = run.match(self._text, at - self._base)
                end = at if match is None else self._base + match.end()
                self.work += end - at + 1
                at = end
            if at < self.length or self.is_ended:
                return at
            yield from self.more()

    def more(self) -> Reading[None]:
        """Wait for more text, with patience."""
        self._is_patient = True
        yield

"""The text of tokens that come one after another: exactly the text of all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from turnfold.gateway.parsing.source import Marks
from turnfold.history.sequences import Ids

_REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not a whole one yet."""

_LONG = 32
_CONTEXT = 8
"""Tokens that are decoded again with those to come. A character has at most four bytes and a token
at least one, so no character reaches further back; and a decoder that takes off the space before
the first word does so where it was shown long ago."""


class TokenText:
    """Decodes tokens as they come, in time linear in their number.

        text = TokenText(decode)
        text.feed([id of "na"])            -> "na"
        text.feed([first byte of "ï"])     -> ""
        text.feed([second byte of "ï"])    -> "ï"

    Put together, the pieces and `end()` are `decode` of all tokens. The one exception are tokenizers
    with a token for each byte besides their words: a run of such tokens in which one is wrong is
    decoded as wrong from its beginning, part of which may have been shown.
    """

    def __init__(self, decode: Callable[[Ids], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._num_shown = 0
        """Characters of the text of `_ids` that were given out."""

    def feed(self, ids: Sequence[int]) -> str:
        """The characters that the tokens complete."""
        if not ids:
            return ""
        self._ids += ids
        text = self._text_of(self._ids)
        end = len(text) - text.endswith(_REPLACEMENT)
        new = text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        if len(self._ids) > _LONG:
            self._forget(text)
        return new

    def end(self) -> str:
        """The rest: a character that was never completed."""
        text = self._text_of(self._ids)
        rest = text[self._num_shown :]
        self._num_shown = len(text)
        return rest

    def _forget(self, text: str) -> None:
        """Keep the last tokens only, when their text by itself is the end of the text."""
        kept = self._ids[-_CONTEXT:]
        tail = self._text_of(kept)
        num_shown = len(tail) - (len(text) - self._num_shown)
        if num_shown > 0 and text.endswith(tail):
            self._ids, self._num_shown = kept, num_shown

    def _text_of(self, ids: Sequence[int]) -> str:
        return self._decode(np.array(ids, dtype=np.uint32))


class TextBeforeStop:
    """Holds back text that may be, or begin, the stop sequence that ends the reply.

    before = TextBeforeStop(["\\n\\n"])
    before.feed("one\\n")     -> "one"
    before.feed("two\\n\\n")   -> "\\ntwo"
    before.end("\\n\\n")       -> ""
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = Marks(filter(None, stops))
        self._held = ""
        self._later: list[str] = []
        """What came after a whole stop sequence; only the engine knows whether it was one."""
        self._is_stopped = False

    def feed(self, text: str) -> str:
        """The text that cannot belong to a stop sequence."""
        if not self._stops.marks or not text:
            return text
        if self._is_stopped:
            self._later.append(text)
            return ""
        text = self._held + text
        found = self._stops.pattern.search(text)
        end = len(text) - self._stops.num_open(text)
        if found is not None:
            self._is_stopped = True
            end = min(end, found.start())
        self._held = text[end:]
        return text[:end]

    def end(self, stop_reason: int | str | None) -> str:
        """The rest, up to the stop sequence that ended the reply if one did."""
        text = "".join([self._held, *self._later])
        self._held, self._later = "", []
        is_cut = isinstance(stop_reason, str) and bool(stop_reason)
        return text.partition(str(stop_reason))[0] if is_cut else text

"""How many sampled tokens a stretch of the text came from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable

from turnfold.gateway.parsing.replies import ReasoningSpan, ReplyPart
from turnfold.history.sequences import Ids

_REPLACEMENT = "\ufffd"


def num_reasoning_tokens(parts: Iterable[ReplyPart], ids: Ids, decode: Callable[[Ids], str]) -> int:
    """Tokens between the marks around the reasoning, without the marks themselves."""
    spans = [part for part in parts if isinstance(part, ReasoningSpan)]
    return sum(num_tokens(span.start, span.end, ids, decode) for span in spans)


def num_tokens(start: int, end: int, ids: Ids, decode: Callable[[Ids], str]) -> int:
    """Tokens that begin in the text from `start` up to `end`, found in a few decodes.

    " caf", "é" in two tokens, "!"      characters 4 to 5 -> 2 tokens
    "<think>", "hm", "</think>"         characters 7 to 9 -> 1 token
    """

    def num_characters(num_first: int) -> int:
        # A token that ends inside a character has not added it yet.
        return len(decode(ids[:num_first]).rstrip(_REPLACEMENT))

    def num_tokens_before(position: int) -> int:
        """Tokens that it takes to write the text before the position."""
        return min(bisect_left(range(len(ids)), position, key=num_characters), len(ids))

    return num_tokens_before(end) - num_tokens_before(start) if start < end else 0

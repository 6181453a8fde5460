"""Which sampled tokens a stretch of the text came from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

_MAX_TOKENS_OF_A_CHARACTER = 8
_HALF_A_CHARACTER = "\ufffd"


def token_ends(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[int]:
    """Characters of the text up to and including each token.

        " caf", "é" in two tokens, "!"   ->  [4, 4, 5, 6]

    A token that ends inside a character adds nothing; the one that completes it does.
    """
    ends: list[int] = []
    num_characters, start = 0, 0
    for index in range(len(ids)):
        piece = decode(ids[start : index + 1])
        is_whole = not piece.endswith(_HALF_A_CHARACTER)
        if is_whole or index + 1 - start >= _MAX_TOKENS_OF_A_CHARACTER:
            num_characters += len(piece)
            start = index + 1
        ends.append(num_characters)
    return ends


def token_span(start: int, end: int, ends: Sequence[int]) -> tuple[int, int]:
    """First token and the one behind the last of the characters from `start` up to `end`.

    >>> token_span(4, 6, [4, 4, 5, 6])
    (1, 4)
    """
    first = bisect_left(ends, start)
    if start > 0 and first < len(ends) and ends[first] == start:
        first += 1
    return first, min(bisect_left(ends, end) + 1, len(ends))

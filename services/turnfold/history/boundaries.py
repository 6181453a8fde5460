"""Where a text may be cut so that its parts encode to the same tokens as the whole.

A tokenizer takes the added tokens out of the raw text first, from left to right, and normalises,
splits and merges only what lies between them. A cut right before such a token therefore changes
nothing:

    encode("<a>one<b>two") == encode("<a>one") + encode("<b>two")
"""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers


def safe_boundaries(tokenizer: tokenizers.Tokenizer, chat_template: str) -> frozenset[str]:
    """The added tokens in the text of the template before which any text may be cut."""
    if tokenizer.truncation or tokenizer.padding:
        return frozenset()
    # Tokens that are looked for after normalisation are looked for between those of the raw text.
    raw = [t for t in tokenizer.get_added_tokens_decoder().values() if not t.normalized]
    contents = [token.content for token in raw]
    return frozenset(
        token.content
        for token in raw
        if token.content in chat_template
        and not (token.lstrip or token.rstrip or token.single_word)
        and _is_apart(token.content, contents)
    )


def _is_apart(mark: str, others: Iterable[str]) -> bool:
    """Whether nothing before the mark can take a part of it, or mind that it is there.

    `<b>` is not apart from `a<b`, which would win over it in the text `a<b>`.
    """
    # Tokens that want whitespace or the end of a word beside them must find the same at a cut.
    if not mark or mark[0].isspace() or mark[0].isalnum() or mark[0] == "_":
        return False
    return not any(_reaches_into(other, mark) for other in others)


def _reaches_into(other: str, mark: str) -> bool:
    """Whether some text holds `mark` and, begun before it, `other`, which ends in or after it."""
    at = other.find(mark[0], 1)
    while at >= 0:
        size = min(len(other) - at, len(mark))
        if other[at : at + size] == mark[:size]:
            return True
        at = other.find(mark[0], at + 1)
    return False

"""Whether sampled tokens are the ones that their own text encodes to.

A model may write " Skinny" as two tokens where the tokenizer makes one; the text is equal, the
tokens are not, and a history that is rendered and encoded again has drifted. The output alone is
encoded, once a turn, within the marks around it, where the tokenizer splits anyway:

    saved    … <assistant> \\n [ Skin][ny] <end> …
    window       <assistant> \\n  Skinny   <end>        encodes to other ids: drift at [ Skin]
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from turnfold.history.render import Renderer
from turnfold.history.sequences import Ids, Span, common_prefix_len
from turnfold.history.session import Session

LOOK_AROUND = 64
"""Tokens before and after an output among which its surrounding marks are looked for."""


def first_retokenized(
    session: Session, renderer: Renderer, spans: Iterable[Span], prompt_ids: Ids
) -> int | None:
    """Index of the first sampled token that would drift, over the outputs among the spans.

    `prompt_ids` begins with the sequence that the spans are of. Verdicts are cached on the session.
    """
    for span in spans:
        if not span.is_output or session.retokenized.get(span.turn_id) is False:
            continue
        if span.stop != session.sequences.length(span.turn_id):
            continue
        token = _first_in_output(renderer, span, prompt_ids)
        session.retokenized[span.turn_id] = token is not None
        if token is not None:
            return token
    return None


def _first_in_output(renderer: Renderer, span: Span, ids: Ids) -> int | None:
    start, stop = _window(renderer, span, ids)
    window = ids[start:stop]
    encoded = renderer.encode(renderer.decode(window))
    shared = common_prefix_len(window, encoded)
    is_equal = shared == len(window) == len(encoded)
    return None if is_equal else start + shared


def _window(renderer: Renderer, span: Span, ids: Ids) -> tuple[int, int]:
    """The output with the nearest mark on either side."""
    before = ids[max(0, span.start - LOOK_AROUND) : span.start]
    after = ids[span.stop : span.stop + LOOK_AROUND]
    marks_before = np.flatnonzero(_are_marks(renderer, before))
    marks_after = np.flatnonzero(_are_marks(renderer, after))
    start = span.start - (len(before) - int(marks_before[-1]) if marks_before.size else 0)
    stop = span.stop + (int(marks_after[0]) + 1 if marks_after.size else 0)
    return start, stop


def _are_marks(renderer: Renderer, ids: Ids) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.fromiter((int(token) in renderer.special_ids for token in ids), bool, len(ids))

"""The checks that an engine's output must pass before it can be a turn, the same for each engine.

Every id lies in the vocabulary, every token has one finite logprob, and the version spans, when
there are any, cover the output without gaps. A turn without these cannot be trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from turnfold.gateway.backends.engine import EngineError
from turnfold.schemas.events import VersionSpan
from turnfold.schemas.wire import Logprobs, TokenIds


class TokenLogprob(msgspec.Struct):
    """The logprob of one sampled token, as vLLM writes it."""

    logprob: float | None = None
    token_id: int | None = None
    """None when the engine does not say whose logprob it is."""


class WeightSpan(msgspec.Struct):
    """The output tokens [start, end) were sampled under the weights of this name."""

    version: str | int
    start: int
    end: int


def unusable(what: str) -> EngineError:
    """The error of an output that cannot be used."""
    return EngineError("invalid_output", f"the engine's output cannot be used: {what}")


def check_prompt(prompt_ids: TokenIds, vocab_size: int) -> None:
    """Raises EngineError `engine_refused` for the first id that the model has no embedding for."""
    outside = prompt_ids.array >= vocab_size
    if not outside.any():
        return
    position = int(outside.argmax())
    raise EngineError(
        "engine_refused",
        f"prompt token {position}: id {prompt_ids.array[position]} is outside the vocabulary of "
        f"{vocab_size}",
    )


def check_ids(ids: Sequence[int], vocab_size: int, *, first: int = 0) -> None:
    """Raises EngineError `invalid_output` for the first id outside the vocabulary.

    `first` is the position of ids[0] in the output.
    """
    if not ids or 0 <= min(ids) <= max(ids) < vocab_size:
        return
    for position, token_id in enumerate(ids, start=first):
        if not 0 <= token_id < vocab_size:
            raise unusable(
                f"output token {position}: id {token_id} is outside the vocabulary of {vocab_size}"
            )


def finite_logprobs(
    entries: Sequence[TokenLogprob] | None, output_ids: Sequence[int], *, first: int = 0
) -> list[float]:
    """One finite logprob for each token. Raises EngineError `invalid_output`."""
    if entries is None:
        raise unusable("expected logprobs, got none")
    if len(entries) != len(output_ids):
        raise unusable(f"{len(output_ids)} output tokens but {len(entries)} logprobs")
    values = [entry.logprob for entry in entries if entry.logprob is not None]
    named_ids = [entry.token_id for entry in entries if entry.token_id is not None]
    is_complete = len(values) == len(entries) and all(map(math.isfinite, values))
    if not is_complete or (named_ids and named_ids != list(output_ids)):
        _refuse_entries(entries, output_ids, first)
    return values


def _refuse_entries(entries: Sequence[TokenLogprob], output_ids: Sequence[int], first: int) -> None:
    """Raise EngineError for the first entry that is wrong."""
    for position, (entry, token_id) in enumerate(zip(entries, output_ids, strict=True), first):
        if entry.logprob is None or not math.isfinite(entry.logprob):
            raise unusable(f"output token {position}: logprob {entry.logprob} is not finite")
        if entry.token_id is not None and entry.token_id != token_id:
            raise unusable(
                f"output token {position}: id {token_id} has the logprob of id {entry.token_id}"
            )


def packed_logprobs(values: Sequence[float]) -> Logprobs:
    """As they go into the log. Raises EngineError `invalid_output` when one does not fit."""
    with np.errstate(over="ignore"):  # what overflows is infinite, and refused below
        packed = np.asarray(values, dtype=np.float32)
    if not np.isfinite(packed).all():
        raise unusable("a logprob does not fit 32 bits")
    return Logprobs.of(packed)


def checked_versions(
    spans: Sequence[WeightSpan] | None, num_output_tokens: int
) -> tuple[VersionSpan, ...]:
    """Spans that cover the output; none when the engine was never told a version.

    Raises EngineError `invalid_output` when they leave a gap or do not reach the end.
    """
    spans = spans or ()
    if not all(str(span.version).isdecimal() for span in spans):
        return ()  # an engine that was never told a version calls it something else
    end = 0
    for span in spans:
        if span.start != end or span.end < span.start:
            raise unusable(f"weight version {span.version} begins at {span.start}, expected {end}")
        end = span.end
    if spans and end != num_output_tokens:
        raise unusable(f"weight versions cover {end} of {num_output_tokens} output tokens")
    return tuple(
        VersionSpan(policy_version=int(span.version), start=span.start, end=span.end)
        for span in spans
        if span.end > span.start
    )

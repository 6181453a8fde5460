"""A reply that the engine ended early is continued from where it stood; it stays one sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from turnfold.gateway.backends.engine import GenerateRequest, Generation, PartialOutput
from turnfold.gateway.turns.sampling.text import TokenText
from turnfold.history.render import Renderer
from turnfold.schemas.events import VersionSpan
from turnfold.schemas.wire import Logprobs, TokenIds

_SEEDS = 2**63
"""Engines keep a seed in 64 bits."""


def resumed_request(
    request: GenerateRequest, sofar: PartialOutput, attempt: int
) -> GenerateRequest:
    """The request for the tokens that are still missing of the first request's reply.

        first     prompt [1 2], max_tokens 9, id t1,   seed 5
        so far    [3 4]
        resumed   prompt [1 2 3 4], max_tokens 7, id t1-1, seed 7

    The id is another one, lest an engine takes the two for one request. The seed moves on with the
    tokens: with the same one the engine would draw again the numbers that it drew for the first
    tokens. So the reply to a request with a seed is the same each time only while nobody interrupts
    it.
    """
    num_sampled = len(sofar.output_ids)
    seed = request.params.seed
    moved = None if seed is None else (seed + num_sampled) % _SEEDS
    return msgspec.structs.replace(
        request,
        request_id=f"{request.request_id}-{attempt}",
        prompt_ids=TokenIds.of(np.concatenate([request.prompt_ids.array, sofar.output_ids.array])),
        max_tokens=request.max_tokens - num_sampled,
        params=msgspec.structs.replace(request.params, seed=moved),
    )


def joined(first: PartialOutput, second: PartialOutput) -> PartialOutput:
    """One output out of two, the second a continuation of the first."""
    return PartialOutput(
        output_ids=TokenIds.of(np.concatenate([first.output_ids.array, second.output_ids.array])),
        logprobs=Logprobs.of(np.concatenate([first.logprobs.array, second.logprobs.array])),
        policy_versions=_joined_spans(first, second),
        num_cached_tokens=first.num_cached_tokens,  # the second was asked with a longer prompt
    )


def continued(sofar: PartialOutput, generation: Generation) -> Generation:
    """The whole sample, of which the engine gave the last part as one of its own."""
    last = PartialOutput(
        output_ids=generation.output_ids,
        logprobs=generation.logprobs,
        policy_versions=generation.policy_versions,
    )
    whole = joined(sofar, last)
    return msgspec.structs.replace(
        generation,
        output_ids=whole.output_ids,
        logprobs=whole.logprobs,
        policy_versions=whole.policy_versions,
        num_cached_tokens=whole.num_cached_tokens,
    )


def used_up(sofar: PartialOutput) -> Generation:
    """The whole sample when it has all its tokens already."""
    return Generation(
        output_ids=sofar.output_ids,
        logprobs=sofar.logprobs,
        finish_reason="length",
        policy_versions=sofar.policy_versions,
        num_cached_tokens=sofar.num_cached_tokens,
    )


def cut_at_stop(
    generation: Generation, resumed_at: Iterable[int], stops: Sequence[str], renderer: Renderer
) -> Generation:
    """The sample up to the first stop sequence that lies across a token where it was resumed.

        stop "END", resumed at 2     "a" "E" | "ND" "b"  ->  "a" "E" "ND", stopped by "END"

    The engine that went on saw only the second half of it, and sampled on.
    """
    for position in resumed_at:
        found = _stop_across(generation, position, stops, renderer)
        if found is not None:
            num_tokens, stop = found
            return _stopped(generation, num_tokens, stop)
    return generation


def _stop_across(
    generation: Generation, resumed_at: int, stops: Sequence[str], renderer: Renderer
) -> tuple[int, str] | None:
    """How many tokens lead to the end of the stop sequence, and which it is.

    A token has at least a byte, so it lies within as many tokens on either side as it has bytes.
    """
    longest = max((len(stop.encode()) for stop in stops), default=0)
    ids = generation.output_ids.array[: resumed_at + longest].tolist()
    decoded, text = TokenText(renderer.decode), ""
    for position in range(max(0, resumed_at - longest), len(ids)):
        text += decoded.feed(ids[position : position + 1])
        found = next((stop for stop in stops if stop and stop in text), None)
        if found is not None:
            return (position + 1, found) if position >= resumed_at else None
    return None


def _stopped(generation: Generation, num_tokens: int, stop: str) -> Generation:
    spans = generation.policy_versions
    return Generation(
        output_ids=TokenIds.of(generation.output_ids.array[:num_tokens]),
        logprobs=Logprobs.of(generation.logprobs.array[:num_tokens]),
        finish_reason="stop",
        stop_reason=stop,
        policy_versions=tuple(
            msgspec.structs.replace(span, end=min(span.end, num_tokens))
            for span in spans
            if span.start < num_tokens
        ),
        num_cached_tokens=generation.num_cached_tokens,
    )


def _joined_spans(first: PartialOutput, second: PartialOutput) -> tuple[VersionSpan, ...]:
    """Spans over both; none when one of the two does not say what sampled it."""
    if any(len(part.output_ids) and not part.policy_versions for part in (first, second)):
        return ()
    shift = len(first.output_ids)
    spans = list(first.policy_versions)
    for span in second.policy_versions:
        moved = msgspec.structs.replace(span, start=span.start + shift, end=span.end + shift)
        if spans and spans[-1].policy_version == moved.policy_version:
            spans[-1] = msgspec.structs.replace(spans[-1], end=moved.end)
        else:
            spans.append(moved)
    return tuple(spans)

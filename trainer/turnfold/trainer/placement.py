"""Spreading things over equally many places each, so that the fullest place is as empty as can be.

Used twice by `plan`: groups over mini-batches, then the rows of a mini-batch over ranks. In both
cases every bin must get the same *number* of things, because the loss of a mini-batch is divided by
a configured constant and because verl cuts a rank's rows into equal slices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Bins = list[list[int]]
"""For each bin the indices of the things in it."""

_MAX_SWAPS = 256


def spread(weights: Sequence[tuple[int, ...]], num_bins: int) -> Bins:
    """Put the same number of things into each bin, with close totals.

    Things are taken heaviest first in rounds of `num_bins`; in a round the heaviest thing goes to
    the lightest bin. Weights compare like tuples, so a second number decides between equals.

        spread([(9,), (7,), (4,), (3,)], 2)  ->  [[0, 3], [1, 2]]      totals 12 and 11

    Bound on the first number: after every round the difference of any two bins is at most the
    largest difference within one round (a round that hands a_i ≥ a_j to bins L_i ≤ L_j leaves
    (L_j - L_i) - (a_i - a_j), a difference of two numbers that are each within the bound), so

        max total ≤ mean total + heaviest - lightest

    and equal weights come out exactly even. Raises ValueError when the things do not divide.
    """
    if len(weights) % num_bins:
        raise ValueError(f"{len(weights)} things do not divide into {num_bins} equal bins")
    bins: Bins = [[] for _ in range(num_bins)]
    totals = [tuple(0 for _ in (weights[0] if weights else ())) for _ in range(num_bins)]
    heaviest_first = sorted(range(len(weights)), key=lambda i: weights[i], reverse=True)
    for start in range(0, len(weights), num_bins):
        lightest_first = sorted(range(num_bins), key=lambda b: totals[b])
        things = heaviest_first[start : start + num_bins]
        for b, thing in zip(lightest_first, things, strict=True):
            bins[b].append(thing)
            totals[b] = tuple(x + y for x, y in zip(totals[b], weights[thing], strict=True))
    return bins


def swap_down(
    bins: Bins,
    weights: Sequence[int],
    limited: Sequence[int] | None = None,
    limit: int = 0,
) -> Bins:
    """Lower the largest total by exchanging things between the fullest bin and another one.

    The number of things in a bin stays, and a thing of weight 0 stays where it is. With `limited`,
    no exchange may bring a bin's total of that second weight above `limit`. Never makes the largest
    total worse; stops after 256 exchanges.
    """
    bins = [list(things) for things in bins]
    for _ in range(_MAX_SWAPS):
        found = _best_swap(bins, weights, limited, limit)
        if found is None:
            break
        full, i, other, j = found
        bins[full][i], bins[other][j] = bins[other][j], bins[full][i]
    return bins


def _best_swap(
    bins: Bins, weights: Sequence[int], limited: Sequence[int] | None, limit: int
) -> tuple[int, int, int, int] | None:
    """The exchange with the fullest bin after which the larger of the two totals is smallest.

    Compares all A things of the fullest bin with all B things elsewhere at once.
    """
    weight = np.asarray(weights)
    totals = np.array([weight[things].sum() for things in bins])
    full = int(totals.argmax())
    places = [(b, j) for b in range(len(bins)) if b != full for j in range(len(bins[b]))]
    if not places or not bins[full]:
        return None
    other_B = np.array([b for b, _ in places])
    theirs_B = np.array([bins[b][j] for b, j in places])
    moved_AB = weight[bins[full]][:, None] - weight[theirs_B]
    worse_AB = np.maximum(totals[full] - moved_AB, totals[other_B] + moved_AB)
    is_allowed_AB = (moved_AB > 0) & (weight[theirs_B] > 0) & (worse_AB < totals[full])
    if limited is not None:
        count = np.asarray(limited)
        counts = np.array([count[things].sum() for things in bins])
        shift_AB = count[bins[full]][:, None] - count[theirs_B]
        is_allowed_AB &= counts[full] - shift_AB <= limit
        is_allowed_AB &= counts[other_B] + shift_AB <= limit
    if not is_allowed_AB.any():
        return None
    best = int(np.where(is_allowed_AB, worse_AB, np.iinfo(np.int64).max).argmin())
    i, place = divmod(best, len(places))
    return (full, i, *places[place])

"""Is what was trained a fair sample of what was dispatched? By length, and by task. Pure.

Rollouts of a group share a task and a fate, so tests for independent samples would see bias where
there is none. Whole groups are permuted instead: if the schedule does not look at lengths, which
slots of which group were trained has nothing to do with how long its rollouts are, so the masks of
groups of one size may be dealt out anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Index = npt.NDArray[np.int64]

NUM_CLASSES = 20
"""Of tasks, from quick to slow."""


class GroupLengths(msgspec.Struct, frozen=True):
    """The rollouts of a group whose length is known."""

    task_id: str
    lengths: tuple[float, ...]
    trained: tuple[bool, ...]


class BiasTest(msgspec.Struct, frozen=True, kw_only=True):
    """Trained against all, and how often chance alone shows as much."""

    ks: float
    """Kolmogorov-Smirnov: the largest gap between the two distributions of length."""
    ks_p: float
    longer: float | None
    """Chance that a trained rollout is longer than one that was not trained, the statistic of Mann and
    Whitney; below 0.5 the trained ones are shorter. None when all or none are trained."""
    longer_p: float | None
    task_chi2: float
    """Chi-square of trained rollouts over classes of tasks, from quick to slow."""
    task_p: float


def compare(groups: Sequence[GroupLengths], *, permutations: int, seed: int = 0) -> BiasTest | None:
    """None without a rollout, or without one that was trained.

    The p-values are (1 + permutations at least as extreme) / (1 + permutations), so that they
    cannot be below 1 / (1 + permutations).
    """
    strata = _by_size(groups)
    if not any(trained for group in groups for trained in group.trained):
        return None
    lengths_R = np.concatenate([np.ravel([g.lengths for g in same]) for same in strata])
    masks = [np.array([g.trained for g in same], dtype=np.bool_) for same in strata]
    classes_R = _classes(strata)
    order = np.argsort(lengths_R, kind="stable")
    ends = _ends_of_ties(lengths_R[order])
    ranks_R = _mid_ranks(lengths_R, order)

    def statistics(trained_R: Mask) -> tuple[float, float, float]:
        return (
            ks_distance(trained_R, order, ends),
            abs(_longer(trained_R, ranks_R) - 0.5),
            chi_square(trained_R, classes_R),
        )

    observed_R = _flat(masks)
    observed = statistics(observed_R)
    rng = np.random.default_rng(seed)
    extreme = [0, 0, 0]
    for _ in range(permutations):
        dealt = statistics(_flat([mask[rng.permutation(len(mask))] for mask in masks]))
        for index in range(3):
            # Sums of the same floats in another order are not always equal.
            extreme[index] += dealt[index] >= observed[index] - 1e-12
    p = [(1 + count) / (1 + permutations) for count in extreme]
    is_mixed = not observed_R.all()
    return BiasTest(
        ks=observed[0],
        ks_p=p[0],
        longer=_longer(observed_R, ranks_R) if is_mixed else None,
        longer_p=p[1] if is_mixed else None,
        task_chi2=observed[2],
        task_p=p[2],
    )


def ks_distance(trained_R: Mask, order: Index, ends: Index | None = None) -> float:
    """Two-sample Kolmogorov-Smirnov distance, trained against all, in the given order.

    `ends` are the last places of equal lengths, where alone the distributions may be compared;
    None when all lengths differ.
    """
    cumulative = np.cumsum(trained_R.ravel()[order], dtype=np.int64)
    if cumulative[-1] == 0:
        return 1.0
    gaps = np.abs(cumulative / cumulative[-1] - np.arange(1, len(order) + 1) / len(order))
    return float((gaps if ends is None else gaps[ends]).max())


def chi_square(trained_R: Mask, class_R: Index) -> float:
    """Trained rollouts in each class against an equal share of each class."""
    sizes = np.bincount(class_R)
    observed = np.bincount(class_R, weights=trained_R, minlength=len(sizes))
    expected = sizes * trained_R.mean()
    return float(((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum())


def _by_size(groups: Sequence[GroupLengths]) -> list[list[GroupLengths]]:
    """Groups of one size together; rollouts are counted in this order below."""
    by_size: dict[int, list[GroupLengths]] = defaultdict(list)
    for group in groups:
        if group.lengths:
            by_size[len(group.lengths)].append(group)
    return [by_size[size] for size in sorted(by_size)]


def _flat(masks: Sequence[Mask]) -> Mask:
    return np.concatenate([mask.ravel() for mask in masks])


def _classes(strata: Sequence[Sequence[GroupLengths]]) -> Index:
    """Class of the task of each rollout: tasks by their mean length, in NUM_CLASSES classes."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for group in (group for same in strata for group in same):
        lengths[group.task_id] += group.lengths
    by_mean = sorted(lengths, key=lambda task: (sum(lengths[task]) / len(lengths[task]), task))
    class_of = {
        task: rank * min(NUM_CLASSES, len(by_mean)) // len(by_mean)
        for rank, task in enumerate(by_mean)
    }
    return np.array([class_of[g.task_id] for same in strata for g in same for _ in g.lengths])


def _ends_of_ties(sorted_R: Lengths) -> Index:
    """Places after which the next length is another one."""
    return np.append(np.flatnonzero(np.diff(sorted_R)), len(sorted_R) - 1)


def _mid_ranks(lengths_R: Lengths, order: Index) -> Lengths:
    """Rank of each rollout by length, from 1; equal lengths share the mean of their ranks."""
    ends = _ends_of_ties(lengths_R[order])
    counts = np.diff(ends, prepend=-1)
    mid = ends + 1 - (counts - 1) / 2
    ranks_R = np.empty(len(lengths_R))
    ranks_R[order] = np.repeat(mid, counts)
    return ranks_R


def _longer(trained_R: Mask, ranks_R: Lengths) -> float:
    """Mann and Whitney's U over all pairs; 0.5 when there is no pair."""
    num_trained = int(trained_R.sum())
    num_others = len(trained_R) - num_trained
    if num_trained == 0 or num_others == 0:
        return 0.5
    u = ranks_R[trained_R].sum() - num_trained * (num_trained + 1) / 2
    return float(u / (num_trained * num_others))

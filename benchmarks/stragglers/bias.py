"""Is what was trained a fair sample of what was dispatched? By length, and by task.

Both tests permute whole groups: under the hypothesis that the schedule does not look at lengths,
which slots of which group were trained has nothing to do with how long its rollouts take, so the
masks of the groups may be dealt out anew. Rollouts of a group share a task and a fate, hence the
p-values of tests for independent samples would be too small.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from turnfold.replay.stragglers.bias import ks_distance

Lengths = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NUM_CLASSES = 20
"""Of tasks, from quick to slow."""

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0)


@dataclass(frozen=True, kw_only=True)
class Bias:
    num_groups: int
    trained_share: float
    """Of the dispatched rollouts."""
    ks: float
    """Largest gap between the distributions of length, trained against dispatched."""
    ks_p: float
    trained_share_by_length: tuple[float, ...]
    """Of the dispatched rollouts between two QUANTILES of length."""
    trained_share_hardest: float
    """Of the rollouts of the 5 % of tasks that take longest."""
    task_p: float
    """Chi-square of trained rollouts over classes of tasks, by permutation."""


def measure(
    lengths_NG: Lengths, trained_NG: Mask, scales_N: Lengths, *, permutations: int, seed: int
) -> Bias:
    """Compare N groups of G rollouts. `scales_N` says how long the task of each group takes.

    The p-values are (1 + permutations at least as extreme) / (1 + permutations), so that they
    cannot be below 1 / (1 + permutations).
    """
    order = np.argsort(lengths_NG.ravel(), kind="stable")
    rank_N = np.argsort(np.argsort(scales_N, kind="stable"), kind="stable")
    class_N = rank_N * NUM_CLASSES // len(rank_N)
    count_N = trained_NG.sum(axis=1)
    ks, chi2 = ks_distance(trained_NG, order), chi_square(count_N, class_N)
    rng = np.random.default_rng(seed)
    ks_extreme = chi2_extreme = 0
    for _ in range(permutations):
        dealt = rng.permutation(len(count_N))
        ks_extreme += ks_distance(trained_NG[dealt], order) >= ks
        chi2_extreme += chi_square(count_N[dealt], class_N) >= chi2
    return Bias(
        num_groups=len(count_N),
        trained_share=float(trained_NG.mean()),
        ks=ks,
        ks_p=(1 + ks_extreme) / (1 + permutations),
        trained_share_by_length=shares_by_length(trained_NG, order),
        trained_share_hardest=float(trained_NG[rank_N >= int(0.95 * len(rank_N))].mean()),
        task_p=(1 + chi2_extreme) / (1 + permutations),
    )


def shares_by_length(trained_NG: Mask, order: npt.NDArray[np.int64]) -> tuple[float, ...]:
    """Trained share between each two of QUANTILES of length."""
    by_length = trained_NG.ravel()[order]
    edges = [int(quantile * len(order)) for quantile in QUANTILES]
    return tuple(
        float(by_length[start:end].mean()) if end > start else 1.0
        for start, end in itertools.pairwise(edges)
    )


def chi_square(count_N: npt.NDArray[np.int64], class_N: npt.NDArray[np.int64]) -> float:
    """Trained rollouts in each class of tasks against an equal share of each class."""
    observed = np.bincount(class_N, weights=count_N, minlength=NUM_CLASSES)
    sizes = np.bincount(class_N, minlength=NUM_CLASSES)
    expected = sizes * (count_N.sum() / len(count_N))
    return float(((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum())

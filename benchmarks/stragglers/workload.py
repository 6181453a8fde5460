"""Rollouts as an agent fleet would run them: how long each takes, which fail, which hang.

Every draw is a function of (seed, place in the data set's order, attempt), so all policies meet the
same tasks with the same rollouts, however many they dispatch and whenever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from turnfold.dispatcher.plan import Place, row_at

Distribution = Literal["lognormal", "pareto"]
Fate = Literal["completes", "fails", "hangs"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Durations are task x rollout: log-normal over tasks, `distribution` within a task."""

    distribution: Distribution = "lognormal"
    median_s: float = 60.0
    longest: float = 50.0
    """Longest rollout, in medians; longer draws are drawn again."""
    task_sigma: float = 0.6
    """Spread of ln(duration) between tasks."""
    rollout_sigma: float = 1.04
    """Spread of ln(duration) within a task; with `task_sigma` 1.2 in all."""
    pareto_alpha: float = 1.2
    """Tail exponent within a task: P(duration > t) falls like t ** -alpha."""
    fail_share: float = 0.01
    """Rollouts whose agent fails somewhere on the way."""
    hang_share: float = 0.001
    """Rollouts that hang until their deadline aborts them."""
    lost_share: float = 0.0005
    """Groups whose worker dies before it has started any rollout."""
    num_tasks: int = 4096

    @property
    def longest_s(self) -> float:
        return self.median_s * self.longest


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What would become of the rollouts of one group."""

    lengths: tuple[float, ...]
    """Seconds that each rollout takes when nothing goes wrong."""
    fates: tuple[Fate, ...]
    failing_at: tuple[float, ...]
    """Share of its length after which a failing rollout fails."""
    is_lost: bool


class Workload:
    """Draws of a run.

    workload.draw(number=63, attempt=0, n=8)       the 64th task of the order, first attempt
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.seed = seed
        self.task_scales = task_scales(shape, seed)

    def row(self, number: int) -> int:
        """Row of the task that comes `number`-th, over all epochs, in the dispatcher's order."""
        epoch, cursor = divmod(number, self.shape.num_tasks)
        return row_at(Place(epoch, cursor), self.shape.num_tasks, self.seed, True)

    def scale(self, number: int) -> float:
        """Median seconds of the rollouts of that task."""
        return float(self.task_scales[self.row(number)])

    def draw(self, *, number: int, attempt: int, n: int) -> Draw:
        """What becomes of `n` rollouts of that task at this attempt."""
        rng = np.random.default_rng([self.seed, number, attempt])
        is_lost = bool(rng.random() < self.shape.lost_share)
        chances, failing_at = rng.random(n), rng.random(n)
        return Draw(
            lengths=tuple(self._lengths(rng, self.scale(number), n).tolist()),
            fates=tuple(self._fate(chance) for chance in chances.tolist()),
            failing_at=tuple(failing_at.tolist()),
            is_lost=is_lost,
        )

    def _fate(self, chance: float) -> Fate:
        shape = self.shape
        if chance < shape.hang_share:
            return "hangs"
        return "fails" if chance < shape.hang_share + shape.fail_share else "completes"

    def _lengths(self, rng: np.random.Generator, scale: float, n: int) -> npt.NDArray[np.float64]:
        longest_s = self.shape.longest_s
        lengths = scale * self._noise(rng, n)
        while (is_over := lengths > longest_s).any():
            lengths[is_over] = scale * self._noise(rng, int(is_over.sum()))
        return lengths

    def _noise(self, rng: np.random.Generator, n: int) -> npt.NDArray[np.float64]:
        """Factors with median 1."""
        shape = self.shape
        if shape.distribution == "lognormal":
            return rng.lognormal(0.0, shape.rollout_sigma, n)
        return (2.0 * (1.0 - rng.random(n))) ** (-1.0 / shape.pareto_alpha)


def task_scales(shape: Shape, seed: int) -> npt.NDArray[np.float64]:
    """Median seconds of each task's rollouts."""
    rng = np.random.default_rng([seed, shape.num_tasks])
    return shape.median_s * rng.lognormal(0.0, shape.task_sigma, shape.num_tasks)

"""One advantage per rollout, by verl's registered estimators.

The estimator sees a table with one entry per *rollout*, never per row, so that splitting a rollout
into rows cannot move a baseline:

    group A: rollout a, reward 0, two rows        baseline (0 + 4) / 2 = 2, not 4 / 3
             rollout b, reward 4, one row         advantages a -2 (both rows), b +2

Rollouts without a reward or without a trained token are in no baseline and get 0.

Turns may have rewards of their own, which give an advantage to the turns that led to them; see
`turn_advantages`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from turnfold.schemas.errors import UserError
from turnfold.schemas.trajectories import Trajectory
from turnfold.schemas.wire import Wire

BATCH_BASELINE = frozenset({"reinforce_plus_plus"})
"""Estimators whose baseline is the batch, so that a group of one or of equals still counts."""

WEIGHS_BY_LENGTH = frozenset({"opo"})
"""Estimators that read the number of trained tokens from the width of the table."""

REFUSED: Mapping[str, str] = {
    "gae": "it needs a critic, which this trainer does not run",
    "remax": "it needs the reward of a greedy rollout per task, which no batch holds",
    "gdpo": "it needs one reward per dimension",
    "optimal_token_baseline": "its baseline differs by token, not by rollout",
    "tir_optimal_token_baseline": "its baseline differs by token, not by rollout",
}
"""Registered estimators that one entry per rollout cannot carry, and why."""


class AdvantageError(UserError):
    """An estimator or a reward that makes no advantage."""


class Score(Wire, frozen=True, kw_only=True):
    """What an estimator needs to know of a rollout."""

    rollout_id: str
    group_id: str
    reward: float | None
    num_trained: int

    @property
    def counts(self) -> bool:
        """Is it a sample of its group: rewarded, with at least one trained token?"""
        return self.reward is not None and self.num_trained > 0


def check_estimator(name: str) -> None:
    """Raise AdvantageError for an estimator that needs more than one reward per rollout."""
    if name in REFUSED:
        raise AdvantageError(
            f"algorithm.adv_estimator={name}: {REFUSED[name]}; use grpo, rloo, "
            "reinforce_plus_plus, reinforce_plus_plus_baseline, opo, gpg or one of your own "
            "registered with verl's register_adv_est"
        )


def score(trajectory: Trajectory) -> Score:
    """Raises AdvantageError when the reward is not a finite number."""
    reward = trajectory.reward
    if reward is not None and not math.isfinite(reward):
        raise AdvantageError(f"rollout {trajectory.rollout_id}: reward {reward} is not finite")
    return Score(
        rollout_id=trajectory.rollout_id,
        group_id=trajectory.group_id,
        reward=reward,
        num_trained=sum(row.num_trained for row in trajectory.rows),
    )


def rollout_advantages(
    scores: Sequence[Score], estimator: str = "grpo", algorithm: Any = None
) -> dict[str, float]:
    """Advantage by rollout_id; every rollout of `scores` has one.

    `algorithm` is verl's `algorithm` configuration (norm_adv_by_std_in_grpo and the like). By rule
    a rollout alone in its group, or in a group of equal rewards, gets exactly 0 from every
    estimator with a group baseline: there is nothing to compare it with.
    Raises AdvantageError for an estimator that does not fit.
    """
    check_estimator(estimator)
    counted = [s for s in scores if s.counts]
    values = _estimate(counted, estimator, algorithm) if counted else []
    silent = set() if estimator in BATCH_BASELINE else _groups_without_contrast(counted)
    advantages = {s.rollout_id: 0.0 for s in scores}
    for s, value in zip(counted, values, strict=True):
        advantages[s.rollout_id] = 0.0 if s.group_id in silent else value
    return advantages


def turn_advantages(
    trajectories: Sequence[Trajectory], estimator: str = "grpo", algorithm: Any = None
) -> dict[str, dict[str, float]]:
    """What process rewards add to the advantage of a rollout's turns: rollout_id -> turn_id -> it.

    GRPO's process supervision (Shao et al. 2024, DeepSeekMath, 4.1.3), on trees: every rewarded
    turn of a group is one entry of the estimator's table, and a turn gets what the turns from it on
    came out with, discounted by `algorithm.gamma` for each parent edge between them. Rewards flow
    to ancestors alone, never to a branch beside:

        t0 ── t1 (r 1)     gamma 0.5, baseline (1 + 0) / 2
         └─── t2 (r 0)     t1 0.5, t2 -0.5, t0 0.5 * 0.5 + 0.5 * -0.5 = 0

    Rollouts without process rewards are left out.
    """
    steps = [step for trajectory in trajectories for step in _steps(trajectory)]
    if not steps:
        return {}
    gamma = 1.0 if algorithm is None else float(algorithm.gamma)
    # A turn is named by its place in `steps`: ids of turns are unique in a rollout only.
    scores = [
        Score(
            rollout_id=str(place),
            group_id=step.group_id,
            reward=step.reward,
            num_trained=step.num_tokens,
        )
        for place, step in enumerate(steps)
    ]
    values = rollout_advantages(scores, estimator, algorithm)
    own: dict[str, dict[str, float]] = defaultdict(dict)
    for place, step in enumerate(steps):
        own[step.rollout_id][step.turn_id] = values[str(place)]
    return {
        trajectory.rollout_id: returns(trajectory, own[trajectory.rollout_id], gamma)
        for trajectory in trajectories
        if trajectory.rollout_id in own
    }


def returns(trajectory: Trajectory, values: Mapping[str, float], gamma: float) -> dict[str, float]:
    """The value of every turn in the rows, and those of all turns below it, discounted by gamma for
    each parent edge. Turns that are not in `values` are worth 0.

    rows t0 t1 t2 and t0 t3, values t2 1, t3 4, gamma 0.5  ->  t0 2.25, t1 0.5, t2 1, t3 4
    """
    parents: dict[str, str | None] = {}
    depths: dict[str, int] = {}
    for row in trajectory.rows:
        parent = None
        for depth, span in enumerate(row.turns):
            parents[span.turn_id], depths[span.turn_id] = parent, depth
            parent = span.turn_id
    totals = {turn_id: values.get(turn_id, 0.0) for turn_id in parents}
    for turn_id in sorted(depths, key=lambda t: depths[t], reverse=True):
        parent = parents[turn_id]
        if parent is not None:
            totals[parent] += gamma * totals[turn_id]
    return totals


class _Step(Wire, frozen=True, kw_only=True):
    """A turn with a reward of its own."""

    rollout_id: str
    group_id: str
    turn_id: str
    reward: float
    num_tokens: int


def _steps(trajectory: Trajectory) -> list[_Step]:
    """Raises AdvantageError for a reward that is not a finite number."""
    spans = {span.turn_id: span for row in trajectory.rows for span in row.turns}
    found = []
    for turn_id, reward in trajectory.turn_rewards.items():
        if not math.isfinite(reward):
            raise AdvantageError(
                f"rollout {trajectory.rollout_id}, turn {turn_id}: reward {reward} is not finite"
            )
        if turn_id in spans:
            found.append(
                _Step(
                    rollout_id=trajectory.rollout_id,
                    group_id=trajectory.group_id,
                    turn_id=turn_id,
                    reward=reward,
                    num_tokens=spans[turn_id].end - spans[turn_id].start,
                )
            )
    return found


def _estimate(scores: Sequence[Score], estimator: str, algorithm: Any) -> list[float]:
    """verl's estimator on a table of N rollouts x L tokens, L = 1 unless lengths matter."""
    import torch
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    config = AlgoConfig() if algorithm is None else algorithm
    lengths = [s.num_trained if estimator in WEIGHS_BY_LENGTH else 1 for s in scores]
    mask_NL = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).float()
    rewards_NL = torch.zeros_like(mask_NL)
    for i, s in enumerate(scores):
        rewards_NL[i, lengths[i] - 1] = float(s.reward or 0.0)
    arguments: dict[str, Any] = {
        "token_level_rewards": rewards_NL,
        "response_mask": mask_NL,
        "index": np.array([s.group_id for s in scores], dtype=object),
        "config": config,
    }
    if estimator in ("grpo", "grpo_vectorized"):
        arguments["norm_adv_by_std_in_grpo"] = config.norm_adv_by_std_in_grpo
    advantages_NL, _ = get_adv_estimator_fn(estimator)(**arguments)
    values = [float(advantages_NL[i, 0]) for i in range(len(scores))]
    if not all(map(math.isfinite, values)):
        raise AdvantageError(f"algorithm.adv_estimator={estimator} gave a value that is not finite")
    return values


def _groups_without_contrast(scores: Sequence[Score]) -> set[str]:
    sizes = Counter(s.group_id for s in scores)
    rewards: dict[str, set[float | None]] = defaultdict(set)
    for s in scores:
        rewards[s.group_id].add(s.reward)
    return {group for group, size in sizes.items() if size < 2 or len(rewards[group]) < 2}

"""Two sets of trajectories held against each other. Pure.

left, right = Results(), Results()
for trajectory in …: left.add(trajectory)
for trajectory in …: right.add(trajectory)
comparison = compare(left, right)
"""

from __future__ import annotations

from collections import Counter

import msgspec

from turnfold.replay.diff.facts import Facts, facts
from turnfold.schemas.trajectories import Trajectory


class Totals(msgspec.Struct, kw_only=True):
    """One set added up."""

    num_trajectories: int = 0
    num_aborted: int = 0
    num_rewards: int = 0
    sum_rewards: float = 0.0
    num_rows: int = 0
    num_tokens: int = 0
    num_sampled: int = 0
    num_trained: int = 0

    @property
    def mean_reward(self) -> float | None:
        return self.sum_rewards / self.num_rewards if self.num_rewards else None

    def add(self, one: Facts) -> None:
        self.num_trajectories += 1
        self.num_aborted += one.status == "aborted"
        self.num_rewards += one.reward is not None
        self.sum_rewards += one.reward or 0.0
        self.num_rows += one.num_rows
        self.num_tokens += one.num_tokens
        self.num_sampled += one.num_sampled
        self.num_trained += one.num_trained


class Results:
    """The trajectories of one side, the newest revision of each rollout."""

    def __init__(self) -> None:
        self.by_rollout: dict[str, Facts] = {}

    def add(self, trajectory: Trajectory) -> None:
        known = self.by_rollout.get(trajectory.rollout_id)
        if known is None or known.revision <= trajectory.revision:
            self.by_rollout[trajectory.rollout_id] = facts(trajectory)

    def totals(self) -> Totals:
        found = Totals()
        for one in self.by_rollout.values():
            found.add(one)
        return found


class Change(msgspec.Struct, frozen=True):
    """A rollout whose two trajectories differ."""

    rollout_id: str
    lines: tuple[str, ...]
    """What differs, for people: `reward 1 → 0.25`, `turn t1: dropped (orphan) → trained, 2 tokens`."""


class Comparison(msgspec.Struct, kw_only=True):
    """What two sets have in common and what they have not."""

    left: Totals
    right: Totals
    num_same: int = 0
    only_left: list[str] = []
    only_right: list[str] = []
    changes: list[Change] = []
    moved: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    """Sampled tokens by what became of them on the left and on the right, where that differs."""
    num_reward_changes: int = 0

    @property
    def is_same(self) -> bool:
        return not (self.changes or self.only_left or self.only_right)


def compare(left: Results, right: Results) -> Comparison:
    """Every rollout of either side, in order of their ids."""
    found = Comparison(left=left.totals(), right=right.totals())
    for rollout_id in sorted({*left.by_rollout, *right.by_rollout}):
        one, other = left.by_rollout.get(rollout_id), right.by_rollout.get(rollout_id)
        if other is None:
            found.only_left.append(rollout_id)
        elif one is None:
            found.only_right.append(rollout_id)
        elif one.digest == other.digest:
            found.num_same += 1
        else:
            found.num_reward_changes += one.reward != other.reward
            found.moved += _moved(one, other)
            found.changes.append(Change(rollout_id, tuple(_lines(one, other))))
    return found


def _lines(one: Facts, other: Facts) -> list[str]:
    lines = []
    for field, name in (
        ("revision", "revision"),
        ("status", "status"),
        ("reason", "reason"),
        ("reward", "reward"),
        ("num_rows", "rows"),
        ("num_tokens", "tokens in rows"),
        ("num_trained", "trained tokens"),
    ):
        before, after = getattr(one, field), getattr(other, field)
        if before != after:
            lines.append(f"{name} {_shown(before)} → {_shown(after)}")
    for turn_id in {**one.turns, **other.turns}:
        before, after = one.turns.get(turn_id), other.turns.get(turn_id)
        if before is None or after is None:
            lines.append(f"turn {turn_id}: only {'right' if before is None else 'left'}")
        elif before != after:
            lines.append(
                f"turn {turn_id}: {before.fate} → {after.fate}, {after.num_sampled} tokens"
            )
    return lines or ["the same rows by number, with other contents (--tokens shows them)"]


def _moved(one: Facts, other: Facts) -> Counter[tuple[str, str]]:
    moved: Counter[tuple[str, str]] = Counter()
    for turn_id in {**one.turns, **other.turns}:
        before, after = one.turns.get(turn_id), other.turns.get(turn_id)
        if before != after:
            size = (before or after).num_sampled  # type: ignore[union-attr]  # one of them is there
            moved[before.fate if before else "absent", after.fate if after else "absent"] += size
    return moved


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value in (None, "") else str(value)

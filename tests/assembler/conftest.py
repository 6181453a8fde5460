"""A small log of tasks, trajectories and decisions, written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from turnfold.assembler.cut import Wait, decide
from turnfold.assembler.groups import GroupsState, summary
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, GroupDropped
from turnfold.schemas.run import RunConfig
from turnfold.schemas.testing import task, trajectory


class Desk:
    """An assembler without a broker: one partition a topic, decisions applied at once."""

    def __init__(self, **config: Any) -> None:
        defaults: dict[str, Any] = {"group_size": 2, "groups_per_batch": 2, "max_staleness": 1}
        self.config = RunConfig(**{**defaults, **config})
        self.state = GroupsState(self.config)
        self.now = 1000.0
        self.num_tasks = 0
        self.num_trajectories = 0

    def dispatch(self, group_id: str, **fields: Any) -> None:
        defaults: dict[str, Any] = {
            "n": self.config.group_size,
            "dispatch_index": self.num_tasks,
            "dispatched_at": self.now,
        }
        self.state.add_task(task(group_id, **{**defaults, **fields}), 0, self.num_tasks)
        self.num_tasks += 1

    def finish(self, group_id: str, index: int, reward: float | None = None, **fields: Any) -> None:
        """One rollout of the group ends; rewards differ by slot unless given."""
        name = fields.pop("rollout_id", f"{group_id}-{index:02d}")
        aborted = fields.get("status") == "aborted"
        value = None if aborted else float(index) if reward is None else reward
        ended = trajectory(name, group_id=group_id, index=index, reward=value, **fields)
        place = self.num_trajectories
        self.state.add_rollout(summary(ended, 0, place, codec.digest(ended)))
        self.num_trajectories += 1

    def finish_group(self, group_id: str, **fields: Any) -> None:
        for index in range(self.config.group_size):
            self.finish(group_id, index, **fields)

    def decide(self) -> BatchCut | GroupDropped | Wait:
        return decide(self.state, self.config, self.now)

    def decide_all(self) -> list[BatchCut | GroupDropped]:
        """Decisions until there is nothing to decide; each is applied before the next."""
        decisions = []
        while not isinstance(decision := self.decide(), Wait):
            assert self.state.add_decision(decision)
            decisions.append(decision)
        return decisions


@pytest.fixture
def desk() -> Callable[..., Desk]:
    return Desk

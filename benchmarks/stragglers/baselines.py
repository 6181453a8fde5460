"""Policies to compare with, as they are found in the field, on the same clock and workload."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine import SimGroup, Simulation


@dataclass
class Cohorts:
    """Batch b is the groups that were dispatched for it, and waits for all of them.

    With `ahead` 0 this is synchronous training: dispatch, wait for all, train, serve. With 1 the
    next batch is sampled while one trains, by the version before ("one step off", wait-all).
    """

    ahead: int = 0
    name: str = "synchronous"
    is_deadline_own: bool = False
    _cohorts: list[list[SimGroup]] = field(default_factory=list)

    def served(self, sim: Simulation, version: int) -> None:
        while len(self._cohorts) < version + 1 + self.ahead:
            first = len(self._cohorts) * sim.world.groups_per_batch
            self._cohorts.append(
                [sim.dispatch(first + n) for n in range(sim.world.groups_per_batch)]
            )

    def published(self, sim: Simulation, version: int) -> None:
        self._train(sim)

    def rollout_ended(self, sim: Simulation, group: SimGroup, slot: int) -> None:
        if group.has_ended:
            self._train(sim)

    def group_timed_out(self, sim: Simulation, group: SimGroup) -> None:
        if not group.has_ended:
            sim.close(group, "group_timeout")
            self._train(sim)

    def woken(self, sim: Simulation) -> None:
        raise AssertionError("nobody asked to be woken")

    def _train(self, sim: Simulation) -> None:
        while len(sim.batches) < len(self._cohorts):
            cohort = self._cohorts[len(sim.batches)]
            if any(group.fate == "open" and not group.has_ended for group in cohort):
                return
            groups = [group for group in cohort if _is_trainable(sim, group)]
            sim.train(groups, [group.survivors for group in groups])


@dataclass
class DropStale:
    """Train the first groups that finish; at the end of a batch cancel what still runs, resend it.

    When a version is served, groups are sent until `in_flight` batches run or wait to be trained.
    """

    in_flight: int = 1
    name: str = "drop_stale"
    is_deadline_own: bool = False
    _next_number: int = 0
    _running: dict[str, SimGroup] = field(default_factory=dict)
    _ended: list[SimGroup] = field(default_factory=list)

    def served(self, sim: Simulation, version: int) -> None:
        self._refill(sim)

    def published(self, sim: Simulation, version: int) -> None:
        for group in list(self._running.values()):
            sim.cancel(group)
            del self._running[group.group_id]
            self._send(sim, group.number, group.attempt + 1)
        self._train(sim)

    def rollout_ended(self, sim: Simulation, group: SimGroup, slot: int) -> None:
        if not group.has_ended or self._running.pop(group.group_id, None) is None:
            return
        if _is_trainable(sim, group):
            self._ended.append(group)
        self._train(sim)

    def group_timed_out(self, sim: Simulation, group: SimGroup) -> None:
        if self._running.pop(group.group_id, None) is not None:
            sim.close(group, "group_timeout")
            self._send(sim, group.number, group.attempt + 1)

    def woken(self, sim: Simulation) -> None:
        raise AssertionError("nobody asked to be woken")

    def _train(self, sim: Simulation) -> None:
        size = sim.world.groups_per_batch
        while len(self._ended) >= size and len(sim.batches) <= sim.num_published:
            groups, self._ended = self._ended[:size], self._ended[size:]
            sim.train(groups, [group.survivors for group in groups])

    def _refill(self, sim: Simulation) -> None:
        wanted = self.in_flight * sim.world.groups_per_batch
        while len(self._running) + len(self._ended) < wanted:
            self._send(sim, self._next_number, 0)
            self._next_number += 1

    def _send(self, sim: Simulation, number: int, attempt: int) -> None:
        group = sim.dispatch(number, attempt)
        self._running[group.group_id] = group


def _is_trainable(sim: Simulation, group: SimGroup) -> bool:
    if group.fate != "open":
        return False
    if len(group.survivors) < sim.world.min_group_size:
        sim.close(group, "too_few_survivors")
        return False
    return True

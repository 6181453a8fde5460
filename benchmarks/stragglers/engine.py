"""The world around a policy, on a clock of its own: agents with limited slots, engines, a trainer.

A policy dispatches groups, cancels them and hands batches to the trainer; the world tells it what
has happened. Nothing sleeps: the clock jumps from one event to the next.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from workload import Draw, Workload

STARTED_AT = 1000.0
"""Virtual time of the start; a task dispatched at 0 has no deadline."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Sizes and times that every policy meets. Times are seconds."""

    group_size: int = 8
    groups_per_batch: int = 64
    min_group_size: int = 2
    slots: int = 512
    """Rollouts that run at a time; the others wait in order of dispatch."""
    train_s: float = 1500.0
    """Trainer time for one batch."""
    handover_s: float = 1.0
    """From a cut to the trainer having read the batch."""
    serve_s: float = 5.0
    """From a published version to every engine serving it."""
    rollout_timeout_s: float = 3000.0
    group_timeout_s: float = 3600.0


@dataclass(slots=True)
class SimGroup:
    """A dispatched group and what became of it."""

    group_id: str
    index: int
    """Order of dispatch."""
    number: int
    """Order of its task in the run: epoch * tasks + cursor."""
    attempt: int
    draw: Draw
    dispatched_at: float
    versions: list[int | None]
    """Version that served each rollout when it started."""
    outcomes: list[str | None]
    """completed, or why it was aborted; None while it runs or waits."""
    fate: str = "open"
    """open, trained, or why it was dropped."""
    trained: tuple[int, ...] = ()
    """Slots that were trained."""
    decided_at: float = 0.0
    batch: int = 0

    @property
    def has_ended(self) -> bool:
        return None not in self.outcomes

    @property
    def survivors(self) -> tuple[int, ...]:
        return tuple(slot for slot, what in enumerate(self.outcomes) if what == "completed")


@dataclass(slots=True)
class Batch:
    groups: list[SimGroup]
    staleness: list[int]
    """Of each trained rollout: version trained - version that served its start."""
    ready_at: float


@dataclass(frozen=True, slots=True)
class Step:
    """The trainer's account of one batch."""

    started_at: float
    waited_s: float
    """Time that the trainer stood idle before it."""


class Policy(Protocol):
    """Who decides. Every method may dispatch, cancel and train."""

    name: str
    is_deadline_own: bool
    """Whether the policy closes overdue groups by itself, through `wake_at`."""

    def served(self, sim: Simulation, version: int) -> None: ...
    def published(self, sim: Simulation, version: int) -> None: ...
    def rollout_ended(self, sim: Simulation, group: SimGroup, slot: int) -> None: ...
    def group_timed_out(self, sim: Simulation, group: SimGroup) -> None: ...
    def woken(self, sim: Simulation) -> None: ...


@dataclass
class Simulation:
    """Run `policy` until the trainer has trained `num_batches`."""

    policy: Policy
    workload: Workload
    world: World
    num_batches: int
    now: float = STARTED_AT
    version: int = 0
    """Served by every engine."""
    groups: list[SimGroup] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    num_published: int = 0
    finished_at: float = 0.0
    peak_running: int = 0
    _events: list[tuple[float, int, str, Any]] = field(default_factory=list)
    _num_events: int = 0
    _queue: deque[tuple[SimGroup, int]] = field(default_factory=deque)
    _num_running: int = 0
    _is_training: bool = False
    _free_since: float = STARTED_AT
    _wake_at: float | None = None

    def run(self) -> None:
        """Raises RuntimeError when nothing is going to happen any more."""
        self.policy.served(self, 0)
        while self.num_published < self.num_batches:
            if not self._events:
                raise RuntimeError(
                    f"{self.policy.name}: expected {self.num_batches} batches, but after "
                    f"{self.num_published} nothing is going to happen any more"
                )
            self.now, _, kind, what = heapq.heappop(self._events)
            self._handle(kind, what)

    def dispatch(self, number: int, attempt: int = 0) -> SimGroup:
        """Send a group of the `number`-th task to the agents."""
        world = self.world
        index = len(self.groups)
        group = SimGroup(
            group_id=f"sim-{index:06d}",
            index=index,
            number=number,
            attempt=attempt,
            draw=self.workload.draw(number=number, attempt=attempt, n=world.group_size),
            dispatched_at=self.now,
            versions=[None] * world.group_size,
            outcomes=[None] * world.group_size,
        )
        self.groups.append(group)
        if not self.policy.is_deadline_own:
            self._push(self.now + world.group_timeout_s, "group_timeout", group)
        if not group.draw.is_lost:
            self._queue.extend((group, slot) for slot in range(world.group_size))
            self._fill_slots()
        return group

    def close(self, group: SimGroup, fate: str) -> None:
        """Decide on a group; what still runs of it runs on."""
        group.fate, group.decided_at = fate, self.now

    def cancel(self, group: SimGroup, fate: str = "cancelled") -> None:
        """Decide on a group, and stop what runs of it."""
        self.close(group, fate)
        self.stop(group)

    def stop(self, group: SimGroup) -> None:
        """Give the slots of what still runs of a group to others."""
        for slot, outcome in enumerate(group.outcomes):
            if outcome is None:
                group.outcomes[slot] = "cancelled"
                if group.versions[slot] is not None:
                    self._num_running -= 1
        self._fill_slots()

    def train(self, groups: list[SimGroup], trained: list[tuple[int, ...]]) -> None:
        """Queue the next batch; `trained` are the slots of each group."""
        index = len(self.batches) + 1
        staleness = []
        for group, slots in zip(groups, trained, strict=True):
            self.close(group, "trained")
            group.trained, group.batch = slots, index
            versions = [group.versions[slot] for slot in slots]
            staleness += [index - 1 - version for version in versions if version is not None]
        self.batches.append(Batch(groups, staleness, self.now + self.world.handover_s))
        self._push(self.now + self.world.handover_s, "batch_ready", None)

    def wake_at(self, at: float | None) -> None:
        """Call `policy.woken` at this time, unless it asks for another one before."""
        self._wake_at = at
        if at is not None:
            self._push(max(at, self.now), "wake", at)

    def _push(self, at: float, kind: str, what: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, kind, what))

    def _handle(self, kind: str, what: Any) -> None:
        match kind:
            case "rollout_end":
                self._end_rollout(*what)
            case "batch_ready":
                self._start_training()
            case "trained":
                self._publish()
            case "served":
                self.version = what
                self.policy.served(self, what)
            case "group_timeout":
                if what.fate == "open":
                    self.policy.group_timed_out(self, what)
            case "wake":
                if what == self._wake_at:
                    self.policy.woken(self)

    def _fill_slots(self) -> None:
        while self._queue and self._num_running < self.world.slots:
            group, slot = self._queue.popleft()
            if group.outcomes[slot] is not None:
                continue  # cancelled before it could start
            group.versions[slot] = self.version
            self._num_running += 1
            seconds, outcome = self._end_of(group, slot)
            self._push(self.now + seconds, "rollout_end", (group, slot, outcome))
        self.peak_running = max(self.peak_running, self._num_running)

    def _end_of(self, group: SimGroup, slot: int) -> tuple[float, str]:
        length, fate = group.draw.lengths[slot], group.draw.fates[slot]
        limit = self.world.rollout_timeout_s
        if fate == "hangs" or length > limit:
            return limit, "deadline"
        if fate == "fails":
            return length * group.draw.failing_at[slot], "agent_error"
        return length, "completed"

    def _end_rollout(self, group: SimGroup, slot: int, outcome: str) -> None:
        if group.outcomes[slot] is not None:
            return  # cancelled before
        group.outcomes[slot] = outcome
        self._num_running -= 1
        self._fill_slots()
        self.policy.rollout_ended(self, group, slot)

    def _start_training(self) -> None:
        index = len(self.steps)
        if self._is_training or index == len(self.batches):
            return
        if self.batches[index].ready_at > self.now:
            return
        self._is_training = True
        self.steps.append(Step(self.now, self.now - self._free_since))
        self._push(self.now + self.world.train_s, "trained", None)

    def _publish(self) -> None:
        self._is_training = False
        self._free_since = self.finished_at = self.now
        self.num_published += 1
        self._push(self.now + self.world.serve_s, "served", self.num_published)
        self._start_training()
        self.policy.published(self, self.num_published)

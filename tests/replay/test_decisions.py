"""Decisions of the assembler, taken again from what they had seen."""

import hashlib
from collections import Counter

import msgspec

from turnfold.assembler.cut import Wait, decide
from turnfold.assembler.groups import GroupsState, summary
from turnfold.log.records import Record
from turnfold.replay.decisions import Decisions, Verdict
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, Decision
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task
from turnfold.schemas.testing import task, trajectory
from turnfold.schemas.trajectories import Trajectory

CONFIG = RunConfig(group_size=2, groups_per_batch=2, min_group_size=2, group_timeout_s=50)


class Log:
    """Tasks, trajectories and the decisions of an assembler that saw them one by one."""

    def __init__(self) -> None:
        self.tasks: list[Record] = []
        self.trajectories: list[Record] = []
        self.decisions: list[Decision] = []
        self.config = CONFIG
        self.state = GroupsState(CONFIG)

    def add_task(self, message: Task) -> None:
        self.tasks.append(record("tasks", len(self.tasks), message))
        self.state.add_task(message, 0, len(self.tasks) - 1)

    def add_trajectory(self, message: Trajectory, now: float) -> None:
        found = record("trajectories", len(self.trajectories), message)
        self.trajectories.append(found)
        digest = hashlib.sha256(found.value or b"").hexdigest()
        self.state.add_rollout(summary(message, 0, found.offset, digest))
        self.decide(now)

    def decide(self, now: float) -> None:
        decision = decide(self.state, self.config, now)
        while not isinstance(decision, Wait):
            self.decisions.append(decision)
            self.state.add_decision(decision)
            decision = decide(self.state, self.config, now)

    def retaken(self) -> Verdict:
        collected = Decisions()
        for found in self.tasks:
            collected.add_task(found)
        for found in self.trajectories:
            made = codec.decode(Trajectory, found.value or b"")
            collected.add_rollout(
                0, found.offset, summary(made, 0, found.offset, codec.digest(made))
            )
        for offset, decision in enumerate(self.decisions):
            collected.add_decision(record("batches", offset, decision))
        (verdict,) = collected.retake()
        return verdict


def record(topic: str, offset: int, message: msgspec.Struct) -> Record:
    return Record(
        topic=topic,
        partition=0,
        offset=offset,
        key=b"",
        value=codec.encode(message),
        timestamp=0.0,
    )


def run() -> Log:
    """Five groups; one loses a rollout, one is never finished and closes at its deadline."""
    log = Log()
    for index in range(5):
        log.add_task(task(f"g{index}", n=2, dispatch_index=index, dispatched_at=100.0))
    slots: Counter[int] = Counter()
    for now, index in enumerate([2, 0, 1, 2, 0, 3, 1, 3]):
        reward = None if (index, now) == (0, 4) else float(now)
        slot = slots[index]
        slots[index] += 1
        made = trajectory(f"g{index}-{slot}", group_id=f"g{index}", index=slot, reward=reward)
        log.add_trajectory(made, now=110.0 + now)
    log.decide(now=151.0)
    return log


def test_every_decision_taken_again_gives_the_same_bytes() -> None:
    log = run()
    assert {type(decision).__name__ for decision in log.decisions} == {"BatchCut", "GroupDropped"}
    verdict = log.retaken()
    assert (verdict.num_same, verdict.differences, verdict.unchecked) == (
        len(log.decisions),
        (),
        (),
    )


def test_a_decision_that_the_log_does_not_support_is_named() -> None:
    log = run()
    place, cut = next((i, d) for i, d in enumerate(log.decisions) if isinstance(d, BatchCut))
    log.decisions[place] = msgspec.structs.replace(cut, groups=cut.groups[::-1])
    verdict = log.retaken()
    assert [difference.subject for difference in verdict.differences] == [f"batch {cut.index}"]
    assert verdict.num_same == len(log.decisions) - 1


def test_a_decision_that_lost_is_not_held_against_anybody() -> None:
    log = run()
    log.decisions += log.decisions
    assert log.retaken().differences == ()


def test_a_decision_that_names_no_configuration_is_not_checked_and_says_so() -> None:
    log = run()
    log.decisions[0] = msgspec.structs.replace(log.decisions[0], config=None)
    verdict = log.retaken()
    assert verdict.num_same == len(log.decisions) - 1
    assert verdict.differences == ()
    assert len(verdict.unchecked) == 1


def test_a_run_that_changed_its_sizes_on_the_way_is_checked_whole() -> None:
    log = Log()
    for index in range(3):
        log.add_task(task(f"g{index}", n=2, dispatch_index=index, dispatched_at=100.0))
    for index in range(2):
        for slot in range(2):
            made = trajectory(f"g{index}-{slot}", group_id=f"g{index}", index=slot, reward=1.0)
            log.add_trajectory(made, now=110.0)
    log.config = msgspec.structs.replace(CONFIG, groups_per_batch=1, group_timeout_s=20)
    log.state.reconfigure(log.config)
    made = trajectory("g2-0", group_id="g2", index=0, reward=1.0)
    log.add_trajectory(made, now=130.0)
    assert [type(decision).__name__ for decision in log.decisions] == ["BatchCut", "GroupDropped"]
    verdict = log.retaken()
    assert (verdict.num_same, verdict.differences, verdict.unchecked) == (2, (), ())

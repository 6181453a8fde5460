"""Every decision of the assembler, taken again from what it had seen. Pure.

A manifest says how far its assembler had read (`positions`) and when it decided (`at`). With the
tasks and trajectories below those positions, the decisions before it and the configuration that it
names, `decide` must give the same bytes; `decide_early` and `decide_evaluation` give theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, assert_never

import msgspec

from turnfold.assembler.cut import Wait, decide, decide_early
from turnfold.assembler.groups import GroupsState, RolloutSummary, TopicName
from turnfold.assembler.scoring import decide_evaluation
from turnfold.log.records import Record
from turnfold.replay.compare import Difference
from turnfold.schemas import codec
from turnfold.schemas.batches import (
    BatchCut,
    Decision,
    EvaluationCompleted,
    GroupDropped,
    GroupEvaluated,
)
from turnfold.schemas.decisions import DecisionLog
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task

Seen = list[tuple[int, Task | RolloutSummary | None]]
"""Offsets of one partition in order, with what lies there; None where it could not be decoded."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome for one run."""

    run_id: str
    num_same: int
    differences: tuple[Difference, ...]
    unchecked: tuple[str, ...]
    """Decisions that do not say under which configuration they were taken."""


class Decisions:
    """Collects what the assembler saw and decided, then takes every decision again."""

    def __init__(self) -> None:
        self._decisions: dict[str, list[Decision]] = defaultdict(list)
        self._tasks: dict[int, Seen] = defaultdict(list)
        self._rollouts: dict[int, Seen] = defaultdict(list)

    def add_decision(self, record: Record) -> None:
        decision = decoded(Decision, record)
        if decision is not None:
            self._decisions[decision.run_id].append(decision)

    def add_task(self, record: Record) -> None:
        self._tasks[record.partition].append((record.offset, decoded(Task, record)))

    def add_rollout(self, partition: int, offset: int, rollout: RolloutSummary | None) -> None:
        """What lies there in the trajectories topic, None when it could not be decoded."""
        self._rollouts[partition].append((offset, rollout))

    def retake(self) -> list[Verdict]:
        """One verdict for each run that decided anything."""
        return [
            self._retake(run_id, decisions) for run_id, decisions in sorted(self._decisions.items())
        ]

    def _retake(self, run_id: str, decisions: Sequence[Decision]) -> Verdict:
        first_wins = DecisionLog(run_id)
        accepted = [decision for decision in decisions if first_wins.add(decision)]
        state = GroupsState(RunConfig(run_id=run_id))
        unread = {"tasks": _cursors(self._tasks), "trajectories": _cursors(self._rollouts)}
        num_same, differences, unchecked = 0, list[Difference](), list[str]()
        for decision in accepted:
            _advance(state, unread["tasks"], "tasks", decision.positions.tasks)
            _advance(state, unread["trajectories"], "trajectories", decision.positions.trajectories)
            if decision.config is None:
                unchecked.append(_named(decision))
            elif (again := _again(state, decision, decision.config)) is None:
                num_same += 1
            else:
                differences.append(Difference(_named(decision), f"taken again: {again}"))
            state.add_decision(decision)
        return Verdict(
            run_id=run_id,
            num_same=num_same,
            differences=tuple(differences),
            unchecked=tuple(unchecked),
        )


def _again(state: GroupsState, decision: Decision, config: RunConfig) -> Decision | Wait | None:
    """What is decided this time; None when it is the same, byte for byte."""
    if config != state.config:
        state.reconfigure(config)
    again = _taken(state, decision, config)
    is_same = isinstance(again, Decision) and codec.encode(again) == codec.encode(decision)
    return None if is_same else again


def _taken(state: GroupsState, decision: Decision, config: RunConfig) -> Decision | Wait:
    """The decision of the kind that was taken: an assembler chooses when to take which."""
    match decision:
        case GroupDropped(is_early=True):
            return decide_early(state, config, decision.at) or Wait()
        case BatchCut() | GroupDropped():
            return decide(state, config, decision.at)
        case GroupEvaluated() | EvaluationCompleted():
            return decide_evaluation(state, config, decision.at) or Wait()
        case _:
            assert_never(decision)


def _cursors(seen: dict[int, Seen]) -> dict[int, Seen]:
    """The records of each partition, to be taken from the end of a reversed list."""
    return {partition: found[::-1] for partition, found in seen.items()}


def _advance(
    state: GroupsState, unread: dict[int, Seen], topic: TopicName, positions: dict[int, int]
) -> None:
    for partition, position in positions.items():
        waiting = unread.get(partition, [])
        while waiting and waiting[-1][0] < position:
            offset, found = waiting.pop()
            match found:
                case Task():
                    state.add_task(found, partition, offset)
                case RolloutSummary():
                    state.add_rollout(found)
                case None:
                    state.mark_read(topic, partition, offset)


def decoded(kind: Any, record: Record) -> Any:
    """The message of this kind in a record, None where there is none."""
    try:
        return codec.decode(kind, record.value or b"", record.content_type)
    except codec.CodecError:
        return None


def _named(decision: Decision) -> str:
    match decision:
        case BatchCut():
            return f"batch {decision.index}"
        case GroupDropped():
            return f"group {decision.group_id} ({decision.reason})"
        case GroupEvaluated():
            return f"evaluation group {decision.group_id}"
        case EvaluationCompleted():
            return f"evaluation of version {decision.version}"
        case _:
            assert_never(decision)

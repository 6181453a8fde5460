"""The curve of evaluations, and that its decisions can be taken again from the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from turnfold.assembler.cut import decide_early
from turnfold.assembler.groups import GroupsState
from turnfold.assembler.rollouts import summary
from turnfold.assembler.scoring import decide_evaluation
from turnfold.log.records import Record
from turnfold.replay.decisions import Decisions
from turnfold.replay.evals.cli import evals
from turnfold.replay.evals.curve import curve_of
from turnfold.replay.logfile import Header, write_log
from turnfold.schemas import codec
from turnfold.schemas.batches import Decision, EvaluationCompleted, GroupEvaluated
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Evaluation
from turnfold.schemas.testing import task, trajectory
from turnfold.schemas.trajectories import Trajectory

CONFIG = RunConfig(group_size=2, groups_per_batch=2, group_timeout_s=50.0)
app = typer.Typer()
app.command("evals")(evals)


class Log:
    """An assembler that writes its log: two rounds, one of them under way."""

    def __init__(self) -> None:
        self.state = GroupsState(CONFIG)
        self.records: list[Record] = []
        self.decisions: list[Decision] = []
        self.now = 1000.0

    def evaluate(self, version: int, cursor: int, *rewards: float, num_tasks: int = 2) -> None:
        """One task with two rollouts; those without a reward never end."""
        name = f"eval-{version}-{cursor}"
        sent = task(
            name,
            n=2,
            task_id=f"t{cursor}",
            split="eval",
            cursor=cursor,
            dispatch_index=len(self.records),
            dispatched_at=self.now,
            evaluation=Evaluation(version=version, num_tasks=num_tasks),
        )
        self.state.add_task(sent, 0, self.add("tasks", sent))
        for index, reward in enumerate(rewards):
            ended = trajectory(
                f"{name}-{index:02d}",
                group_id=name,
                index=index,
                reward=reward,
                split="eval",
                dispatch_index=0,
                policy_version=version,
            )
            offset = self.add("trajectories", ended)
            self.state.add_rollout(summary(ended, 0, offset, codec.digest(ended)))

    def decide(self) -> None:
        while (decision := self.next_decision()) is not None:
            self.add("batches", decision)
            self.decisions.append(decision)
            assert self.state.add_decision(decision)

    def next_decision(self) -> Decision | None:
        early = decide_early(self.state, CONFIG, self.now)
        return early or decide_evaluation(self.state, CONFIG, self.now)

    def add(self, topic: str, message: Any) -> int:
        offset = sum(record.topic == f"turnfold.{topic}" for record in self.records)
        self.records.append(
            Record(
                topic=f"turnfold.{topic}",
                partition=0,
                offset=offset,
                key=b"k",
                value=codec.encode(message),
                timestamp=0.0,
            )
        )
        return offset


@pytest.fixture
def log() -> Log:
    made = Log()
    made.evaluate(0, 1, 0.0, 0.0)
    made.decide()
    made.evaluate(0, 0, 1.0)
    made.now += 60.0  # its second rollout hangs
    made.decide()
    made.evaluate(10, 0, 1.0, 1.0)
    made.decide()
    return made


def test_the_curve_has_a_point_for_each_round(log: Log) -> None:
    first, second = curve_of(log.decisions)
    assert first.completed is not None
    assert (first.version, first.completed.mean_reward) == (0, 0.5)
    assert [(t.task_id, t.rewards) for t in first.tasks] == [("t0", (1.0,)), ("t1", (0.0, 0.0))]
    assert first.tasks[0].left_out == {"eval-0-0-01": "not_finished"}
    assert (second.version, second.completed, len(second.tasks)) == (10, None, 1)


def test_a_second_result_of_a_group_or_round_changes_nothing(log: Log) -> None:
    doubled = [decision for decision in log.decisions for _ in range(2)]
    assert curve_of(doubled) == curve_of(log.decisions)


def retaken(log: Log) -> Any:
    collected = Decisions()
    for record in log.records:
        match record.topic:
            case "turnfold.tasks":
                collected.add_task(record)
            case "turnfold.batches":
                collected.add_decision(record)
            case _:
                found = codec.decode(Trajectory, record.value or b"")
                place = (record.partition, record.offset)
                collected.add_rollout(*place, summary(found, *place, codec.digest(found)))
    (verdict,) = collected.retake()
    return verdict


def test_evaluations_are_taken_again_byte_for_byte(log: Log) -> None:
    verdict = retaken(log)
    assert (verdict.num_same, verdict.differences) == (4, ())


@pytest.mark.parametrize("kind", [GroupEvaluated, EvaluationCompleted])
def test_a_result_that_the_log_does_not_give_is_found(log: Log, kind: type) -> None:
    for place, record in enumerate(log.records):
        if record.topic == "turnfold.batches":
            decision: Any = codec.decode(Decision, record.value or b"")
            if isinstance(decision, kind):
                forged = msgspec.structs.replace(decision, left_out=type(decision.left_out)())
                log.records[place] = msgspec.structs.replace(record, value=codec.encode(forged))
    assert retaken(log).differences[0].subject.startswith("evaluation")


def written(log: Log, path: Path) -> Path:
    with path.open("wb") as file:
        topics = {f"turnfold.{name}": 1 for name in ("tasks", "trajectories", "batches", "events")}
        write_log(file, Header(namespace="turnfold", topics=topics), log.records)
    return path


def test_the_command_shows_the_curve_for_people(log: Log, tmp_path: Path) -> None:
    path = written(log, tmp_path / "log.tflog")
    shown = CliRunner().invoke(app, ["--file", str(path), "--tasks"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0, shown.output
    lines = [" ".join(line.split()) for line in shown.output.splitlines()]
    assert "run version tasks rollouts mean reward pass@1 sampled by no reward" in lines
    assert any(line.startswith("default 0 2/2 3 0.500 0.500") for line in lines)
    assert any("not_finished 1" in line for line in lines)
    assert any(line.startswith("default 10 1/2 under way") for line in lines)
    assert "default 0 t1 0/2 0 0" in lines


def test_the_command_prints_json(log: Log, tmp_path: Path) -> None:
    path = written(log, tmp_path / "log.tflog")
    shown = CliRunner().invoke(app, ["--file", str(path), "--json", "--run-id", "default"])
    rounds = json.loads(shown.output)["rounds"]
    assert [r["version"] for r in rounds] == [0, 10]
    assert rounds[0]["completed"]["pass_at"] == {"1": 0.5}


def test_a_log_without_evaluations_says_how_to_get_some(tmp_path: Path) -> None:
    path = written(Log(), tmp_path / "log.tflog")
    shown = CliRunner().invoke(app, ["--file", str(path)])
    assert "--eval-dataset" in shown.output

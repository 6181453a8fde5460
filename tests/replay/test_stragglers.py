"""Trained against dispatched: the tests see bias where it is, and none where it is not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from turnfold.log.records import Record
from turnfold.replay.assignments import Assignments
from turnfold.replay.logfile import Header, write_log
from turnfold.replay.stragglers.bias import GroupLengths, compare, ks_distance
from turnfold.replay.stragglers.cli import stragglers
from turnfold.replay.stragglers.report import RunReport, Stragglers
from turnfold.schemas import codec
from turnfold.schemas.batches import (
    BatchCut,
    GroupDropped,
    GroupRef,
    LeftOut,
    Positions,
    RolloutRef,
)
from turnfold.schemas.testing import finished, row, started, task, trajectory

EMPTY = Positions(tasks={}, trajectories={})
NUM_GROUPS = 120
app = typer.Typer()
app.command("stragglers")(stragglers)


def drawn(seed: int, is_biased: bool) -> list[GroupLengths]:
    """120 groups of 3 on 40 tasks; a third is dropped, the longest ones when biased."""
    source = random.Random(seed)
    groups = []
    for number in range(NUM_GROUPS):
        scale = 1.0 + number % 40
        lengths = tuple(round(scale * source.paretovariate(1.5), 1) for _ in range(3))
        groups.append((f"t{number % 40}", lengths))
    order = sorted(range(NUM_GROUPS), key=lambda n: sum(groups[n][1]) if is_biased else n * 7 % 11)
    trained = set(order[: 2 * NUM_GROUPS // 3])
    return [
        GroupLengths(name, lengths, (number in trained,) * 3)
        for number, (name, lengths) in enumerate(groups)
    ]


def test_dropping_the_longest_groups_is_seen_by_length_and_by_task() -> None:
    test = compare(drawn(1, is_biased=True), permutations=200)
    assert test is not None
    assert test.longer is not None
    assert test.longer < 0.3
    assert max(test.ks_p, test.longer_p or 1.0, test.task_p) < 0.01


def test_dropping_groups_whatever_their_length_is_not_seen() -> None:
    p = [compare(drawn(seed, is_biased=False), permutations=100) for seed in range(5)]
    assert all(test is not None and test.ks_p > 0.01 and test.task_p > 0.01 for test in p)


def test_p_values_are_those_of_chance() -> None:
    """Under the hypothesis itself they are spread evenly: some 30 of 60 are below one half."""
    source = random.Random(0)
    below = 0
    for _ in range(60):
        groups = [
            GroupLengths("t", (source.random(), source.random()), (source.random() < 0.7,) * 2)
            for _ in range(20)
        ]
        test = compare(groups, permutations=50)
        below += test is not None and test.ks_p < 0.5
    assert 15 <= below <= 45


def test_equal_lengths_are_no_bias_in_whatever_order_they_come() -> None:
    groups = [GroupLengths("t", (5.0, 5.0), (number < 3,) * 2) for number in range(10)]
    test = compare(groups, permutations=20)
    assert test is not None
    assert (test.ks, test.ks_p, test.longer, test.longer_p) == (0.0, 1.0, 0.5, 1.0)


@pytest.mark.parametrize("groups", [[], [GroupLengths("t", (1.0,), (False,))]])
def test_nothing_trained_is_nothing_to_compare(groups: Any) -> None:
    assert compare(groups, permutations=5) is None


def test_when_all_are_trained_nothing_is_longer_than_the_rest() -> None:
    test = compare([GroupLengths("t", (1.0, 2.0), (True, True))], permutations=5)
    assert test is not None
    assert (test.ks, test.longer, test.longer_p) == (0.0, None, None)


def test_the_distance_is_the_largest_gap_between_the_distributions() -> None:
    trained = np.array([True, True, False, False])
    assert ks_distance(trained, np.arange(4)) == 0.5
    assert ks_distance(trained, np.arange(4)[::-1]) == 0.5


class Log:
    """Groups of two rollouts: some trained, some dropped, one undecided."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []

    def group(self, number: int, *lengths: int, fate: str) -> None:
        name = f"g{number}"
        sent = task(name, n=2, task_id=f"t{number % 2}", dispatch_index=number)
        self.messages.append(("tasks", sent))
        for index, length in enumerate(lengths):
            rollout_id = f"{name}-{index:02d}"
            at = {"at": 100.0}
            self.messages.append(("events", started(rollout_id, group_id=name, index=index, **at)))
            self.messages.append(("events", finished(rollout_id, at=100.0 + length)))
            rows = [row([1] * (length + 1), [0] + [1] * length)]
            ended = trajectory(rollout_id, group_id=name, index=index, rows=rows)
            self.messages.append(("trajectories", ended))
        if fate == "trained":
            self.cut(number, name, len(lengths))
        elif fate:
            self.drop(number, name, fate)

    def cut(self, number: int, name: str, num_trained: int) -> None:
        refs = tuple(
            RolloutRef(
                rollout_id=f"{name}-{index:02d}",
                index=index,
                partition=0,
                offset=0,
                digest="d",
                reward=1.0,
                num_rows=1,
                num_tokens=1,
                num_trained=1,
                max_row_tokens=1,
                min_policy_version=0,
                max_policy_version=0,
            )
            for index in range(num_trained)
        )
        missing = tuple(
            LeftOut(rollout_id=f"{name}-{index:02d}", reason="not_finished")
            for index in range(num_trained, 2)
        )
        group = GroupRef(group_id=name, dispatch_index=number, rollouts=refs, left_out=missing)
        index = (
            sum(topic == "batches" and isinstance(m, BatchCut) for topic, m in self.messages) + 1
        )
        cut = BatchCut(
            run_id="default",
            index=index,
            groups=(group,),
            positions=EMPTY,
            at=0.0,
            config_digest="",
        )
        self.messages.append(("batches", cut))

    def drop(self, number: int, name: str, reason: str) -> None:
        dropped = GroupDropped(
            run_id="default",
            group_id=name,
            dispatch_index=number,
            reason=reason,
            positions=EMPTY,
            at=0.0,
            config_digest="",
        )
        self.messages.append(("batches", dropped))

    def report(self) -> RunReport:
        assigned = Assignments()
        found = Stragglers(assigned)
        for topic, message in self.messages:
            match topic:
                case "tasks":
                    found.add_task(message)
                case "events":
                    found.add_event(message)
                case "trajectories":
                    found.add_trajectory(message)
                case _:
                    assigned.add_decision(message)
        (report,) = found.reports(permutations=50)
        return report

    def write(self, path: Path) -> Path:
        topics = {f"turnfold.{name}": 1 for name in ("tasks", "trajectories", "batches", "events")}
        topics["turnfold.policies"] = 1
        records = [
            Record(
                topic=f"turnfold.{topic}",
                partition=0,
                offset=offset,
                key=getattr(message, "rollout_id", "k").encode(),
                value=codec.encode(message),
                timestamp=0.0,
            )
            for offset, (topic, message) in enumerate(self.messages)
        ]
        with path.open("wb") as file:
            write_log(file, Header(namespace="turnfold", topics=topics), records)
        return path


@pytest.fixture
def log() -> Log:
    made = Log()
    made.group(0, 10, 20, fate="trained")
    made.group(1, 30, fate="trained")  # one rollout never ended
    made.group(2, 100, 200, fate="stale")
    made.group(3, 5, fate="")
    return made


def test_each_dispatched_rollout_of_a_decided_group_is_accounted_for(log: Log) -> None:
    report = log.report()
    assert (report.num_groups, report.num_undecided_groups) == (4, 1)
    assert (report.num_rollouts, report.num_ended, report.num_trained) == (6, 5, 3)
    assert report.reasons == {"group_dropped:stale": 2, "group_decided_before": 1}
    assert [(t.task_id, t.num_rollouts, t.num_trained) for t in report.tasks] == [
        ("t0", 4, 2),
        ("t1", 2, 1),
    ]


def test_lengths_are_sampled_tokens_turns_and_seconds(log: Log) -> None:
    report = log.report()
    for measure in ("tokens", "seconds"):
        bins = report.by_length[measure].bins
        assert sum(part.num_rollouts for part in bins) == 5
        assert (bins[0].first, bins[-1].last) == (10.0, 200.0)
        assert bins[-1].num_trained == 0
    assert {part.last for part in report.by_length["turns"].bins} == {1.0}


def test_the_command_shows_a_table_and_json(log: Log, tmp_path: Path) -> None:
    path = log.write(tmp_path / "log.tflog")
    shown = CliRunner().invoke(app, ["--file", str(path)], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert "3 of 4 groups decided, 3 of 6 rollouts trained" in shown.output
    assert "group_dropped:stale 2" in shown.output
    assert "completed, by seconds" in shown.output
    made = CliRunner().invoke(app, ["--file", str(path), "--json", "--permutations", "10"])
    (report,) = json.loads(made.output)["runs"]
    assert report["by_length"]["tokens"]["all"]["ks"] == pytest.approx(0.4)
    other = CliRunner().invoke(app, ["--file", str(path), "--run-id", "other"])
    assert "nothing was dispatched" in other.output

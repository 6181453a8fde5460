"""The whole pipeline on real parts, with every process killed once while it runs."""

import asyncio
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from turnfold.embedded.demo.app import (
    TOPICS,
    decoded,
    free_ports,
    read_progress,
    running_broker,
    write_dataset,
)
from turnfold.embedded.demo.pipeline import Layout, Ports, Training, environment, service_specs
from turnfold.embedded.demo.progress import Progress
from turnfold.embedded.demo.supervisor import Supervisor
from turnfold.embedded.tiny.cli import tiny_model
from turnfold.log.client import Reader, reader_from_start
from turnfold.schemas.batches import BatchCut
from turnfold.schemas.events import RolloutAborted, RolloutFinished, TurnCompleted
from turnfold.schemas.policies import PolicyPublished
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task

pytestmark = [pytest.mark.pipeline, pytest.mark.verl, pytest.mark.timeout(900)]

NUM_BATCHES = 6
TRAINING = Training(num_batches=NUM_BATCHES, num_mini_batches=2, ppo_epochs=1, learning_rate=1e-3)
CONFIG = RunConfig(
    run_id="killed",
    group_size=4,
    groups_per_batch=4,
    min_group_size=2,
    max_staleness=2,
    group_timeout_s=40.0,
    rollout_timeout_s=25.0,
    max_row_tokens=2048,
    max_attempts=3,
)
KILLED_IN_TURN = (
    "healer",
    "gateway",
    "assembler",
    "dispatcher",
    "relay",
    "inference",
    "worker",
    "trainer",
    "broker",
)


@dataclass
class Run:
    """What a run with kills left behind."""

    layout: Layout
    kills: list[str] = field(default_factory=list)
    acknowledged: list[tuple[str, str]] = field(default_factory=list)
    """(rollout_id, turn_id) of every answer that an agent received."""
    turns: list[TurnCompleted] = field(default_factory=list)
    policies: list[PolicyPublished] = field(default_factory=list)
    batches: list[BatchCut] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    terminals: list[RolloutFinished | RolloutAborted] = field(default_factory=list)
    progress: Progress = field(default_factory=Progress)
    replay: tuple[int, str] = (1, "")
    """Exit code and output of `turnfold replay`."""
    ledger: tuple[int, str] = (1, "")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run to the end, with each process killed once on the way."""
    run_dir = tmp_path_factory.mktemp("run")
    model_dir = run_dir / "model"
    tiny_model(out=model_dir, seed=0)
    layout = Layout(
        run_dir=run_dir,
        model_dir=model_dir,
        ports=Ports(**dict(zip(("broker", "inference", "gateway"), free_ports(3), strict=True))),
        config=CONFIG,
        training=TRAINING,
        control_key="control-key-of-the-test",
        key_secret="secret-of-the-test",
        python=sys.executable,
        agent=f"{Path(__file__).parent / 'recording_agent.py'}:run",
        num_concurrent=16,
    )
    write_dataset(layout.dataset, seed=0)
    return asyncio.run(_run_with_kills(layout))


async def _run_with_kills(layout: Layout) -> Run:
    run = Run(layout)
    record_file = layout.run_dir / "acknowledged.txt"
    env = {**os.environ, **environment(layout), "RECORD_FILE": str(record_file)}
    async with running_broker(layout) as broker:
        services = Supervisor(service_specs(layout), layout.run_dir / "logs", env, max_restarts=20)
        async with services:
            await asyncio.wait_for(_kill_each_in_turn(run, services, broker), 600)
        await _collect(run, record_file, env)
    return run


async def _kill_each_in_turn(run: Run, services: Supervisor, broker: Supervisor) -> None:
    """Kill the next process whenever a few more rollouts have finished, until all are trained."""
    layout, waiting = run.layout, list(KILLED_IN_TURN)
    finished_at_kill = 0
    async with reader_from_start(layout.bootstrap, *_followed()) as reader:
        while run.progress.published < NUM_BATCHES or waiting:
            for message in decoded(await reader.poll()):
                run.progress.feed(message)
                if isinstance(message, PolicyPublished):
                    run.policies.append(message)  # the topic is compacted: seen now or never
            assert services.failure is None, services.failure
            if run.progress.published < 1:
                continue  # let it come up first
            if waiting and run.progress.num_finished >= finished_at_kill + 3:
                name = waiting.pop(0)
                (broker if name == "broker" else services)[name].kill9()
                run.kills.append(name)
                finished_at_kill = run.progress.num_finished


def _followed() -> tuple[str, ...]:
    return (TOPICS.events, TOPICS.tasks, TOPICS.batches, TOPICS.policies)


def read_record(record_file: Path) -> list[tuple[str, str]]:
    pairs = [line.split() for line in record_file.read_text().splitlines()]
    return [(rollout_id, turn_id) for rollout_id, turn_id in pairs]


async def _collect(run: Run, record_file: Path, env: dict[str, str]) -> None:
    run.acknowledged = read_record(record_file)
    run.progress = await read_progress(run.layout.bootstrap)
    async with Reader(run.layout.bootstrap) as reader:
        await reader.assign_from_start(_followed())
        async for record in reader.read_to_end():
            for message in decoded([record]):
                match message:
                    case TurnCompleted():
                        run.turns.append(message)
                    case BatchCut():
                        run.batches.append(message)
                    case Task():
                        run.tasks.append(message)
                    case RolloutFinished() | RolloutAborted():
                        run.terminals.append(message)
    run.replay = await _turnfold(env, "replay")
    run.ledger = await _turnfold(env, "ledger", "--check")


async def _turnfold(env: dict[str, str], *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "turnfold.cli",
        *arguments,
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


def test_every_process_was_killed_and_the_run_still_ended(run: Run) -> None:
    assert run.kills == list(KILLED_IN_TURN)
    assert run.progress.published >= NUM_BATCHES


def test_no_acknowledged_turn_is_lost_or_doubled(run: Run) -> None:
    in_log = Counter((turn.rollout_id, turn.turn_id) for turn in run.turns)
    assert len(run.acknowledged) > 50
    assert [turn for turn in run.acknowledged if in_log[turn] != 1] == []


def test_each_batch_index_is_cut_and_trained_once(run: Run) -> None:
    indices = [batch.index for batch in run.batches]
    assert indices == list(range(1, len(indices) + 1))
    versions = [policy.policy_version for policy in run.policies]
    assert sorted(set(versions)) == list(range(NUM_BATCHES + 1))
    assert versions == sorted(versions)


def test_optimizer_steps_are_those_of_the_configuration(run: Run) -> None:
    trained = {p.policy_version: p.metrics for p in run.policies if p.policy_version > 0}
    steps = TRAINING.num_mini_batches * TRAINING.ppo_epochs
    assert {metrics["optimizer_steps"] for metrics in trained.values()} == {steps}


def test_staleness_stays_within_its_bound(run: Run) -> None:
    for line in run.progress.batches.values():
        assert 0 <= line.max_staleness <= CONFIG.max_staleness


def test_no_group_is_in_two_batches(run: Run) -> None:
    groups = Counter(group.group_id for batch in run.batches for group in batch.groups)
    assert [group for group, count in groups.items() if count > 1] == []


def test_no_task_is_skipped_or_dispatched_twice(run: Run) -> None:
    assert sorted(task.dispatch_index for task in run.tasks) == list(range(len(run.tasks)))
    first_attempts = sorted((t.epoch, t.cursor) for t in run.tasks if t.attempt == 0)
    assert first_attempts == [(0, cursor) for cursor in range(len(first_attempts))]


def test_a_replay_gives_the_same_trajectories_and_manifests(run: Run) -> None:
    code, output = run.replay
    assert code == 0, output


def test_the_ledger_accounts_for_every_sampled_token(run: Run) -> None:
    code, output = run.ledger
    assert code == 0, output


def test_turns_were_healed(run: Run) -> None:
    assert run.progress.continuity["healed"] > 0

"""Agents that are slow, hang, crash and take their worker with them: nothing waits for ever.

Real processes but for two: the engine answers as a function of its prompt, and the trainer reads
manifests, places rows and counts steps without computing a gradient.
"""

import asyncio
import os
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from turnfold.embedded.chaos import trainer
from turnfold.embedded.demo.app import TOPICS, free_ports, running_broker
from turnfold.embedded.demo.pipeline import Layout, Ports, Training, environment
from turnfold.embedded.demo.supervisor import ServiceSpec, Supervisor
from turnfold.embedded.tiny.tokenizer import build_tokenizer
from turnfold.log.client import reader_from_start
from turnfold.replay.accounts.app import account
from turnfold.replay.app import replay
from turnfold.replay.client import KafkaLog
from turnfold.replay.rebuild import Selection
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, Decision, GroupDropped
from turnfold.schemas.events import Event, RolloutAborted, RolloutFinished
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task
from turnfold.schemas.trajectories import Trajectory

pytestmark = [pytest.mark.pipeline, pytest.mark.timeout(420)]

NUM_BATCHES = 5
PATIENCE_S = 300.0
CONFIG = RunConfig(
    run_id="slow",
    group_size=4,
    groups_per_batch=2,
    min_group_size=2,
    max_staleness=4,
    group_timeout_s=14.0,
    rollout_timeout_s=8.0,
    max_row_tokens=1024,
    max_attempts=4,
)
WHAT_TASKS_DO = (
    # The worker is killed while these run; they come back, or are trained with their survivors.
    *("hangs", "crashes", "kills-its-worker", "loses-its-world"),
    *("works", "works", "works"),
    *("loses-its-world", "hangs", "crashes", "works", "works"),
)
"""In the order of dispatch."""


@dataclass
class Left:
    """What a run left in the log."""

    tasks: list[Task] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    ends: dict[str, RolloutFinished | RolloutAborted] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    num_worker_starts: int = 0
    dispatcher_code: int | None = None
    unbalanced: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def cuts(self) -> list[BatchCut]:
        return [decision for decision in self.decisions if isinstance(decision, BatchCut)]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Left:
    """One run to its end."""
    return asyncio.run(_run(tmp_path_factory.mktemp("slow")))


async def _run(run_dir: Path) -> Left:
    layout = _layout(run_dir)
    env = {
        **os.environ,
        **environment(layout),
        "KILLED_FILE": str(run_dir / "killed"),
        "TURNFOLD_IS_SHUFFLED": "false",
    }
    left = Left()
    async with running_broker(layout) as broker:
        services = Supervisor(_specs(layout), run_dir / "logs", env, restart_delay_s=0.1)
        async with services:
            await _until(layout, left, services, broker)
            left.num_worker_starts = services["worker"].num_starts
            left.dispatcher_code = services["dispatcher"].returncode
        log = KafkaLog(layout.bootstrap, TOPICS.namespace)
        accounts = (await account(log, Selection())).by_rollout()
        left.unbalanced = [one.name for one in accounts if not one.is_balanced]
        left.differences = [str(one) for one in (await replay(log)).all_differences]
    return left


def _layout(run_dir: Path) -> Layout:
    model_dir = run_dir / "model"
    build_tokenizer().save_pretrained(model_dir)
    layout = Layout(
        run_dir=run_dir,
        model_dir=model_dir,
        ports=Ports(**dict(zip(("broker", "inference", "gateway"), free_ports(3), strict=True))),
        config=CONFIG,
        training=Training(
            num_batches=NUM_BATCHES, num_mini_batches=2, ppo_epochs=1, learning_rate=0.0
        ),
        control_key="control-key-of-the-test",
        key_secret="secret-of-the-test",
        python=sys.executable,
        agent=f"{Path(__file__).parent / 'slow_agent.py'}:run",
    )
    rows = [
        {"task_id": f"{number}-{does}", "does": does, "door": number}
        for number, does in enumerate(WHAT_TASKS_DO)
    ]
    layout.dataset.write_bytes(b"\n".join(map(msgspec.json.encode, rows)) + b"\n")
    return layout


def _specs(layout: Layout) -> tuple[ServiceSpec, ...]:
    def process(name: str, module: str, *arguments: object) -> ServiceSpec:
        return ServiceSpec(
            name=name, argv=(layout.python, "-m", module, *map(str, arguments)), stop_timeout_s=5.0
        )

    def turnfold(name: str, *arguments: object) -> ServiceSpec:
        return process(name, "turnfold.cli", name, *arguments)

    return (
        process(
            "engine",
            "turnfold.embedded.chaos.engine",
            *("--model", layout.model_dir, "--port", layout.ports.inference),
            *("--version-file", trainer.version_file(layout.run_dir)),
        ),
        turnfold("gateway", "--port", layout.ports.gateway),
        process("trainer", "turnfold.embedded.chaos.trainer"),
        turnfold("healer"),
        turnfold("assembler"),
        turnfold("dispatcher", "--dataset", layout.dataset, "--num-batches", NUM_BATCHES),
        turnfold("worker", "--agent", layout.agent, "--concurrency", layout.num_concurrent),
    )


async def _until(layout: Layout, left: Left, services: Supervisor, broker: Supervisor) -> None:
    """Wait until the dispatcher is done, all batches are trained and every rollout has ended."""
    deadline = time.monotonic() + PATIENCE_S
    kinds = {
        TOPICS.tasks: Task,
        TOPICS.batches: Decision,
        TOPICS.trajectories: Trajectory,
        TOPICS.events: Event,
    }
    async with reader_from_start(layout.bootstrap, *kinds) as reader:
        while not _is_over(layout, left, services):
            assert services.failure is None, services.failure
            assert time.monotonic() < deadline, _waiting(left, services)
            for record in await reader.poll():
                _take(left, codec.decode(kinds[record.topic], record.value or b""))


def _take(left: Left, message: object) -> None:
    match message:
        case Task():
            left.tasks.append(message)
        case Trajectory():
            left.trajectories.append(message)
        case RolloutFinished() | RolloutAborted():
            left.ends.setdefault(message.rollout_id, message)
            left.started.add(message.rollout_id)
        case BatchCut() | GroupDropped():
            left.decisions.append(message)
        case _:
            left.started.add(getattr(message, "rollout_id", ""))
            left.started.discard("")


def _is_over(layout: Layout, left: Left, services: Supervisor) -> bool:
    checkpoint = trainer.read_checkpoint(layout.run_dir)
    return (
        not services["dispatcher"].is_running
        and services["dispatcher"].returncode == 0
        and checkpoint is not None
        and checkpoint.batch >= NUM_BATCHES
        and left.started == left.ends.keys() == {t.rollout_id for t in left.trajectories}
    )


def _waiting(left: Left, services: Supervisor) -> str:
    missing = sorted(left.started - left.ends.keys())
    running = sorted(name for name, one in services.services.items() if one.is_running)
    return f"{len(left.cuts)} batches cut, open {missing}, running {running}"


def test_the_run_finishes(left: Left) -> None:
    assert left.dispatcher_code == 0
    assert [cut.index for cut in left.cuts][:NUM_BATCHES] == list(range(1, NUM_BATCHES + 1))


@pytest.mark.field_case("NeMo RL#2305")
@pytest.mark.field_case("NeMo RL#3238")
def test_every_kind_of_end_came_about_and_is_named(left: Left) -> None:
    reasons = {end.reason for end in left.ends.values() if isinstance(end, RolloutAborted)}
    # `deadline` is the healer's word for rollouts whose worker was killed.
    assert {"agent_timeout", "agent_error", "environment_error", "deadline"} <= reasons


@pytest.mark.field_case("NeMo Gym#2750")
def test_every_rollout_that_was_started_has_one_trajectory_and_the_reason_if_it_failed(
    left: Left,
) -> None:
    counts = Counter(t.rollout_id for t in left.trajectories)
    assert counts == dict.fromkeys(left.started, 1)
    for trajectory in left.trajectories:
        end = left.ends[trajectory.rollout_id]
        if isinstance(end, RolloutAborted):
            assert (trajectory.status, trajectory.reason) == ("aborted", end.reason)
            assert trajectory.reward is None


def test_every_rollout_of_a_decided_group_is_trained_or_left_out_with_a_reason(left: Left) -> None:
    explained: dict[str, set[str]] = defaultdict(set)
    for cut in left.cuts:
        for group in cut.groups:
            explained[group.group_id] |= {ref.rollout_id for ref in group.rollouts}
            explained[group.group_id] |= {one.rollout_id for one in group.left_out if one.reason}
    for decision in left.decisions:
        if isinstance(decision, GroupDropped):
            assert decision.reason
            explained[decision.group_id] |= {one.rollout_id for one in decision.left_out}
    for task in left.tasks:
        if task.group_id in explained:
            slots = {f"{task.group_id}-{index:02d}" for index in range(task.n)}
            assert explained[task.group_id] == slots, task.task_id


def test_groups_with_one_bad_rollout_are_trained_with_their_survivors(left: Left) -> None:
    does = {task.group_id: task.payload["does"] for task in left.tasks}
    groups = [group for cut in left.cuts for group in cut.groups]
    assert len(groups) == len(left.cuts) * CONFIG.groups_per_batch
    bad = [g for g in groups if does[g.group_id] in ("hangs", "crashes", "loses-its-world")]
    assert bad
    for group in bad:
        survivors = {ref.index for ref in group.rollouts}
        assert survivors <= {0, 2, 3}
        assert len(survivors) >= CONFIG.min_group_size


@pytest.mark.field_case("verl#7155")
def test_the_task_that_killed_its_worker_is_trained_or_came_back(left: Left) -> None:
    assert left.num_worker_starts == 2
    tries = [task for task in left.tasks if task.payload["does"] == "kills-its-worker"]
    assert [task.attempt for task in tries] == list(range(len(tries)))
    trained = {group.group_id for cut in left.cuts for group in cut.groups}
    # Three of its rollouts may have been done when the fourth killed the worker.
    assert len(tries) >= 2 or tries[0].group_id in trained


def test_no_task_is_skipped(left: Left) -> None:
    assert sorted(task.dispatch_index for task in left.tasks) == list(range(len(left.tasks)))
    first = sorted((t.epoch, t.cursor) for t in left.tasks if t.attempt == 0)
    assert first == [divmod(number, len(WHAT_TASKS_DO)) for number in range(len(first))]


def test_the_ledger_accounts_for_every_sampled_token_and_a_replay_agrees(left: Left) -> None:
    assert left.unbalanced == []
    assert left.differences == []


def test_staleness_stays_within_its_bound(left: Left) -> None:
    for cut in left.cuts:
        for group in cut.groups:
            for ref in group.rollouts:
                assert 0 <= cut.policy_version - ref.min_policy_version <= CONFIG.max_staleness

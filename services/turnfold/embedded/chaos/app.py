"""Runs a pipeline, disturbs it, lets it come to rest, and says what held.

    python -m turnfold.embedded.chaos.app --seed 7 --faults 200

The same seed gives the same faults in the same order; when exactly each one strikes depends on how
fast the machine is.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from turnfold.embedded.chaos import trainer
from turnfold.embedded.chaos.agent import RECORD_FILE
from turnfold.embedded.chaos.faults import (
    FULL_DISK,
    KILL,
    PAUSE,
    REDELIVER,
    Fault,
    every_kind,
    schedule,
)
from turnfold.embedded.chaos.findings import CHECKS, Left, Report
from turnfold.embedded.demo.app import free_ports, running_broker
from turnfold.embedded.demo.pipeline import Layout, Ports, Training, environment
from turnfold.embedded.demo.supervisor import Service, ServiceSpec, Supervisor
from turnfold.embedded.tiny.tokenizer import build_tokenizer
from turnfold.log.client import Producer, Record, reader_from_start
from turnfold.replay.accounts.app import account
from turnfold.replay.app import replay
from turnfold.replay.client import KafkaLog
from turnfold.replay.rebuild import Selection
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, Decision, GroupDropped
from turnfold.schemas.errors import UserError
from turnfold.schemas.events import Event
from turnfold.schemas.run import RunConfig
from turnfold.schemas.topics import Topics
from turnfold.schemas.trajectories import Trajectory

TOPICS = Topics()
CONFIG = RunConfig(
    run_id="chaos",
    group_size=4,
    groups_per_batch=2,
    min_group_size=2,
    max_staleness=4,
    group_timeout_s=25.0,
    rollout_timeout_s=15.0,
    max_row_tokens=1024,
    max_attempts=50,
)
NUM_TASKS = 4

_UNDISTURBED_S = 120.0
_LONGEST_GAP_S = 5.0
"""The next fault comes after this time although no turn was answered."""
_REST_S = 120.0
_MAX_RESTARTS = 10_000


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how hard."""

    seed: int
    num_faults: int
    num_rollouts: int
    """The run goes on, disturbed, until so many have ended."""
    max_seconds: float
    """No fault begins after this."""
    kinds: Sequence[Fault] = ()
    """What may happen; everything when empty."""


async def run(run_dir: Path, options: Options) -> Report:
    """One disturbed run in an empty directory. Raises UserError when it does not come up or to rest."""
    layout = make_layout(run_dir)
    record_file = run_dir / "acknowledged.txt"
    record_file.touch()
    env = {**os.environ, **environment(layout), RECORD_FILE: str(record_file)}
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(running_broker(layout))
        broker.max_restarts, broker.restart_delay_s = _MAX_RESTARTS, 0.1
        services = await stack.enter_async_context(
            Supervisor(
                specs(layout),
                run_dir / "logs",
                env,
                max_restarts=_MAX_RESTARTS,
                restart_delay_s=0.1,
            )
        )
        chaos = Chaos(layout, {**broker.services, **services.services}, record_file, options)
        num_undisturbed = await chaos.until_every_task_has_ended()
        await chaos.disturb()
        await services.stop("dispatcher")
        await chaos.until_all_is_quiet()
        return await chaos.judged(num_undisturbed)


def make_layout(run_dir: Path) -> Layout:
    """A pipeline with the tokenizer of the tiny model and a few tasks."""
    model_dir = run_dir / "model"
    build_tokenizer().save_pretrained(model_dir)
    ports = dict(zip(("broker", "inference", "gateway"), free_ports(3), strict=True))
    layout = Layout(
        run_dir=run_dir,
        model_dir=model_dir,
        ports=Ports(**ports),
        config=CONFIG,
        training=Training(num_batches=1, num_mini_batches=2, ppo_epochs=1, learning_rate=0.0),
        control_key="chaos-control",
        key_secret="chaos-secret",
        python=sys.executable,
        agent="turnfold.embedded.chaos.agent:run",
    )
    lines = [msgspec.json.encode({"task_id": f"door-{n}", "door": n}) for n in range(NUM_TASKS)]
    layout.dataset.write_bytes(b"\n".join(lines) + b"\n")
    return layout


def specs(layout: Layout) -> tuple[ServiceSpec, ...]:
    """All processes but the broker, in the order to start them."""

    def turnfold(name: str, *arguments: object) -> ServiceSpec:
        words = (name, *map(str, arguments))
        return ServiceSpec(name=name, argv=(layout.python, "-m", "turnfold.cli", *words))

    def stand_in(name: str, *arguments: object) -> ServiceSpec:
        words = (f"turnfold.embedded.chaos.{name}", *map(str, arguments))
        return ServiceSpec(name=name, argv=(layout.python, "-m", *words))

    return (
        stand_in(
            "engine",
            *("--model", layout.model_dir, "--port", layout.ports.inference),
            *("--version-file", trainer.version_file(layout.run_dir)),
        ),
        turnfold("gateway", "--port", layout.ports.gateway),
        stand_in("trainer"),
        turnfold("healer"),
        turnfold("assembler"),
        turnfold("dispatcher", "--dataset", layout.dataset),
        turnfold("worker", "--agent", layout.agent, "--concurrency", layout.num_concurrent),
    )


class Chaos:
    """A pipeline that runs, and what is done to it."""

    def __init__(
        self,
        layout: Layout,
        services: dict[str, Service],
        record_file: Path,
        options: Options,
    ) -> None:
        self.layout, self.services, self.options = layout, services, options
        self.record_file = record_file
        self.report = Report(seed=options.seed)
        self._random = random.Random(options.seed)
        self._began = time.monotonic()

    async def until_every_task_has_ended(self) -> int:
        """Let it run undisturbed until each task has a trajectory; how many there are then."""
        deadline = time.monotonic() + _UNDISTURBED_S
        while True:
            found = await self._trajectories()
            if len({t.task_id for t in found if t.status == "completed"}) == NUM_TASKS:
                return len(found)
            if time.monotonic() > deadline:
                raise self.services["gateway"].failed("has not served every task")
            await asyncio.sleep(0.5)

    async def disturb(self) -> None:
        """Faults, one after the other, until there are enough and enough rollouts have ended."""
        self._began = time.monotonic()
        faults = schedule(self.options.seed, self.options.kinds or every_kind())
        for fault in faults:
            num_answered = self._num_answered()
            if await self._strike(fault):
                self.report.faults[fault.name] += 1
            await self._gap(num_answered + fault.num_turns_after)
            if time.monotonic() - self._began > self.options.max_seconds:
                return
            has_all_faults = self.report.num_faults >= self.options.num_faults
            if has_all_faults and len(await self._trajectories()) >= self.options.num_rollouts:
                return

    async def _strike(self, fault: Fault) -> bool:
        """Do it; False when the service is down from the fault before."""
        if fault.kind == REDELIVER:
            await self._redeliver(fault.num_events)
            return True
        service = self.services[fault.service]
        if not service.is_running:
            return False
        if fault.kind == KILL:
            service.kill9()
        elif fault.kind == PAUSE:
            os.kill(service.pid, signal.SIGSTOP)
            await asyncio.sleep(fault.seconds)
            os.kill(service.pid, signal.SIGCONT)
        else:
            assert fault.kind == FULL_DISK, fault
            # Every write to a file fails with EFBIG, as it does with ENOSPC on a full disk.
            resource.prlimit(service.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            await asyncio.sleep(fault.seconds)
            no_limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(service.pid, resource.RLIMIT_FSIZE, no_limit)
        return True

    async def _redeliver(self, number: int) -> None:
        """Append some events to the log again, old ones and ends among them."""
        records = await self._records(TOPICS.events)
        chosen = [self._random.choice(records) for _ in range(min(number, len(records)))]
        async with Producer(self.layout.bootstrap) as producer:
            for record in chosen:
                await producer.send_raw(
                    record.topic,
                    key=record.key,
                    value=record.value,
                    partition=record.partition,
                    headers={name: value.decode() for name, value in record.headers},
                )
                self.report.num_redelivered += 1

    async def _gap(self, num_answered: int) -> None:
        deadline = time.monotonic() + _LONGEST_GAP_S
        while True:
            if self._num_answered() >= num_answered or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.05)

    def _num_answered(self) -> int:
        with self.record_file.open("rb") as file:
            return sum(1 for _ in file)

    async def until_all_is_quiet(self) -> None:
        """Every rollout has ended, and what was cut is trained."""
        deadline = time.monotonic() + _REST_S
        while not await self._is_quiet():
            if time.monotonic() > deadline:
                raise UserError(
                    f"the run has not come to rest; see the logs in {self.layout.run_dir / 'logs'}"
                )
            await asyncio.sleep(0.5)

    async def _is_quiet(self) -> bool:
        log = KafkaLog(self.layout.bootstrap, TOPICS.namespace)
        accounts = await account(log, Selection())
        if any(one.status == "in_flight" for one in accounts.by_rollout()):
            return False
        healed = {t.rollout_id for t in await self._trajectories()}
        if healed != {one.name for one in accounts.by_rollout() if one.status != "never_started"}:
            return False
        cuts = [d for d in await self._decisions() if isinstance(d, BatchCut)]
        checkpoint = trainer.read_checkpoint(self.layout.run_dir)
        return checkpoint is not None and checkpoint.batch == max(
            (c.index for c in cuts), default=0
        )

    async def judged(self, num_undisturbed: int) -> Report:
        """The report on what is in the log now."""
        report, log = self.report, KafkaLog(self.layout.bootstrap, TOPICS.namespace)
        report.seconds = time.monotonic() - self._began
        left = await self._left(num_undisturbed)
        report.problems = {claim: check(left) for claim, check in CHECKS.items()}
        accounts = (await account(log, Selection())).by_rollout()
        report.problems["the ledger accounts for every sampled token"] = [
            f"rollout {one.name}" for one in accounts if not one.is_balanced
        ]
        again = await replay(log)
        report.problems["a replay gives the same trajectories and decisions"] = [
            str(difference) for difference in again.all_differences
        ]
        report.replay = (
            f"{again.num_trajectories} trajectories and {again.num_decisions} decisions from "
            f"{again.num_events:,} events, digest {again.digest[:12]}"
        )
        report.num_rollouts = len(left.trajectories)
        report.num_ended = Counter(t.status for t in left.trajectories)
        report.num_acknowledged = len(left.acknowledged)
        report.num_batches = sum(isinstance(d, BatchCut) for d in left.decisions)
        report.num_dropped = Counter(
            d.reason for d in left.decisions if isinstance(d, GroupDropped)
        )
        return report

    async def _left(self, num_undisturbed: int) -> Left:
        checkpoint = trainer.read_checkpoint(self.layout.run_dir) or trainer.Checkpoint()
        pairs = [line.split() for line in self.record_file.read_text().splitlines()]
        return Left(
            acknowledged=tuple((rollout_id, turn_id) for rollout_id, turn_id in pairs),
            events=tuple(
                codec.decode(Event, r.value or b"") for r in await self._records(TOPICS.events)
            ),
            trajectories=tuple(await self._trajectories()),
            decisions=tuple(await self._decisions()),
            num_undisturbed=num_undisturbed,
            max_staleness=CONFIG.max_staleness,
            num_batches_trained=checkpoint.batch,
            num_steps=checkpoint.num_steps,
            num_steps_a_batch=trainer.schedule_of(CONFIG).num_steps,
        )

    async def _trajectories(self) -> list[Trajectory]:
        """In the order in which they were written, as far as partitions let one say."""
        records = await self._records(TOPICS.trajectories)
        records.sort(key=lambda record: record.timestamp)
        return [codec.decode(Trajectory, record.value or b"") for record in records]

    async def _decisions(self) -> list[Decision]:
        return [codec.decode(Decision, r.value or b"") for r in await self._records(TOPICS.batches)]

    async def _records(self, topic: str) -> list[Record]:
        """All records of a topic; waits for a broker that is down."""
        while True:
            try:
                async with reader_from_start(self.layout.bootstrap, topic) as reader:
                    return [record async for record in reader.read_to_end()]
            except (TimeoutError, UserError, OSError):
                await asyncio.sleep(0.2)


def main(
    run_dir: Annotated[Path, typer.Argument(help="An empty directory for log and output.")],
    seed: Annotated[int, typer.Option(help="Decides which faults come in which order.")] = 0,
    faults: Annotated[int, typer.Option(help="How many.")] = 200,
    rollouts: Annotated[int, typer.Option(help="Rollouts that must have ended at least.")] = 200,
    max_seconds: Annotated[float, typer.Option(help="No fault begins after this.")] = 420.0,
) -> None:
    """Disturb a pipeline and report; exit 1 when something does not hold."""
    options = Options(seed=seed, num_faults=faults, num_rollouts=rollouts, max_seconds=max_seconds)
    report = asyncio.run(run(run_dir, options))
    for line in report.lines():
        typer.echo(line)
    if any(report.problems.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

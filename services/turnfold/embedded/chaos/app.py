"""Runs a pipeline, disturbs it, lets it come to rest, and says what held.

    python -m turnfold.embedded.chaos.app DIRECTORY --seed 7 --faults 200

The same seed gives the same faults in the same order; when exactly each one strikes depends on how
fast the machine is.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from aiokafka.errors import KafkaError

from turnfold.embedded.chaos import evidence
from turnfold.embedded.chaos.clock import Clocks
from turnfold.embedded.chaos.faults import (
    BROKER,
    CLOCKED,
    Fault,
    schedule,
    usual_faults,
    without_broker,
)
from turnfold.embedded.chaos.findings import CHECKS, Left, lost_groups, num_resampled
from turnfold.embedded.chaos.network import links
from turnfold.embedded.chaos.report import Report
from turnfold.embedded.chaos.site import (
    NUM_TASKS,
    Site,
    broker_spec,
    environment,
    make_links,
    service_specs,
)
from turnfold.embedded.chaos.strikes import Strikes
from turnfold.embedded.demo.app import free_ports
from turnfold.embedded.demo.supervisor import ServiceSpec, Supervisor
from turnfold.embedded.tiny.tokenizer import build_tokenizer
from turnfold.log.client import BrokerUnavailable, create_topics, delete_topics
from turnfold.log.settings import KAFKA_ACCESS, KafkaSettings
from turnfold.replay.accounts.app import account
from turnfold.replay.app import replay
from turnfold.replay.client import KafkaLog
from turnfold.replay.rebuild import Selection
from turnfold.schemas.batches import BatchCut, GroupDropped
from turnfold.schemas.errors import UserError
from turnfold.schemas.run import RunConfig
from turnfold.schemas.settings import load, variable
from turnfold.schemas.trajectories import Trajectory

_UNDISTURBED_S = 240.0
_BROKER_START_S = 60.0
_REST_S = 240.0
_LOOK_EVERY_S = 2.0
_MAX_RESTARTS = 100_000
_GROUP_SIZE = 4


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How long and how hard."""

    seed: int
    num_faults: int
    num_rollouts: int = 0
    """The run goes on, disturbed, until so many have ended."""
    max_seconds: float
    """No fault begins after this."""
    faults: Sequence[Fault] = ()
    """What may happen; everything when empty."""
    num_at_once: int = 4
    """Faults that may last at the same time."""
    longest_gap_s: float = 1.5
    """The next fault comes after this time although no turn was answered."""
    rollout_timeout_s: float = 25.0
    bootstrap: str = ""
    """A broker to use, which is left alone; one of our own when empty."""
    is_verbose: bool = False
    """Say now and then how far it is."""


async def run(run_dir: Path, options: Options) -> Report:
    """One disturbed run in an empty directory. Raises UserError when it does not come up or to rest."""
    site = make_site(run_dir, options)
    clocks = Clocks(run_dir / "clocks", CLOCKED)
    async with AsyncExitStack() as stack:
        brokers = await stack.enter_async_context(_with_topics(site, clocks, options))
        between = await stack.enter_async_context(links(*make_links(site)))
        services = await stack.enter_async_context(
            _supervisor(service_specs(site, between, clocks.paths), site)
        )
        strikes = Strikes(
            site=site,
            services={**brokers.services, **services.services},
            links=between,
            clocks=clocks,
        )
        chaos = Chaos(strikes, options)
        await chaos.until_every_task_has_ended()
        await chaos.disturb()
        await services.stop("dispatcher")
        await chaos.until_all_is_quiet()
        report = await chaos.judged()
    (run_dir / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    return report


def make_site(run_dir: Path, options: Options) -> Site:
    """A pipeline with the tokenizer of the tiny model and a few tasks."""
    broker_port, engine_port, gateway_port = free_ports(3)
    host, _, port = options.bootstrap.rpartition(":")
    site = Site(
        run_dir=run_dir,
        broker=(host, int(port)) if options.bootstrap else ("127.0.0.1", broker_port),
        engine_port=engine_port,
        gateway_port=gateway_port,
        # Somebody else's broker may hold topics of ours already.
        namespace=f"chaos-{secrets.token_hex(4)}" if options.bootstrap else "turnfold",
        config=RunConfig(
            run_id="chaos",
            group_size=_GROUP_SIZE,
            groups_per_batch=2,
            min_group_size=2,
            max_staleness=4,
            group_timeout_s=options.rollout_timeout_s * 5 / 3,
            rollout_timeout_s=options.rollout_timeout_s,
            max_row_tokens=1024,
            max_attempts=50,
        ),
        python=sys.executable,
        environment=_environment(options),
    )
    build_tokenizer().save_pretrained(site.model_dir)
    lines = [msgspec.json.encode({"task_id": f"door-{n}", "door": n}) for n in range(NUM_TASKS)]
    site.dataset.write_bytes(b"\n".join(lines) + b"\n")
    site.record_file.touch()
    return site


def _environment(options: Options) -> dict[str, str]:
    """Ours. It may say how somebody else's broker is entered; one of our own lets in everybody."""
    if not options.bootstrap:
        return {**os.environ, **{variable(name): "" for name in KAFKA_ACCESS}}
    protocol = load(KafkaSettings, os.environ).kafka_security_protocol
    if protocol.endswith("SSL"):
        raise UserError(
            "the connections to the broker are disturbed by what is said on them: expected "
            f"{variable('kafka_security_protocol')} to be without TLS, got {protocol}"
        )
    return dict(os.environ)


@asynccontextmanager
async def _with_topics(site: Site, clocks: Clocks, options: Options) -> AsyncIterator[Supervisor]:
    """The broker with all topics in place; those on somebody else's are gone afterwards."""
    specs = [] if options.bootstrap else [broker_spec(site, clocks.paths[BROKER])]
    async with _supervisor(specs, site) as brokers:
        await _create_topics(site)
        try:
            yield brokers
        finally:
            if options.bootstrap:
                await delete_topics(site.kafka, [spec.name for spec in site.topics.specs()])


async def _create_topics(site: Site) -> None:
    give_up_at = time.monotonic() + _BROKER_START_S
    while True:
        try:
            await create_topics(site.kafka, site.topics.specs())
            return
        except BrokerUnavailable:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(0.1)


def _supervisor(specs: Sequence[ServiceSpec], site: Site) -> Supervisor:
    return Supervisor(
        specs,
        site.run_dir / "logs",
        environment(site),
        max_restarts=_MAX_RESTARTS,
        restart_delay_s=0.1,
    )


class Chaos:
    """A pipeline that runs, and what is done to it."""

    def __init__(self, strikes: Strikes, options: Options) -> None:
        self.site, self.strikes, self.options = strikes.site, strikes, options
        self.report = Report(seed=options.seed, broker=options.bootstrap or "embedded")
        self._undisturbed: frozenset[str] = frozenset()
        self._began = time.monotonic()
        self._num_ended, self._next_look = 0, 0.0

    async def until_every_task_has_ended(self) -> None:
        """Let it run undisturbed until each rollout of each task is there to be compared with."""
        deadline = time.monotonic() + _UNDISTURBED_S
        while True:
            found = [t for t in await evidence.trajectories_of(self.site) if _is_completed(t)]
            if len({(t.task_id, t.index) for t in found}) == NUM_TASKS * _GROUP_SIZE:
                self._undisturbed = frozenset(t.rollout_id for t in found)
                return
            if time.monotonic() > deadline:
                raise self.strikes.services["gateway"].failed("has not served every task")
            await asyncio.sleep(0.2)

    async def disturb(self) -> None:
        """Faults, one soon after the other, until there are enough and enough rollouts have ended."""
        self._began = time.monotonic()
        possible = list(self.options.faults or usual_faults())
        if self.options.bootstrap:
            possible = without_broker(possible)
        places = asyncio.Semaphore(self.options.num_at_once)
        async with asyncio.TaskGroup() as striking:
            for fault in schedule(self.options.seed, possible):
                await places.acquire()
                if await self._is_enough():
                    return
                num_acknowledged = evidence.num_acknowledged(self.site)
                striking.create_task(self._strike(fault, places))
                await self._gap(num_acknowledged + fault.num_turns_after)

    async def _strike(self, fault: Fault, places: asyncio.Semaphore) -> None:
        try:
            if not await self.strikes.strike(fault):
                return
        finally:
            places.release()
        self.report.faults[fault.name] += 1
        if self.options.is_verbose and self.report.num_faults % 50 == 0:
            took = time.monotonic() - self._began
            typer.echo(f"{self.report.num_faults} faults in {took:.0f} s", err=True)

    async def _gap(self, num_acknowledged: int) -> None:
        deadline = time.monotonic() + self.options.longest_gap_s
        while time.monotonic() < deadline:
            if evidence.num_acknowledged(self.site) >= num_acknowledged:
                return
            await asyncio.sleep(0.05)

    async def _is_enough(self) -> bool:
        if time.monotonic() - self._began > self.options.max_seconds:
            return True
        if self.report.num_faults < self.options.num_faults:
            return False
        if time.monotonic() > self._next_look:
            self._num_ended = len(await evidence.trajectories_of(self.site))
            self._next_look = time.monotonic() + _LOOK_EVERY_S
        return self._num_ended >= self.options.num_rollouts

    async def until_all_is_quiet(self) -> None:
        """Every rollout has ended, and what was cut is trained."""
        deadline = time.monotonic() + _REST_S
        while (unrest := await self._unrest_if_known()) is not None:
            if time.monotonic() > deadline:
                raise UserError(
                    f"the run has not come to rest, {unrest}; see {self.site.run_dir / 'logs'}"
                )
            await asyncio.sleep(0.5)

    async def _unrest_if_known(self) -> str | None:
        try:
            return await self._unrest()
        except (BrokerUnavailable, KafkaError, OSError):
            return "the broker has not come back"  # it may have been the last to be killed

    async def _unrest(self) -> str | None:
        """What is still to come; None when nothing is."""
        accounts = (await account(self._log(), Selection())).by_rollout()
        if running := [one.name for one in accounts if one.status == "in_flight"]:
            return f"{len(running)} rollouts have not ended, such as {running[0]}"
        left = await self._left()
        healed = {trajectory.rollout_id for trajectory in left.trajectories}
        ended = {one.name for one in accounts if one.status != "never_started"}
        if healed != ended:
            return f"the rollouts {sorted(healed ^ ended)} are not healed"
        if open_groups := lost_groups(left):
            return open_groups[0]
        cuts = [decision.index for decision in left.decisions if isinstance(decision, BatchCut)]
        if left.num_batches_trained < max(cuts, default=0):
            return f"batch {left.num_batches_trained} is trained, batch {max(cuts)} is cut"
        return None

    async def _left(self) -> Left:
        return await evidence.left_by(self.site, self._undisturbed)

    def _log(self) -> KafkaLog:
        return KafkaLog(self.site.kafka, self.site.namespace)

    async def judged(self) -> Report:
        """The report on what is in the log now."""
        report = self.report
        left = await self._left()
        report.problems = {claim: check(left) for claim, check in CHECKS.items()}
        await self._judge_ledger()
        await self._judge_replay()
        report.seconds = time.monotonic() - self._began
        report.num_rollouts = len(left.trajectories)
        report.num_ended = Counter(_ending(t) for t in left.trajectories)
        report.num_turns = len(left.acknowledged_turns)
        report.num_rewards = len(left.acknowledged_rewards)
        report.num_redelivered = self.strikes.num_redelivered
        report.num_resampled = num_resampled(left)
        report.num_dead_letters = len(left.dead_letters)
        report.num_batches = sum(isinstance(d, BatchCut) for d in left.decisions)
        report.num_steps = left.num_steps
        report.num_dropped = Counter(
            d.reason for d in left.decisions if isinstance(d, GroupDropped)
        )
        report.num_starts = Counter(
            {name: service.num_starts for name, service in self.strikes.services.items()}
        )
        return report

    async def _judge_ledger(self) -> None:
        accounts = (await account(self._log(), Selection())).by_rollout()
        self.report.problems["the ledger accounts for every sampled token"] = [
            f"rollout {one.name}" for one in accounts if not one.is_balanced
        ]

    async def _judge_replay(self) -> None:
        again = await replay(self._log())
        # A replay rightly says so when a trajectory is in the log twice; here we did it.
        doubled = {f"rollout {name}" for name in await evidence.redelivered_rollouts(self.site)}
        self.report.problems[
            "a replay gives the same trajectories and decisions, byte for byte"
        ] = [
            str(difference)
            for difference in again.all_differences
            if not (difference.subject in doubled and "more than once" in difference.what)
        ]
        self.report.replay = (
            f"{again.num_trajectories:,} trajectories and {again.num_decisions:,} decisions from "
            f"{again.num_events:,} events, digest {again.digest[:12]}"
        )


def _is_completed(trajectory: Trajectory) -> bool:
    return trajectory.status == "completed"


def _ending(trajectory: Trajectory) -> str:
    return f"aborted: {trajectory.reason}" if trajectory.reason else trajectory.status


async def _until_signal(running: Coroutine[Any, Any, Report]) -> Report:
    """Stop all processes when we are asked to end, instead of leaving them behind."""
    task = asyncio.create_task(running)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def main(
    run_dir: Annotated[Path, typer.Argument(help="An empty directory for log and output.")],
    seed: Annotated[int, typer.Option(help="Decides which faults come in which order.")] = 1,
    faults: Annotated[int, typer.Option(help="How many.")] = 1000,
    rollouts: Annotated[int, typer.Option(help="Rollouts that must have ended at least.")] = 200,
    max_seconds: Annotated[float, typer.Option(help="No fault begins after this.")] = 3600.0,
    bootstrap: Annotated[str, typer.Option(help="A broker to use instead of an own one.")] = "",
) -> None:
    """Disturb a pipeline and report; exit 1 when something does not hold."""
    options = Options(
        seed=seed,
        num_faults=faults,
        num_rollouts=rollouts,
        max_seconds=max_seconds,
        bootstrap=bootstrap,
        is_verbose=True,
    )
    report = asyncio.run(_until_signal(run(run_dir, options)))
    for line in report.lines():
        typer.echo(line)
    if report.failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

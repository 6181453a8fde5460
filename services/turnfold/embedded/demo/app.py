"""Runs the demo: starts every service, follows the log, reports, and proves the replay."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.live import Live

from turnfold.agents.worker.client import agent_of
from turnfold.agents.worker.settings import Settings as WorkerSettings
from turnfold.dispatcher.client import open_dataset
from turnfold.embedded.demo import display
from turnfold.embedded.demo.pipeline import (
    Layout,
    Ports,
    Training,
    broker_spec,
    environment,
    service_specs,
)
from turnfold.embedded.demo.progress import Message, Progress
from turnfold.embedded.demo.supervisor import ServiceFailed, Supervisor
from turnfold.embedded.tiny.task import tasks
from turnfold.log.client import Reader, Record, create_topics, reader_from_start
from turnfold.schemas import codec
from turnfold.schemas.batches import Decision
from turnfold.schemas.errors import UserError
from turnfold.schemas.events import Event
from turnfold.schemas.policies import PolicyEvent
from turnfold.schemas.run import RunConfig
from turnfold.schemas.settings import load
from turnfold.schemas.tasks import Task
from turnfold.schemas.topics import Topics

TOPICS = Topics()
_KIND: dict[str, Any] = {
    TOPICS.events: Event,
    TOPICS.tasks: Task,
    TOPICS.batches: Decision,
    TOPICS.policies: PolicyEvent,
}


DOOR_AGENT = "turnfold.embedded.tiny.agent:run"


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """An agent and tasks of the user's, in place of the demo's."""

    agent: str = ""
    command: str = ""
    dataset: Path

    def check(self) -> None:
        """Raises UserError, now rather than in a log file of the worker or the dispatcher."""
        settings = load(
            WorkerSettings,
            {},
            agent=self.agent or None,
            command=self.command or None,
            control_key="-",
        )
        agent_of(settings)
        open_dataset(str(self.dataset), "train")


class Keys(msgspec.Struct, frozen=True):
    """Secrets of a run, kept beside its log so that a resumed run accepts the same session keys."""

    control_key: str
    key_secret: str


def run_demo(
    run_dir: Path,
    model_dir: Path,
    config: RunConfig,
    training: Training,
    *,
    seed: int,
    own: Own | None = None,
) -> bool:
    """Run until `training.num_batches` are trained; True when every claim of the report holds."""
    if own is not None:
        own.check()
    console = Console()
    run_dir.mkdir(parents=True, exist_ok=True)
    _make_model(console, model_dir, seed)
    layout = Layout(
        run_dir=run_dir,
        model_dir=model_dir,
        ports=Ports(**dict(zip(("broker", "inference", "gateway"), free_ports(3), strict=True))),
        config=config,
        training=training,
        control_key=(keys := load_keys(run_dir)).control_key,
        key_secret=keys.key_secret,
        python=sys.executable,
        agent=DOOR_AGENT if own is None else own.agent,
        command="" if own is None else own.command,
        own_dataset=None if own is None else own.dataset.absolute(),
    )
    if own is None:
        write_dataset(layout.dataset, seed)
    return asyncio.run(_run(console, layout))


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on; all are held until all are known, so they differ."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def load_keys(run_dir: Path) -> Keys:
    """The run's keys; made on first use, readable by their owner only."""
    path = run_dir / "keys.json"
    if not path.exists():
        keys = Keys(secrets.token_urlsafe(24), secrets.token_urlsafe(32))
        with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
            file.write(msgspec.json.encode(keys))
    return msgspec.json.decode(path.read_bytes(), type=Keys)


def write_dataset(path: Path, seed: int) -> None:
    """The toy tasks as JSON lines; the dispatcher goes through them again and again."""
    lines = [msgspec.json.encode(payload) for payload in tasks(512, seed)]
    path.write_bytes(b"\n".join(lines) + b"\n")


def _make_model(console: Console, model_dir: Path, seed: int) -> None:
    from turnfold.embedded.tiny.cli import tiny_model

    console.print(f"[dim]model[/dim]     {model_dir}")
    tiny_model(out=model_dir, seed=seed)


async def _run(console: Console, layout: Layout) -> bool:
    log_dir, progress = layout.run_dir / "logs", Progress()
    console.print(f"[dim]run[/dim]       {layout.run_dir}  (one log file a service in {log_dir})")
    async with running_broker(layout) as broker:
        async with Supervisor(service_specs(layout), log_dir, environment(layout)) as services:
            await _until_done(console, layout, progress, services, broker)
        return await _report(console, layout, progress)


@asynccontextmanager
async def running_broker(layout: Layout) -> AsyncIterator[Supervisor]:
    """The broker with all topics in place."""
    log_dir = layout.run_dir / "logs"
    async with Supervisor([broker_spec(layout)], log_dir, environment(layout)) as broker:
        await _topics_ready(layout, broker)
        yield broker


async def _topics_ready(layout: Layout, broker: Supervisor) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", layout.ports.broker)
            writer.close()
            await create_topics(layout.bootstrap, TOPICS.specs())
            return
        if not broker["broker"].is_running:
            raise broker["broker"].failed("did not start")
        await asyncio.sleep(0.1)
    raise broker["broker"].failed("did not answer within 30 s")


async def _until_done(
    console: Console,
    layout: Layout,
    progress: Progress,
    services: Supervisor,
    broker: Supervisor,
) -> None:
    following = asyncio.create_task(_follow(layout, progress))
    failing = asyncio.create_task(services.wait_failed())
    broker_failing = asyncio.create_task(broker.wait_failed())
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    stopping = asyncio.create_task(stopped.wait())
    waits = (following, failing, broker_failing, stopping)
    try:
        with Live(console=console, refresh_per_second=4, transient=False) as live:
            while not any(task.done() for task in waits):
                live.update(_frame(layout, progress, services))
                await asyncio.sleep(0.25)
            live.update(_frame(layout, progress, services))
        if following.done():
            following.result()
        if failure := services.failure or broker.failure:
            raise failure
        if stopped.is_set():
            console.print("stopping; go on later with [bold]turnfold demo --resume[/bold]")
            raise Interrupted
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


class Interrupted(UserError):
    """Ctrl-C: the log is whole, the run can be resumed."""

    def __init__(self) -> None:
        super().__init__("interrupted")


def _frame(layout: Layout, progress: Progress, services: Supervisor) -> RenderableType:
    states = {name: _state(services, name, progress) for name in services.services}
    return display.live(progress, states, layout.training.num_batches)


def _state(services: Supervisor, name: str, progress: Progress) -> str:
    service = services[name]
    if not service.is_running:
        return "done" if service.returncode == 0 else "down"
    if name == "trainer" and progress.published < 0:
        return "starting"
    return "up"


async def _follow(layout: Layout, progress: Progress) -> None:
    """Feed the log to `progress` until the last batch is published."""
    async with reader_from_start(layout.bootstrap, *_KIND) as reader:
        while progress.published < layout.training.num_batches:
            for message in decoded(await reader.poll()):
                progress.feed(message)


def decoded(records: list[Record]) -> Iterator[Message]:
    """Messages of these records; what cannot be read is the healer's to report."""
    for record in records:
        if record.value is None:
            continue
        with contextlib.suppress(codec.CodecError):
            yield codec.decode(_KIND[record.topic], record.value, record.content_type)


async def read_progress(bootstrap: str) -> Progress:
    """Progress over everything that is in the log now."""
    progress = Progress()
    async with Reader(bootstrap) as reader:
        await reader.assign_from_start(_KIND)
        async for record in reader.read_to_end():
            for message in decoded([record]):
                progress.feed(message)
    return progress


async def _report(console: Console, layout: Layout, progress: Progress) -> bool:
    rewards = progress.rewards
    picture = layout.run_dir / "reward.png"
    draw_rewards(rewards, picture)
    console.print(f"\nreward    {display.sparkline(rewards)}  {picture}")
    is_accounted = await _command(console, layout, "ledger", "--check")
    is_identical = await _command(console, layout, "replay")
    # The policies topic is compacted: of a resumed run only the later batches were measured.
    steps = [line.metrics["optimizer_steps"] for line in progress.trained if line.is_trained]
    num_planned = layout.training.num_steps_a_batch * len(steps)
    # What an agent of the user's comes to is not for us to say.
    is_own = layout.own_dataset is not None
    claims = {
        f"mean reward {rewards[0]:.2f} → {best_mean(rewards):.2f}": (
            is_own or best_mean(rewards) > 0.75
        ),
        f"turns healed: {progress.continuity['healed']}": (
            is_own or progress.continuity["healed"] > 0
        ),
        f"optimizer steps {sum(steps):.0f} = mini-batches × epochs × batches = {num_planned}": (
            sum(steps) == num_planned
        ),
        "every sampled token is accounted for": is_accounted,
        "a replay of the log gives the same trajectories and manifests": is_identical,
    }
    console.print()
    for claim, holds in claims.items():
        console.print(f"  [green]✓[/green] {claim}" if holds else f"  [red]✗[/red] {claim}")
    return all(claims.values())


def best_mean(rewards: list[float], window: int = 3) -> float:
    """Mean reward of the last batches, which one lucky batch does not move much."""
    tail = rewards[-window:]
    return sum(tail) / len(tail)


def draw_rewards(rewards: list[float], path: Path) -> None:
    """The reward curve as a PNG; without matplotlib only the terminal shows it."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o")
    axes.set(xlabel="batch", ylabel="mean reward", ylim=(0, 1), title="turnfold demo")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


async def _command(console: Console, layout: Layout, *arguments: str) -> bool:
    """Run a turnfold command on this log as a person would; True when it exits 0."""
    console.print(f"\n[dim]$ turnfold {' '.join(arguments)}[/dim]")
    process = await asyncio.create_subprocess_exec(
        layout.python,
        "-m",
        "turnfold.cli",
        *arguments,
        env={**os.environ, **environment(layout)},
    )
    return await process.wait() == 0


__all__ = ["Interrupted", "ServiceFailed", "read_progress", "run_demo"]

"""Starts what an agent needs, runs it on a few tasks, and reports."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Coroutine
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import msgspec
import typer

from turnfold.agents.blocking.app import warning_when_blocked
from turnfold.agents.client import GatewayClient
from turnfold.agents.worker.app import Worker
from turnfold.agents.worker.client import agent_of
from turnfold.agents.worker.settings import Settings as WorkerSettings
from turnfold.dispatcher.client import open_dataset
from turnfold.embedded.demo.app import TOPICS, free_ports, load_keys, running_broker
from turnfold.embedded.demo.pipeline import Layout, Ports, Training, environment, service_specs
from turnfold.embedded.demo.supervisor import Supervisor
from turnfold.embedded.tiny.cli import tiny_model
from turnfold.embedded.tiny.task import tasks as door_tasks
from turnfold.embedded.tryout.report import Told, rollout_lines, summary, told
from turnfold.log.client import reader_from_start
from turnfold.log.service import configure_logging
from turnfold.schemas import codec
from turnfold.schemas.errors import UserError
from turnfold.schemas.events import Event, Sampling
from turnfold.schemas.run import RunConfig
from turnfold.schemas.settings import load, variable
from turnfold.schemas.tasks import Task

_MODEL = Path("runs/model-0")
"""The demo's, so that it is built once."""
_MAX_TOKENS = 512
_LONGEST_GRACE_S = 3.0


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `turnfold try` is told."""

    agent: str
    command: str
    tasks: Path | None
    num_tasks: int
    n: int
    timeout_s: float
    model: Path | None
    engine: str


def run(options: Options) -> bool:
    """True when every rollout has a reward. Raises UserError."""
    if options.engine and options.model is None:
        raise UserError("--engine needs --model DIR: the gateway reads its tokenizer and template")
    settings = load(
        WorkerSettings,
        {},
        agent=options.agent or None,
        command=options.command or None,
        control_key="-",
        agent_grace_s=_LONGEST_GRACE_S,
    )
    agent = agent_of(settings)  # a mistake in it is said before anything is started
    rows = _rows(options)
    model = options.model or _MODEL
    if options.model is None:
        tiny_model(out=model)
    configure_logging("WARNING")
    with TemporaryDirectory(prefix="turnfold-try-") as directory:
        layout = _layout(Path(directory), model, options)
        try:
            return asyncio.run(_stoppable(_run(layout, options, agent, rows)))
        except asyncio.CancelledError:
            sys.exit("turnfold try: stopped")


def _rows(options: Options) -> list[dict[str, Any]]:
    if options.tasks is None:
        return [dict(row) for row in door_tasks(options.num_tasks)]
    dataset = open_dataset(str(options.tasks), "train")
    return [dataset[index] for index in range(min(options.num_tasks, len(dataset)))]


def _layout(run_dir: Path, model: Path, options: Options) -> Layout:
    keys = load_keys(run_dir)
    return Layout(
        run_dir=run_dir,
        model_dir=model.absolute(),
        ports=Ports(**dict(zip(("broker", "inference", "gateway"), free_ports(3), strict=True))),
        config=RunConfig(run_id="try", group_size=options.n, min_group_size=1),
        training=Training(num_batches=1, num_mini_batches=1, ppo_epochs=1, learning_rate=0.0),
        control_key=keys.control_key,
        key_secret=keys.key_secret,
        python=sys.executable,
        agent=options.agent,
    )


async def _stoppable(work: Coroutine[Any, Any, bool]) -> bool:
    """The work, which ends what it has started on SIGTERM too."""
    playing = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, playing.cancel)
    return await playing


async def _run(layout: Layout, options: Options, agent: Any, rows: list[dict[str, Any]]) -> bool:
    needed = ("gateway",) if options.engine else ("inference", "gateway")
    env = {**os.environ, **environment(layout)}
    if options.engine:
        env[variable("engines")] = msgspec.json.encode([options.engine]).decode()
    specs = [spec for spec in service_specs(layout) if spec.name in needed]
    typer.echo("starting a log, a gateway" + ("" if options.engine else " and an engine") + " …")
    async with running_broker(layout), Supervisor(specs, layout.run_dir / "logs", env) as services:
        await services.wait_until_ready()
        typer.echo(f"running {_count(len(rows), 'task')}, {_count(options.n, 'rollout')} each …")
        began = time.monotonic()
        await _play(layout, options, agent, rows)
        seconds = time.monotonic() - began
        groups = await _groups(layout)
    return _show(rows, groups, seconds)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


async def _play(layout: Layout, options: Options, agent: Any, rows: list[dict[str, Any]]) -> None:
    async with GatewayClient(layout.gateway_url, layout.control_key) as gateway:
        worker = Worker(agent, gateway, layout.num_concurrent, agent_grace_s=_LONGEST_GRACE_S)
        for index, row in enumerate(rows):
            worker.begin(_task(index, row, options))
        async with warning_when_blocked():
            await worker.wait_until_idle()


def _task(index: int, row: dict[str, Any], options: Options) -> Task:
    return Task(
        run_id="try",
        group_id=f"try-{index:06d}",
        task_id=str(row.get("task_id", f"row {index}")),
        dispatch_index=index,
        n=options.n,
        payload=row,
        dispatched_at=time.time(),
        rollout_timeout_s=options.timeout_s,
        sampling=Sampling(max_tokens=_MAX_TOKENS),
    )


async def _groups(layout: Layout) -> dict[str, list[Told]]:
    events: defaultdict[str, list[Event]] = defaultdict(list)
    async with reader_from_start(layout.bootstrap, TOPICS.events) as reader:
        async for record in reader.read_to_end():
            event = codec.decode(cast(type[Event], Event), record.value or b"")
            events[event.rollout_id].append(event)
    groups: defaultdict[str, list[Told]] = defaultdict(list)
    for rollout_id in sorted(events):
        groups[rollout_id.rpartition("-")[0]].append(told(events[rollout_id]))
    return dict(groups)


def _show(rows: list[dict[str, Any]], groups: dict[str, list[Told]], seconds: float) -> bool:
    for row, group in zip(rows, groups.values(), strict=True):
        text = msgspec.json.encode(row).decode()
        typer.echo(f"\ntask {text if len(text) <= 120 else text[:120] + '…'}")
        for one in group:
            typer.echo("\n".join(rollout_lines(one)))
    typer.echo("")
    first, *hints = summary(groups)
    typer.echo("\n".join([f"{first}; {seconds:.1f} s", *hints]))
    return all(one.has_reward for group in groups.values() for one in group)

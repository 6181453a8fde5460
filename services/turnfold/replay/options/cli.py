"""Options of the commands on the log, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from turnfold.log.settings import ServiceSettings
    from turnfold.replay.client import LogSource
    from turnfold.replay.rebuild import Selection
    from turnfold.schemas.events import HistoryMode

T = TypeVar("T")

Bootstrap = Annotated[str | None, typer.Option(help="Kafka bootstrap servers, host:port.")]
Namespace = Annotated[str | None, typer.Option(help="Prefix of all topics.")]
LogPath = Annotated[
    Path | None, typer.Option("--file", help="An exported log, instead of a broker.")
]
Rollouts = Annotated[
    list[str] | None, typer.Option("--rollout", help="Only this rollout; may be repeated.")
]
Groups = Annotated[
    list[str] | None, typer.Option("--group", help="Only rollouts of this group; may be repeated.")
]
Runs = Annotated[
    list[str] | None, typer.Option("--run", help="Only rollouts of this run; may be repeated.")
]
Since = Annotated[
    str | None,
    typer.Option(help="Only rollouts that began then or later: ISO 8601 (UTC) or Unix seconds."),
]
Until = Annotated[str | None, typer.Option(help="Only rollouts that began before then.")]
Offsets = Annotated[
    list[str] | None,
    typer.Option(
        "--offsets",
        help="Only rollouts that began at PARTITION:FIRST-LAST of the events; may be repeated.",
    ),
]

_RECORDS_A_STEP = 100


def settings_of(bootstrap: str | None, namespace: str | None) -> ServiceSettings:
    import os

    from turnfold.log.settings import ServiceSettings
    from turnfold.schemas.settings import load

    return load(ServiceSettings, os.environ, bootstrap=bootstrap, namespace=namespace)


def source_of(bootstrap: str | None, namespace: str | None, file: Path | None) -> LogSource:
    from turnfold.replay.client import FileLog, KafkaLog

    if file is not None:
        return FileLog(file)
    settings = settings_of(bootstrap, namespace)
    return KafkaLog(settings, settings.namespace)


async def selection_of(
    source: LogSource,
    *,
    rollouts: list[str] | None,
    groups: list[str] | None,
    runs: list[str] | None,
    since: str | None,
    until: str | None,
    offsets: list[str] | None,
) -> Selection:
    """The rollouts that the options name. Raises UserError saying which text is no time or range."""
    from turnfold.replay.app import offsets_between
    from turnfold.replay.ranges import intersection, moment, offset_ranges
    from turnfold.replay.rebuild import Selection

    named = offset_ranges(offsets) if offsets else None
    timed = await offsets_between(
        source, moment(since) if since else None, moment(until) if until else None
    )
    ranges = intersection(named, timed) if named and timed else named or timed
    return Selection(rollouts or (), groups or (), runs or (), ranges)


def history_mode(mode: str | None) -> HistoryMode | None:
    match mode:
        case None | "linear" | "tree":
            return mode
    raise typer.BadParameter(f"expected linear or tree, got {mode!r}", param_hint="--mode")


def run_with_progress(
    what: str,
    source: LogSource,
    work: Callable[[Callable[[int], None]], Coroutine[Any, Any, T]],
    topics: Sequence[str] = (),
) -> T:
    """Run a job that reads the events, or these topics, with a bar when standard error is a terminal."""
    import asyncio

    async def run() -> T:
        total = await source.num_records(*(topics or [source.topics.events]))
        with _progress_bar(what, total) as advance:
            return await work(advance)

    return asyncio.run(run())


@contextmanager
def _progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(what, total=total)
        # Moving the bar costs more than folding an event, so it moves in larger steps.
        waiting = 0

        def advance(number: int) -> None:
            nonlocal waiting
            waiting += number
            if waiting >= _RECORDS_A_STEP:
                progress.advance(task, waiting)
                waiting = 0

        yield advance

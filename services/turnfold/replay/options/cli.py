"""Options of the commands on the log, and what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from turnfold.log.settings import ServiceSettings
    from turnfold.replay.client import LogSource
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
    return KafkaLog(settings.bootstrap, settings.namespace)


def history_mode(mode: str | None) -> HistoryMode | None:
    match mode:
        case None | "linear" | "tree":
            return mode
    raise typer.BadParameter(f"expected linear or tree, got {mode!r}", param_hint="--mode")


def run_with_progress(
    what: str,
    source: LogSource,
    work: Callable[[Callable[[int], None]], Coroutine[Any, Any, T]],
) -> T:
    """Run a job that reads the events, with a bar on standard error when that is a terminal."""
    import asyncio

    async def run() -> T:
        total = await source.num_records(source.topics.events)
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

"""`turnfold replay`, `ledger`, `export`, `import`, `events …`, `topics …` and `doctor`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from turnfold.log.settings import ServiceSettings
    from turnfold.replay.client import LogSource
    from turnfold.replay.ledger import Account
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


def replay(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    file: LogPath = None,
    rollout: Rollouts = None,
    group: Groups = None,
    mode: Annotated[
        str | None,
        typer.Option(help="Fold as linear or tree, whatever the rollouts were run in."),
    ] = None,
    compare: Annotated[
        bool | None,
        typer.Option(
            help="Hold the result against what the services wrote; default unless --mode is given."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the trajectories to FILE.msgpack, FILE.jsonl or FILE.parquet."),
    ] = None,
) -> None:
    """Compute trajectories and batches again from the log, and prove that they are the same.

    ```
    turnfold replay                            # everything
    turnfold replay --rollout run-000003-01    # one rollout
    turnfold replay --file bug.tflog --mode tree --out rows.parquet
    ```

    The last line is the verdict with a digest of all trajectories; a difference exits 1.
    """
    from turnfold.replay import app
    from turnfold.replay.rebuild import Selection

    chosen_mode = _history_mode(mode)
    is_compared = chosen_mode is None if compare is None else compare
    source = _source(bootstrap, namespace, file)
    with app.file_writer(out) as writer:
        report = _run_with_progress(
            "folding events",
            source,
            lambda advance: app.replay(
                source,
                mode=chosen_mode,
                selection=Selection(rollout or (), group or ()),
                is_compared=is_compared,
                writer=writer,
                on_progress=advance,
            ),
        )
    _show_replay(report)
    if report.all_differences:
        raise typer.Exit(1)


def ledger(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    file: LogPath = None,
    rollout: Rollouts = None,
    group: Groups = None,
    each: Annotated[bool, typer.Option("--each", help="One line for each rollout.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 1 unless everything adds up to 100 %.")
    ] = False,
) -> None:
    """Account for every sampled token: trained, masked or dropped, with the reason.

    The output tokens of all turn events are counted as they lie in the log, and held against the
    ledgers of the trajectories that they give.

    ```
    turnfold ledger --check
    turnfold ledger --each --group run-000003
    ```
    """
    from turnfold.replay import app
    from turnfold.replay.ledger import total
    from turnfold.replay.rebuild import Selection

    source = _source(bootstrap, namespace, file)
    selection = Selection(rollout or (), group or ())
    accounts = _run_with_progress(
        "folding events", source, lambda advance: app.account(source, selection, advance)
    )
    shown = accounts.by_rollout() if each else accounts.by_run()
    everything = total(shown)
    _show_ledger(shown, everything)
    wrong = [a for a in accounts.by_rollout() if not a.is_balanced]
    for account in wrong:
        typer.echo(
            f"rollout {account.name}: {account.num_sampled} sampled, "
            f"{account.num_accounted} accounted for, {account.unaccounted} not as in the log",
            err=True,
        )
    if wrong and check:
        raise typer.Exit(1)


def events_cat(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    file: LogPath = None,
    rollout: Rollouts = None,
    group: Groups = None,
    limit: Annotated[int | None, typer.Option(help="Stop after this many events.")] = None,
    position: Annotated[
        bool, typer.Option("--position", help='Wrap each event: {"partition", "offset", "event"}.')
    ] = False,
) -> None:
    """Print events as JSON lines, token ids as plain integers.

    What is printed can be published again:

    ```
    turnfold events cat --rollout r1 | turnfold events publish --namespace copy
    ```
    """
    import asyncio
    from itertools import count

    from turnfold.replay import app
    from turnfold.replay.rebuild import Selection
    from turnfold.schemas import codec

    source = _source(bootstrap, namespace, file)
    selection = Selection(rollout or (), group or ())

    async def show() -> None:
        numbers = count(1)
        async for record, event in app.events(source, selection):
            if isinstance(event, str):
                typer.echo(f"{record}: {event}", err=True)
                continue
            place = {"partition": record.partition, "offset": record.offset}
            line = codec.encode_json({**place, "event": event} if position else event)
            typer.echo(line.decode())
            if next(numbers) == limit:
                return

    asyncio.run(show())


def events_publish(
    path: Annotated[
        Path | None, typer.Argument(help="JSON lines; standard input when it is left out or -.")
    ] = None,
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether every line is an event.")
    ] = False,
) -> None:
    """Publish events written as JSON, one a line; docs/events.md shows them all.

    Each is acknowledged by Kafka before the next is sent. A line that is no event ends the command
    with its number and what was wrong; the lines before it are published.
    """
    import asyncio
    import sys

    from turnfold.replay import app

    settings = _settings(bootstrap, namespace)

    def publish(lines: Any) -> int:
        return asyncio.run(
            app.publish(lines, settings.bootstrap, settings.namespace, is_checked_only=check)
        )

    if path is None or str(path) == "-":
        number = publish(sys.stdin)
    else:
        with path.open(encoding="utf-8") as lines:
            number = publish(lines)
    typer.echo(f"{number} events are valid" if check else f"{number} events published", err=True)


def topics_create(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    partitions: Annotated[
        int, typer.Option(min=1, help="Partitions of events, tasks and trajectories.")
    ] = 4,
    replication: Annotated[int, typer.Option(min=1, help="Copies of each partition.")] = 1,
    retention_hours: Annotated[
        float | None, typer.Option(help="Keep the log this long; for ever when left out.")
    ] = None,
) -> None:
    """Create the topics that are missing, and name what differs on those that exist.

    A rollout's events stay in one partition, so more partitions let more healers share the work.
    The number cannot be changed later without a new namespace.
    """
    import asyncio

    from turnfold.log.client import create_topics

    settings = _settings(bootstrap, namespace)
    specs = settings.topics.specs(partitions, _retention_ms(retention_hours))
    for name in asyncio.run(create_topics(settings.bootstrap, specs, replication)):
        typer.echo(f"created {name}")
    _show_topic_differences(settings.bootstrap, specs)


def topics_check(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    partitions: Annotated[
        int, typer.Option(min=1, help="Partitions of events, tasks and trajectories.")
    ] = 4,
    retention_hours: Annotated[
        float | None, typer.Option(help="How long the log should be kept; for ever if left out.")
    ] = None,
) -> None:
    """Compare the topics with what they should be; exit 1 when something differs."""
    settings = _settings(bootstrap, namespace)
    specs = settings.topics.specs(partitions, _retention_ms(retention_hours))
    if _show_topic_differences(settings.bootstrap, specs):
        raise typer.Exit(1)


def log_export(
    path: Annotated[Path, typer.Argument(help="The file to write, such as bug.tflog.")],
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    rollout: Rollouts = None,
    group: Groups = None,
    events_only: Annotated[
        bool, typer.Option("--events-only", help="Leave out everything that can be rebuilt.")
    ] = False,
) -> None:
    """Write the log, or some rollouts of it, to one compressed file.

    ```
    turnfold export bug.tflog --rollout run-000003-01
    turnfold replay --file bug.tflog
    ```

    The file holds prompts and answers as tokens and text: treat it as you treat those.
    """
    from turnfold.replay import app
    from turnfold.replay.client import KafkaLog
    from turnfold.replay.rebuild import Selection

    settings = _settings(bootstrap, namespace)
    source = KafkaLog(settings.bootstrap, settings.namespace)
    number = _run_with_progress(
        "exporting",
        source,
        lambda advance: app.export(
            source,
            path,
            Selection(rollout or (), group or ()),
            is_events_only=events_only,
            on_progress=advance,
        ),
    )
    typer.echo(f"{number} records, {path.stat().st_size:,} bytes in {path}")


def log_import(
    path: Annotated[Path, typer.Argument(help="A file written by `turnfold export`.")],
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
) -> None:
    """Load an exported log into empty topics, which are created.

    Offsets begin at 0 there, so trajectories name other places in the log than the original ones.
    """
    import asyncio

    from turnfold.replay import app

    settings = _settings(bootstrap, namespace)
    number = asyncio.run(app.import_log(path, settings.bootstrap, settings.namespace))
    typer.echo(f"{number} records in the topics of {settings.namespace}")


def doctor(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    gateway: Annotated[
        list[str] | None, typer.Option(help="URL of a gateway; may be repeated.")
    ] = None,
    engine: Annotated[
        list[str] | None, typer.Option(help="URL of an inference engine; may be repeated.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="Model directory to look at.")] = None,
    data: Annotated[Path, typer.Option(help="Where data is kept, for its free space.")] = Path(),
) -> None:
    """Look at everything a run needs, and say what to do about what is missing. Exit 1 on a failure.

    ```
    turnfold doctor --gateway http://127.0.0.1:8080 --engine http://127.0.0.1:8000
    ```
    """
    import asyncio

    from rich.console import Console
    from rich.table import Table

    from turnfold.replay.doctor.app import examine
    from turnfold.replay.doctor.checks import Check

    settings = _settings(bootstrap, namespace)

    async def collect() -> list[Check]:
        found = examine(
            bootstrap=settings.bootstrap,
            namespace=settings.namespace,
            gateways=tuple(gateway or ()),
            engines=tuple(engine or ()),
            model=model,
            data=data,
        )
        return [check async for check in found]

    checks = asyncio.run(collect())
    table = Table("", "what", "found", "what to do", box=None, pad_edge=False)
    signs = {"ok": "[green]ok[/]", "warning": "[yellow]note[/]", "failure": "[red]FAIL[/]"}
    for check in checks:
        table.add_row(signs[check.state], check.name, check.detail, check.advice)
    Console().print(table)
    if any(check.state == "failure" for check in checks):
        raise typer.Exit(1)


def _settings(bootstrap: str | None, namespace: str | None) -> ServiceSettings:
    import os

    from turnfold.log.settings import ServiceSettings
    from turnfold.schemas.settings import load

    return load(ServiceSettings, os.environ, bootstrap=bootstrap, namespace=namespace)


def _source(bootstrap: str | None, namespace: str | None, file: Path | None) -> LogSource:
    from turnfold.replay.client import FileLog, KafkaLog

    if file is not None:
        return FileLog(file)
    settings = _settings(bootstrap, namespace)
    return KafkaLog(settings.bootstrap, settings.namespace)


def _history_mode(mode: str | None) -> HistoryMode | None:
    match mode:
        case None | "linear" | "tree":
            return mode
    raise typer.BadParameter(f"expected linear or tree, got {mode!r}", param_hint="--mode")


def _retention_ms(hours: float | None) -> int:
    return -1 if hours is None else int(hours * 3_600_000)


def _run_with_progress(
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
        yield lambda number: progress.advance(task, number)


def _show_topic_differences(bootstrap: str, specs: Any) -> bool:
    import asyncio

    from turnfold.log.client import topic_differences

    differences = asyncio.run(topic_differences(bootstrap, specs))
    lines = [f"{topic}: {what}" for topic, found in differences.items() for what in found]
    for line in lines or [f"all {len(differences)} topics are as they should be"]:
        typer.echo(line)
    return bool(lines)


def _show_replay(report: Any) -> None:
    """Details first, the verdict as the last line."""
    for record, reason in report.rejected:
        typer.echo(f"dead letter {record}: {reason}")
    if report.open_rollouts:
        typer.echo(f"{len(report.open_rollouts)} rollouts have no end in the log yet")
    for kind, number in sorted(report.ignored.items()):
        typer.echo(f"{number} {kind} events changed nothing")
    for verdict in report.verdicts:
        if verdict.unchecked:
            typer.echo(
                f"run {verdict.run_id}: {len(verdict.unchecked)} decisions do not name their "
                f"configuration and were not checked, such as {verdict.unchecked[0]}"
            )
    for difference in report.all_differences:
        typer.echo(f"DIFFERENT {difference}", err=True)
    for line in report.explanations:
        typer.echo(f"    {line}", err=True)
    typer.echo(_verdict(report))


def _verdict(report: Any) -> str:
    counted = f"{report.num_trajectories} trajectories"
    if report.verdicts:
        counted += f" and {report.num_decisions} decisions"
    counted += f" from {report.num_events} events"
    if not report.is_compared:
        return f"rebuilt {counted}, digest {report.digest}"
    if report.all_differences:
        return f"DIFFERENT: {len(report.all_differences)} of {counted}, digest {report.digest}"
    return f"identical: {counted}, digest {report.digest}"


def _show_ledger(accounts: list[Account], everything: Account) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("rollouts", "turns", "sampled", "trained", "masked", "dropped", "sum"):
        table.add_column(name, justify="right")
    table.add_column("why not trained")
    for account in [*accounts, everything]:
        accounted = account.num_accounted - account.unaccounted
        table.add_row(
            account.name,
            f"{account.num_rollouts:,}",
            f"{account.num_turns:,}",
            f"{account.num_sampled:,}",
            _share(account.trained, account.num_sampled),
            _share(account.masked.total(), account.num_sampled),
            _share(account.dropped.total(), account.num_sampled),
            _share(accounted, account.num_sampled),
            _reasons(account),
        )
    Console().print(table)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"


def _reasons(account: Account) -> str:
    counts = account.masked + account.dropped
    return ", ".join(f"{reason} {number:,}" for reason, number in counts.most_common())

"""The command `turnfold stragglers`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from turnfold.replay.options.cli import (
    Bootstrap,
    LogPath,
    Namespace,
    run_with_progress,
    source_of,
)

if TYPE_CHECKING:
    from rich.table import Table

    from turnfold.replay.client import LogSource
    from turnfold.replay.stragglers.bias import BiasTest
    from turnfold.replay.stragglers.report import RunReport, Stragglers


def stragglers(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    file: LogPath = None,
    run_id: Annotated[str | None, typer.Option(help="Only this run.")] = None,
    top: Annotated[
        int, typer.Option(min=0, help="So many of the tasks that were trained least.")
    ] = 5,
    permutations: Annotated[
        int, typer.Option(min=1, help="Of the tests; the smallest p is 1 in so many.")
    ] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show whether slow rollouts were trained as often as quick ones, by length and by task.

    For each run the trained share of the dispatched rollouts, from the shortest to the longest by
    sampled tokens, turns and seconds, and how likely chance alone shows as much: a p above 0.01 is no sign
    of bias. `completed` leaves out rollouts without a reward, such as those cut off at a deadline.

    ```
    turnfold stragglers
    turnfold stragglers --run-id run-7 --json
    ```
    """
    source = source_of(bootstrap, namespace, file)
    found = run_with_progress("reading events", source, lambda step: _collect(source, step))
    reports = [
        report
        for report in found.reports(permutations=permutations)
        if run_id in (None, report.run_id)
    ]
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode({"runs": reports})).decode())
        return
    if not reports:
        typer.echo("nothing was dispatched in this log")
    for report in reports:
        _show(report, top)


async def _collect(source: LogSource, advance: Callable[[int], None]) -> Stragglers:
    from contextlib import suppress

    from turnfold.healer.recorded import decode_event
    from turnfold.replay.accounts.app import assignments
    from turnfold.replay.stragglers.report import Stragglers
    from turnfold.schemas import codec
    from turnfold.schemas.tasks import Task
    from turnfold.schemas.trajectories import Trajectory

    topics, found = source.topics, Stragglers(await assignments(source))
    # What is no message is left to `turnfold replay`, which lists it.
    async for record in source.read(topics.tasks, topics.trajectories):
        with suppress(codec.CodecError):
            if record.topic == topics.tasks:
                found.add_task(codec.decode(Task, record.value or b"", record.content_type))
            else:
                made = codec.decode(Trajectory, record.value or b"", record.content_type)
                found.add_trajectory(made)
    async for record in source.read(topics.events):
        advance(1)
        with suppress(codec.CodecError):
            found.add_event(decode_event(record))
    return found


def _show(report: RunReport, top: int) -> None:
    typer.echo(
        f"run {report.run_id}: {report.num_groups - report.num_undecided_groups} of "
        f"{report.num_groups} groups decided, {report.num_trained:,} of {report.num_rollouts:,} "
        f"rollouts trained"
    )
    if report.reasons:
        listed = ", ".join(f"{reason} {number:,}" for reason, number in report.reasons.items())
        typer.echo(f"not trained: {listed}")
    if not report.num_ended:
        return
    typer.echo()
    _show_lengths(report)
    _show_tests(report)
    _show_tasks(report, top)


def _show_lengths(report: RunReport) -> None:
    table = _table("from the shortest to the longest", "rollouts", "length", "trained", "share")
    for measure, found in report.by_length.items():
        for number, part in enumerate(found.bins):
            table.add_row(
                measure if number == 0 else "",
                f"{part.num_rollouts:,}",
                f"{part.first:,.0f}–{part.last:,.0f}",
                f"{part.num_trained:,}",
                f"{100 * part.num_trained / part.num_rollouts:.1f} %",
            )
    _print(table)


def _show_tests(report: RunReport) -> None:
    table = _table("trained against", "KS", "p", "longer", "p", "by task p")
    for measure, found in report.by_length.items():
        for name, test in (("all", found.all), ("completed", found.completed)):
            if test is not None:
                table.add_row(f"{name}, by {measure}", *_numbers(test))
    _print(table)


def _numbers(test: BiasTest) -> Sequence[str]:
    return (
        f"{test.ks:.3f}",
        f"{test.ks_p:.3f}",
        "-" if test.longer is None else f"{test.longer:.3f}",
        "-" if test.longer_p is None else f"{test.longer_p:.3f}",
        f"{test.task_p:.3f}",
    )


def _show_tasks(report: RunReport, top: int) -> None:
    if not top or not report.tasks:
        return
    table = _table("trained least", "rollouts", "trained", "share", "mean tokens")
    for task in report.tasks[:top]:
        table.add_row(
            task.task_id,
            f"{task.num_rollouts:,}",
            f"{task.num_trained:,}",
            f"{100 * task.num_trained / task.num_rollouts:.1f} %",
            "-" if task.mean_tokens is None else f"{task.mean_tokens:,.0f}",
        )
    _print(table)


def _table(name: str, *numbers: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(name)
    for number in numbers:
        table.add_column(number, justify="right")
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    Console().print(table)
    typer.echo()

"""`turnfold replay`, `refold`, `diff` and `ledger`; the other commands on the log by their names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnfold.replay.doctor.cli import doctor as doctor
from turnfold.replay.options.cli import (
    Bootstrap,
    Groups,
    LogPath,
    Namespace,
    Offsets,
    Rollouts,
    Runs,
    Since,
    Until,
    history_mode,
    run_with_progress,
    selection_of,
    settings_of,
    source_of,
)
from turnfold.replay.topics.cli import topics_check as topics_check
from turnfold.replay.topics.cli import topics_create as topics_create
from turnfold.replay.transfer.cli import events_cat as events_cat
from turnfold.replay.transfer.cli import events_publish as events_publish
from turnfold.replay.transfer.cli import log_export as log_export
from turnfold.replay.transfer.cli import log_import as log_import

if TYPE_CHECKING:
    from turnfold.replay.diff.comparison import Comparison
    from turnfold.replay.ledger import Account


def replay(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    file: LogPath = None,
    rollout: Rollouts = None,
    group: Groups = None,
    run: Runs = None,
    since: Since = None,
    until: Until = None,
    offsets: Offsets = None,
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
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Divide the partitions among so many processes. [default: one for each core when "
            "the log is long]",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Keep how far it has come in this folder, every 10 s and at the end."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from what the --checkpoint folder holds.")
    ] = False,
) -> None:
    """Compute trajectories and batches again from the log, and prove that they are the same.

    ```
    turnfold replay                            # everything
    turnfold replay --processes 1              # leave the other cores alone
    turnfold replay --rollout run-000003-01    # one rollout
    turnfold replay --since 2026-09-21T14:00 --until 2026-09-21T15:00
    turnfold replay --offsets 0:1200-1900      # partition 0, both ends included
    turnfold replay --file bug.tflog --mode tree --out rows.parquet
    turnfold replay --checkpoint replay.d      # interrupted …
    turnfold replay --checkpoint replay.d --resume
    ```

    The last line is the verdict with a digest of all trajectories; a difference exits 1.

    --rollout, --group, --run, --since, --until and --offsets choose rollouts. A time or offset is
    that of a rollout's start; its later events are read wherever they lie. The decisions of the
    assembler are taken again only when everything is chosen.

    With --resume, what was folded before is not folded again, also when the log has grown since:
    give it every hour, and each time costs as much as the new part of the log.
    """
    from turnfold.replay import app
    from turnfold.replay.processes.app import suitable_number

    chosen_mode = history_mode(mode)
    is_compared = chosen_mode is None if compare is None else compare
    if out is not None and (processes or 1) > 1:
        raise typer.BadParameter("--out is written by one process", param_hint="--processes")
    if resume and (checkpoint is None or out is not None):
        raise typer.BadParameter(
            "expected --checkpoint with it, and no --out, which begins with the first trajectory",
            param_hint="--resume",
        )
    source = source_of(bootstrap, namespace, file)

    async def work(advance: Any) -> app.Report:
        selection = await selection_of(
            source,
            rollouts=rollout,
            groups=group,
            runs=run,
            since=since,
            until=until,
            offsets=offsets,
        )
        num_processes = 1 if out is not None else processes
        if num_processes is None:
            num_processes = await suitable_number(source, source.topics.events)
        with app.file_writer(out) as writer:
            return await app.replay(
                source,
                mode=chosen_mode,
                selection=selection,
                is_compared=is_compared,
                writer=writer,
                num_processes=num_processes,
                checkpoints=checkpoint,
                is_resumed=resume,
                on_progress=advance,
            )

    topics = source.topics
    read = [topics.events, topics.trajectories] if is_compared else [topics.events]
    report = run_with_progress("folding events", source, work, read)
    _show_replay(report)
    if report.all_differences:
        raise typer.Exit(1)


def refold(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    file: LogPath = None,
    rollout: Rollouts = None,
    group: Groups = None,
    mode: Annotated[
        str | None, typer.Option(help="Fold as linear or tree, whatever the rollouts were run in.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(help="Score with module:function or file.py:function instead."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the trajectories to FILE.msgpack, FILE.jsonl or FILE.parquet."),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(help="Write them to the trajectories topic of this other namespace."),
    ] = None,
) -> None:
    """Make other trajectories of the same log: another history mode, another reward, or both.

    The reward function gets each trajectory that was not aborted, and returns its reward:

        def score(trajectory) -> float: ...      # turnfold.schemas.trajectories.Trajectory

    ```
    turnfold refold --mode tree --out tree.jsonl
    turnfold refold --reward rewards.py:score --to rescored
    turnfold diff turnfold rescored
    ```

    The log is only read. A namespace is created when it is missing; an interrupted command can be
    given again.
    """
    from turnfold.replay import app as replay_app
    from turnfold.replay.rebuild import Selection
    from turnfold.replay.refold import app
    from turnfold.replay.refold.client import TrajectoryTopic
    from turnfold.schemas.errors import UserError

    if (out is None) == (to is None):
        raise UserError("give either --out FILE or --to NAMESPACE")
    chosen_mode, source = history_mode(mode), source_of(bootstrap, namespace, file)
    settings = settings_of(bootstrap, namespace)
    if to == source.topics.namespace and file is None:
        raise UserError(f"{to} is the namespace of the log itself: write to another one")
    topic = TrajectoryTopic(settings, to) if to else None

    async def work(advance: Any) -> app.Refolded:
        with replay_app.file_writer(out) as writer:
            return await app.refold(
                source,
                mode=chosen_mode,
                reward=reward,
                selection=Selection(rollout or (), group or ()),
                writer=writer,
                topic=topic,
                on_progress=advance,
            )

    made = run_with_progress("folding events", source, work)
    statuses = ", ".join(f"{number} {status}" for status, number in sorted(made.statuses.items()))
    typer.echo(f"{made.num_trajectories} trajectories ({statuses}) from {made.num_events} events")
    typer.echo(f"{made.num_rows:,} rows, {made.num_trained:,} tokens with mask 1")
    if topic is not None:
        typer.echo(f"{topic.num_written} written to {to}, {topic.num_found} were there already")
    typer.echo(f"digest {made.digest}")


def diff(
    left: Annotated[str, typer.Argument(help="A .jsonl, .msgpack or .tflog file, or a namespace.")],
    right: Annotated[str, typer.Argument(help="What to compare it with.")],
    bootstrap: Bootstrap = None,
    rollout: Rollouts = None,
    group: Groups = None,
    limit: Annotated[int, typer.Option(min=0, help="Show this many changed rollouts.")] = 10,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show which tokens of their rows differ.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit 1 unless nothing differs.")] = False,
) -> None:
    """Compare two sets of trajectories: what changed, by rollout, turn and token.

    ```
    turnfold diff turnfold rescored
    turnfold diff turnfold tree.jsonl --tokens --rollout run-000003-01
    ```

    Of each rollout the newest revision counts. Where in the log a trajectory lies, and what its mode
    is called, is no difference.
    """
    import asyncio

    from turnfold.replay.diff import app
    from turnfold.replay.rebuild import Selection

    settings = settings_of(bootstrap, None)
    sides = app.Side(left, settings), app.Side(right, settings)
    found = asyncio.run(app.diff(*sides, Selection(rollout or (), group or ())))
    shown = found.changes[:limit]
    details = asyncio.run(app.tokens(*sides, shown)) if tokens and shown else {}
    for change in shown:
        typer.echo(f"rollout {change.rollout_id}")
        for line in (*change.lines, *details.get(change.rollout_id, ())):
            typer.echo(f"    {line}")
    if len(found.changes) > len(shown):
        typer.echo(f"{len(found.changes) - len(shown)} more changed rollouts (--limit)")
    _show_comparison(found, left, right)
    if check and not found.is_same:
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
    turn: Annotated[
        str | None,
        typer.Option(help="Show which updates this turn reached, and on which tokens."),
    ] = None,
    groups_per_mini_batch: Annotated[
        int | None,
        typer.Option(min=1, help="ppo_mini_batch_size, for --turn when the log does not say it."),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="ppo_epochs, for --turn when the log does not say it."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Data-parallel ranks, for --turn when the log does not say it."),
    ] = None,
) -> None:
    """Account for every sampled token: trained, masked or dropped, with the reason.

    The output tokens of all turn events are counted as they lie in the log, and held against the
    ledgers of the trajectories that they give and against what was decided on those: a group that
    was dropped as stale trained nothing. What waits has its turn still to come.

    ```
    turnfold ledger --check
    turnfold ledger --each --group run-000003
    turnfold ledger --turn 5c1f…
    ```

    --turn follows one turn to its optimizer steps. The trainer writes its mini-batches and epochs
    into the log; for a log without them give --groups-per-mini-batch, --epochs and --ranks.
    """
    from turnfold.replay.accounts import app
    from turnfold.replay.ledger import total
    from turnfold.replay.rebuild import Selection
    from turnfold.replay.trace import lines
    from turnfold.replay.updates import Sizes

    source = source_of(bootstrap, namespace, file)
    if turn is not None:
        sizes = Sizes(
            groups_per_mini_batch=groups_per_mini_batch, num_epochs=epochs, num_ranks=ranks
        )
        traces = run_with_progress(
            "looking for the turn",
            source,
            lambda advance: app.trace_turn(source, turn, rollout or (), sizes, advance),
        )
        for line in (line for found in traces for line in lines(found)):
            typer.echo(line)
        return
    selection = Selection(rollout or (), group or ())
    accounts = run_with_progress(
        "folding events", source, lambda advance: app.account(source, selection, advance)
    )
    shown = accounts.by_rollout() if each else accounts.by_run()
    everything = total(shown)
    _show_ledger(shown, everything)
    for run_id in accounts.undecided_runs:
        typer.echo(f"run {run_id}: nothing is decided, so trained means in a row with mask 1")
    wrong = [a for a in accounts.by_rollout() if not a.is_balanced]
    for account in wrong:
        typer.echo(
            f"rollout {account.name}: {account.num_sampled} sampled, "
            f"{account.num_accounted} accounted for, {account.unaccounted} not as in the log",
            err=True,
        )
    if wrong and check:
        raise typer.Exit(1)


def _show_replay(report: Any) -> None:
    """Details first, the verdict as the last line."""
    from turnfold.healer.rows import FOLD_VERSION

    for place, reason in report.rejected:
        typer.echo(f"dead letter {place}: {reason}")
    if report.open_rollouts:
        typer.echo(f"{len(report.open_rollouts)} rollouts have no end in the log yet")
    for kind, number in sorted(report.ignored.items()):
        typer.echo(f"{number} {kind} events changed nothing")
    for version, number in sorted(report.num_of_other_versions.items()):
        typer.echo(
            f"{number} trajectories were written by version {version} of the fold and are not compared "
            f"with those of version {FOLD_VERSION}: refold and diff show what has changed"
        )
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
        return f"DIFFERENT: {len(report.all_differences)} differences among {counted}, digest {report.digest}"
    return f"identical: {counted}, digest {report.digest}"


def _show_ledger(accounts: list[Account], everything: Account) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in ("rollouts", "turns", "sampled", "trained", "masked", "dropped", "waiting", "sum"):
        table.add_column(name, justify="right")
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
            _share(account.waiting.total(), account.num_sampled),
            _share(accounted, account.num_sampled),
        )
    Console().print(table)
    # Below the table, which would not fit into a terminal with them.
    for account in accounts or [everything]:
        if reasons := _reasons(account):
            typer.echo(f"{account.name}, not trained: {reasons}")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"


def _reasons(account: Account) -> str:
    counts = account.masked + account.dropped + account.waiting
    return ", ".join(f"{reason} {number:,}" for reason, number in counts.most_common())


def _show_comparison(found: Comparison, left: str, right: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in (left, right, "change"):
        table.add_column(name, justify="right")
    for name, field in (
        ("trajectories", "num_trajectories"),
        ("aborted", "num_aborted"),
        ("rows", "num_rows"),
        ("tokens in rows", "num_tokens"),
        ("sampled tokens", "num_sampled"),
        ("trained tokens", "num_trained"),
    ):
        before, after = getattr(found.left, field), getattr(found.right, field)
        change = f"{after - before:+,}" if after != before else ""
        table.add_row(name, f"{before:,}", f"{after:,}", change)
    before, after = found.left.mean_reward, found.right.mean_reward
    if before is not None and after is not None:
        change = f"{after - before:+.4f}" if after != before else ""
        table.add_row("mean reward", f"{before:.4f}", f"{after:.4f}", change)
    Console().print(table)
    for (was, is_now), number in found.moved.most_common():
        typer.echo(f"{number:,} sampled tokens: {was} → {is_now}")
    typer.echo(
        f"{found.num_same} rollouts the same, {len(found.changes)} changed "
        f"({found.num_reward_changes} in reward), {len(found.only_left)} only in {left}, "
        f"{len(found.only_right)} only in {right}"
    )

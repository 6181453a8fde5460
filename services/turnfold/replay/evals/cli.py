"""The command `turnfold evals`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from turnfold.replay.options.cli import Bootstrap, LogPath, Namespace, source_of

if TYPE_CHECKING:
    from turnfold.replay.client import LogSource
    from turnfold.replay.evals.curve import Round

_BAR_WIDTH = 20


def evals(
    bootstrap: Bootstrap = None,
    namespace: Namespace = None,
    file: LogPath = None,
    run_id: Annotated[str | None, typer.Option(help="Only this run.")] = None,
    tasks: Annotated[
        bool, typer.Option("--tasks", help="Show what each task scored as well.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what the policy scored on the evaluation tasks, version by version.

    A dispatcher with TURNFOLD_EVAL_DATASET sends them every TURNFOLD_EVAL_EVERY versions. The means
    are over tasks; a rollout that failed counts as nothing, not as 0, and is listed under its reason.

    ```
    turnfold evals
    turnfold evals --tasks --run-id run-7
    ```
    """
    import asyncio

    source = source_of(bootstrap, namespace, file)
    rounds = [r for r in asyncio.run(_rounds(source)) if run_id in (None, r.run_id)]
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode({"rounds": rounds})).decode())
        return
    if not rounds:
        typer.echo("no evaluation in this log: start the dispatcher with --eval-dataset")
        return
    _show(rounds)
    if tasks:
        _show_tasks(rounds)


async def _rounds(source: LogSource) -> list[Round]:
    from contextlib import suppress

    from turnfold.replay.evals.curve import Curve
    from turnfold.schemas import codec
    from turnfold.schemas.batches import Decision

    curve = Curve()
    async for record in source.read(source.topics.batches):
        with suppress(codec.CodecError):
            curve.add(codec.decode(Decision, record.value or b"", record.content_type))
    return curve.rounds()


def _show(rounds: Sequence[Round]) -> None:
    from rich.console import Console
    from rich.table import Table

    sizes = sorted({k for found in rounds if found.completed for k in found.completed.pass_at})
    table = Table(box=None, pad_edge=False)
    table.add_column("run")
    for name in ("version", "tasks", "rollouts", "mean reward", *(f"pass@{k}" for k in sizes)):
        table.add_column(name, justify="right")
    for name in ("", "sampled by", "no reward"):
        table.add_column(name)
    rewards = [r.completed.mean_reward for r in rounds if r.completed]
    highest = max((reward for reward in rewards if reward is not None), default=0.0)
    for found in rounds:
        table.add_row(found.run_id, str(found.version), *_cells(found, sizes, highest))
    Console().print(table)


def _cells(found: Round, sizes: Sequence[int], highest: float) -> list[str]:
    done = found.completed
    if done is None:
        progress = f"{len(found.tasks)}/{found.num_tasks}"
        return [progress, "", "under way", *("" for _ in sizes)]
    mean = done.mean_reward
    share = mean / highest if mean is not None and highest > 0 else 0.0
    return [
        f"{done.num_scored}/{done.num_tasks}",
        str(done.num_rollouts),
        "-" if mean is None else f"{mean:.3f}",
        *(f"{done.pass_at[k]:.3f}" if k in done.pass_at else "" for k in sizes),
        "█" * round(_BAR_WIDTH * max(0.0, share)),
        _versions(done.min_policy_version, done.max_policy_version),
        ", ".join(f"{reason} {number}" for reason, number in done.left_out.items()),
    ]


def _versions(first: int | None, last: int | None) -> str:
    if first is None or last is None:
        return ""
    return str(first) if first == last else f"{first}–{last}"


def _show_tasks(rounds: Sequence[Round]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("run", "version", "task", "passed", "rewards", "no reward"):
        table.add_column(name)
    for found in rounds:
        for task in found.tasks:
            table.add_row(
                found.run_id,
                str(found.version),
                task.task_id,
                f"{task.num_passed}/{len(task.rewards)}",
                " ".join(f"{reward:g}" for reward in task.rewards),
                ", ".join(sorted(set(task.left_out.values()))),
            )
    Console().print()
    Console().print(table)

"""`turnfold train`: the trainer as a command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from turnfold.schemas.run import RunConfig


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="verl's own settings in hydra's form: key=value, +key=value, ~key."),
    ] = None,
    bootstrap: Annotated[str | None, typer.Option(help="Kafka bootstrap servers.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Prefix of the topics.")] = None,
    run_dir: Annotated[
        str | None, typer.Option(help="Directory of checkpoints, weights and metrics.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Directory of the initial model.")] = None,
    num_batches: Annotated[
        int | None, typer.Option(help="Stop after this many batches in all.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    health_port: Annotated[
        int | None, typer.Option(help="Port of /healthz, /readyz and /metrics.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the schedule of this configuration, and end.")
    ] = False,
    ranks: Annotated[int, typer.Option(help="With --dry-run: data-parallel ranks.", min=1)] = 1,
) -> None:
    """Train batch after batch with verl, and publish a policy version for each.

    Everything about learning is verl's own configuration, given as hydra overrides; sizes of batches
    and groups come from the run (TURNFOLD_GROUPS_PER_BATCH, TURNFOLD_GROUP_SIZE), which all services
    share. Start it again after a crash and it goes on behind the last checkpoint in --run-dir.

        turnfold train --model ./model actor_rollout_ref.actor.optim.lr=1e-5

        turnfold train --dry-run actor_rollout_ref.actor.ppo_mini_batch_size=2
    """
    import os

    from turnfold.schemas.run import RunConfig
    from turnfold.schemas.settings import load
    from turnfold.trainer.settings import Settings

    settings = load(
        Settings,
        os.environ,
        bootstrap=bootstrap,
        namespace=namespace,
        run_dir=run_dir,
        model=model,
        num_batches=num_batches,
        device=device,
        health_port=health_port,
    )
    run = load(RunConfig, os.environ)
    if dry_run:
        _print_schedule(run, overrides or [], ranks)
        return

    from turnfold.log.service import Health, run_service
    from turnfold.trainer import app

    async def body(health: Health, stop: Any) -> None:
        await app.train(settings, run, overrides or [], health, stop)

    run_service("train", body, health_port=settings.health_port, log_level=settings.log_level)


def _print_schedule(run: RunConfig, overrides: list[str], ranks: int) -> None:
    """Rows → mini-batches → steps, without starting verl."""
    from rich.console import Console
    from rich.table import Table

    from turnfold.trainer import config
    from turnfold.trainer.preview import preview

    schedule = config.check(config.compose(overrides, run), run, num_ranks=ranks)
    console = Console()
    console.print(
        f"{run.groups_per_batch} groups x {run.group_size} rollouts a batch, "
        f"{schedule.num_mini_batches} mini-batches x {schedule.num_epochs} epochs on "
        f"{ranks} rank(s): {schedule.num_steps} optimizer steps, whatever the number of rows.\n"
        f"The loss of a mini-batch is divided by {schedule.rollouts_per_mini_batch} rollouts; a "
        f"micro-batch holds {schedule.max_row_tokens} tokens a rank.",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(
        "rows a rollout", "rows", "padding", "rows a mini-batch", "a rank", "steps", box=None
    )
    for line in preview(run, schedule):
        table.add_row(*map(str, line))
    console.print(table)

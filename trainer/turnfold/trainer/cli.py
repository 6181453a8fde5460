"""`turnfold train`: the trainer as a command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from turnfold.schemas.run import RunConfig
    from turnfold.trainer.plan import Schedule
    from turnfold.trainer.settings import Settings


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="verl's own settings in hydra's form: key=value, +key=value, ~key. "
            "Or: explain BATCH."
        ),
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
    driver: Annotated[
        str | None,
        typer.Option(help="process (this one, or torchrun's) or ray (workers in a Ray cluster)."),
    ] = None,
    health_port: Annotated[
        int | None, typer.Option(help="Port of /healthz, /readyz and /metrics.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the schedule of this configuration, and end.")
    ] = False,
    ranks: Annotated[
        int, typer.Option(help="With --dry-run and explain: data-parallel ranks.", min=1)
    ] = 1,
) -> None:
    """Train batch after batch with verl, and publish a policy version for each.

    Everything about learning is verl's own configuration, given as hydra overrides; sizes of batches
    and groups come from the run (TURNFOLD_GROUPS_PER_BATCH, TURNFOLD_GROUP_SIZE), which all services
    share. Start it again after a crash and it goes on behind the last checkpoint in --run-dir.

        turnfold train --model ./model actor_rollout_ref.actor.optim.lr=1e-5

        torchrun --nproc-per-node 8 -m turnfold.trainer --model ./model

        turnfold train --driver ray trainer.nnodes=4 trainer.n_gpus_per_node=8

        turnfold train --dry-run actor_rollout_ref.actor.ppo_mini_batch_size=2

        turnfold train explain 7

    Every knob is where verl has it; below actor_rollout_ref.actor: ppo_mini_batch_size, ppo_epochs,
    optim.lr, clip_ratio_low, clip_ratio_high, policy_loss.loss_mode, use_kl_loss, entropy_coeff,
    strategy, fsdp_config; elsewhere: algorithm.adv_estimator, algorithm.rollout_correction,
    actor_rollout_ref.model.lora_rank, trainer.logger. docs/training.md says which of verl's are not
    read here, and what stands in their place.
    """
    import os

    from turnfold.schemas.run import RunConfig
    from turnfold.schemas.settings import load
    from turnfold.trainer.backends import environment
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
        driver=driver,
        health_port=health_port,
    )
    run = load(RunConfig, os.environ)
    words = list(overrides or [])
    if words[:1] == ["explain"]:
        _explain(settings, run, words[1:], ranks)
        return
    if dry_run:
        _print_schedule(settings, run, words, ranks)
        return

    import msgspec

    from turnfold.log.service import Health, run_service
    from turnfold.trainer import app

    async def body(health: Health, stop: Any) -> None:
        await app.train(settings, run, words, health, stop)

    # Of the processes that torchrun starts, only the first one has something to say.
    if environment.process_rank() != 0:
        settings = msgspec.structs.replace(settings, health_port=None)
    run_service("train", body, settings)


def _print_schedule(settings: Settings, run: RunConfig, overrides: list[str], ranks: int) -> None:
    """Rows → mini-batches → steps, and memory where the model is known, without starting verl."""
    from rich.console import Console
    from rich.table import Table

    from turnfold.trainer import config
    from turnfold.trainer.preview import preview

    is_gpu = settings.device == "cuda"
    composed = config.compose(overrides, run, is_gpu=is_gpu)
    schedule = config.check(composed, run, num_ranks=ranks, is_gpu=is_gpu)
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
    for caution in config.cautions(composed, overrides):
        console.print(f"Note: {caution}", highlight=False, soft_wrap=True)
    if settings.model:
        console.print(_memory(settings.model, composed, schedule), highlight=False, soft_wrap=True)


def _memory(model_dir: str, composed: Any, schedule: Schedule) -> str:
    import json

    from turnfold.trainer import memory, weights

    directory = weights.model_dir(model_dir)
    shape = memory.shape(
        json.loads((directory / "config.json").read_text()), weights.num_parameters(directory)
    )
    actor = composed.actor_rollout_ref.actor
    is_fp32 = "mixed_precision" in actor.get(
        "fsdp_config", {}
    )  # as on a CPU; verl's default is bfloat16
    found = memory.estimate(
        shape,
        micro_batch_tokens=max(schedule.max_row_tokens, actor.ppo_max_token_len_per_gpu),
        num_ranks=schedule.num_ranks,
        activation_bytes=4 if is_fp32 else 2,
        has_moments=actor.optim.optimizer != "SGD",
        is_checkpointed=composed.actor_rollout_ref.model.enable_gradient_checkpointing,
        has_reference=actor.use_kl_loss,
    )
    parts = ("parameters", "gradients", "optimizer", "activations", "logits")
    sizes = ", ".join(f"{part} {getattr(found, part) / memory.GIB:.2f}" for part in parts)
    return (
        f"Memory of a rank, about {found.total / memory.GIB:.2f} GiB for "
        f"{shape.num_parameters:,} parameters: {sizes}."
    )


def _explain(settings: Settings, run: RunConfig, words: list[str], ranks: int) -> None:
    """Which row of a batch is trained where; the same plan that the trainer makes."""
    import asyncio

    from turnfold.schemas.settings import SettingsError
    from turnfold.trainer import config
    from turnfold.trainer.client import BatchSource
    from turnfold.trainer.plan import plan
    from turnfold.trainer.rows import train_rows
    from turnfold.trainer.source import Batch

    if not words or not words[0].isdecimal():
        raise SettingsError("turnfold train explain: expected the number of a batch")
    is_gpu = settings.device == "cuda"
    composed = config.compose(words[1:], run, is_gpu=is_gpu)
    schedule = config.check(composed, run, num_ranks=ranks, is_gpu=is_gpu)

    async def fetch() -> Batch:
        async with BatchSource(settings, settings.topics, run) as source:
            await source.open(after=0)
            return await source.find(int(words[0]))

    rows = train_rows(asyncio.run(fetch()).trajectories, {})
    _print_placement(int(words[0]), rows, plan([row.size for row in rows], schedule))


def _print_placement(index: int, rows: Any, planned: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    from turnfold.trainer.preview import mini_batches, placed

    console = Console()
    console.print(
        f"batch {index}: {planned.num_rows} rows and {planned.num_padding} of padding, "
        f"{planned.num_steps} optimizer steps",
        highlight=False,
    )
    columns = ("mini-batch", "steps", "groups", "rollouts", "rows", "padding", "tokens", "trained")
    table = Table(*columns, "fullest rank", box=None)
    for m in mini_batches(rows, planned):
        counts = (m.groups, m.rollouts, m.rows, m.padding, m.tokens, m.trained_tokens)
        steps = " ".join(map(str, m.steps))
        table.add_row(str(m.number), steps, *map(str, counts), f"{m.fullest_rank:.3f} x mean")
    console.print(table)
    table = Table("mini-batch", "rank", "group", "rollout", "tokens", "trained", box=None)
    for place in placed(rows, planned):
        row = place.row
        table.add_row(
            str(place.mini_batch),
            str(place.rank),
            row.group_id,
            row.rollout_id,
            str(len(row.row.token_ids)),
            str(row.row.num_trained),
        )
    console.print(table)

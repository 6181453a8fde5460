"""Whether a run may go on from what is there, and from which weights. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnfold.schemas.errors import UserError
from turnfold.schemas.run import RunConfig
from turnfold.trainer.checkpoints import Checkpoint, CheckpointError


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the policy comes from."""

    checkpoint: Checkpoint | None
    """Loaded with optimizer and random state; None for a policy that starts from `model`."""
    model: Path
    """Full weights from which the policy is built."""


def origin(found: Checkpoint | None, *, model: Path, num_processes: int, is_lora: bool) -> Origin:
    """Go on from a checkpoint, by its full weights when the number of processes has changed.

    Raises CheckpointError when the number of processes has changed and there are no full weights.
    """
    if found is None or found.state.num_processes == num_processes:
        return Origin(found, model)
    if found.state.batch == 0:
        return Origin(None, model)  # nothing was trained
    full = found.model_dir
    if full is None or is_lora:
        raise CheckpointError(
            f"{found.directory} was saved by {found.state.num_processes} process(es) and can be "
            f"loaded by as many only, here are {num_processes}: start as many, or train with "
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model] "
            "(not with LoRA), whose checkpoints another number can go on from"
        )
    return Origin(None, full)


def check_new(
    run: RunConfig, published: int | None, *, checkpoints: Path, weights: Path, stray: Sequence[int]
) -> None:
    """Without a checkpoint there must be nothing of a run, neither on the topic nor on disk.

    `stray` are versions found in the weights directory. Raises UserError.
    """
    if published is not None:
        raise UserError(
            f"run {run.run_id} has published policy version {published}, but {checkpoints} holds "
            "no checkpoint: give the --run-dir of that run, or start another one with "
            "TURNFOLD_RUN_ID"
        )
    if stray:
        raise UserError(
            f"{weights} holds weights of some run, but {checkpoints} holds no checkpoint of it: "
            "give an empty --run-dir"
        )


def check_owner(found: Checkpoint, run: RunConfig, published: int | None, *, topic: str) -> None:
    """Raise UserError unless the checkpoint is of this run and of this log."""
    if (found.state.run_id, found.state.config_digest) != (run.run_id, run.digest):
        raise UserError(
            f"{found.directory} is of run {found.state.run_id} with configuration "
            f"{found.state.config_digest[:12]}, this is run {run.run_id} with "
            f"{run.digest[:12]}: give the same TURNFOLD_* variables, or another --run-dir"
        )
    # A checkpoint is at most one version ahead of the topic: that of the crash before 3.
    if found.state.batch > (-1 if published is None else published) + 1:
        raise UserError(
            f"{found.directory} is of policy version {found.state.batch}, but the newest on "
            f"{topic} is {published}: the run directory belongs to another log; give an empty "
            "--run-dir"
        )

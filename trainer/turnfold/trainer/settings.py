"""What the trainer is told besides verl's own configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from turnfold.log.settings import ServiceSettings

Device = Literal["auto", "cpu", "cuda"]
DriverName = Literal["process", "ray"]


class Settings(ServiceSettings, frozen=True, kw_only=True):
    """Settings of `turnfold train`; everything about learning is verl's configuration."""

    run_dir: str = "./run"
    """Directory of checkpoints, weights and metrics."""
    model: str = ""
    """Directory of the initial model, with config, weights and tokenizer."""
    num_batches: int | None = None
    """Stop after this many batches in all, those before a restart included; never when unset."""
    device: Device = "auto"
    """Where to train; auto takes a GPU when torch sees one."""
    driver: DriverName = "process"
    """process: this one, or all that torchrun started; ray: verl's trainer.nnodes x
    trainer.n_gpus_per_node workers in a Ray cluster."""
    weights_dtype: str = "auto"
    """dtype of published weights; auto is float32 on a CPU and bfloat16 on a GPU."""
    keep_weights: int = 3
    """Published versions that stay on disk, at least 2; one that engines still serve stays too."""
    keep_checkpoints: int = 3
    """Checkpoints that stay on disk, at least 2 so that a damaged one has one before it."""
    keep_checkpoint_hours: int = 0
    """For so many hours back, the newest checkpoint of each hour stays besides those."""
    checkpoint_every: int = 1
    """Batches per checkpoint; after a crash the batches since the last one are trained again."""
    is_overlapped: bool = True
    """Write checkpoint and weights while the next batch trains, from a copy of the weights in
    memory; false saves that memory."""
    prefetch: int = 1
    """Batches that are read ahead while one trains."""
    max_mismatch_kl: float | None = None
    """Stop when the KL (k3, per token) between what engines sampled with and what the trainer
    computes is above this; never when unset."""

    def __post_init__(self) -> None:
        for name in ("keep_weights", "keep_checkpoints"):
            if getattr(self, name) < 2:
                raise ValueError(f"{name}: expected at least 2, got {getattr(self, name)}")
        for name in ("checkpoint_every", "prefetch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("num_batches", "keep_checkpoint_hours"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}: expected 0 or more, got {value}")

    @property
    def weights_dir(self) -> Path:
        return Path(self.run_dir).resolve() / "weights"

    @property
    def checkpoints_dir(self) -> Path:
        return Path(self.run_dir).resolve() / "checkpoints"

    @property
    def metrics_dir(self) -> Path:
        return Path(self.run_dir).resolve() / "metrics"

"""Sizes of the demo, found with benchmarks/toy_rl.py to learn in a few minutes on two cores."""

from __future__ import annotations

from turnfold.embedded.demo.pipeline import Training
from turnfold.schemas.run import RunConfig

CONFIG = RunConfig(
    run_id="demo",
    group_size=8,
    groups_per_batch=8,
    min_group_size=2,
    max_staleness=1,
    group_timeout_s=120.0,
    rollout_timeout_s=60.0,
    max_row_tokens=2048,
)


def training(num_batches: int) -> Training:
    """How the demo trains each batch."""
    return Training(num_batches=num_batches, num_mini_batches=2, ppo_epochs=2, learning_rate=5e-4)

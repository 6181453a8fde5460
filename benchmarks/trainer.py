"""Planning and updating: steps, padding, balance and seconds for batches of many shapes.

    python benchmarks/trainer.py
    python benchmarks/trainer.py --model DIR --rows 512 1536      also updates a real model

Prints one JSON object. `steps_of_fixed_rows` is what a mini-batch of a fixed number of rows would
take, for comparison.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

from turnfold.schemas.run import RunConfig
from turnfold.schemas.testing import row
from turnfold.trainer.plan import Plan, PlanRow, Schedule, plan
from turnfold.trainer.rows import TrainRow

GROUPS, GROUP_SIZE = 64, 8
SHAPES = [(4, 1), (4, 8), (1, 64), (16, 8)]
"""Mini-batches and ranks."""


def rows_of(num_rows: int, seed: int = 0) -> list[PlanRow]:
    """Rows of 200 to 32,000 tokens; a fifth of them in a group of their own choice."""
    rng = random.Random(seed)
    return [
        PlanRow(
            group_id=f"g{i % GROUPS if rng.random() < 0.8 else rng.randrange(GROUPS)}",
            num_tokens=rng.randint(200, 32_000),
        )
        for i in range(num_rows)
    ]


def imbalance(loads: list[int]) -> float:
    """Fullest over mean; 1 is perfect."""
    return round(max(loads) / (sum(loads) / len(loads)), 5)


def plan_figures(num_rows: int, mini_batches: int, ranks: int) -> dict[str, Any]:
    rows = rows_of(num_rows)
    schedule = Schedule(
        num_mini_batches=mini_batches,
        num_ranks=ranks,
        rollouts_per_mini_batch=GROUPS * GROUP_SIZE // mini_batches,
        max_row_tokens=32_000,
    )
    began = time.perf_counter()
    planned = plan(rows, schedule)
    seconds = time.perf_counter() - began
    loads = [[_tokens(planned, rows, r, j) for r in range(ranks)] for j in range(mini_batches)]
    return {
        "rows": num_rows,
        "mini_batches": mini_batches,
        "ranks": ranks,
        "steps": planned.num_steps,
        "steps_of_fixed_rows": -(-num_rows // schedule.rollouts_per_mini_batch),
        "padding_rows": planned.num_padding,
        "tokens_of_mini_batches": imbalance([sum(load) for load in loads]),
        "tokens_of_ranks": max(imbalance(load) for load in loads),
        "seconds": round(seconds, 4),
    }


def _tokens(planned: Plan, rows: list[PlanRow], rank: int, mini_batch: int) -> int:
    members = planned.slice(rank, mini_batch)
    return sum(rows[i].num_tokens for i in members if i is not None)


def update_figures(model: Path, row_counts: list[int]) -> list[dict[str, Any]]:
    """Seconds of an update, a checkpoint and a publication on this machine."""
    from turnfold.trainer import checkpoints, config, weights
    from turnfold.trainer.backends import environment

    is_gpu = environment.prepare("auto")
    run = RunConfig(groups_per_batch=GROUPS, group_size=GROUP_SIZE, max_row_tokens=2048)
    mini_batch = f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS // 4}"
    composed = config.compose([mini_batch], run, model=str(model), is_gpu=is_gpu)
    schedule = config.check(composed, run, is_gpu=is_gpu)

    from turnfold.trainer.backend import TrainerBackend

    backend = TrainerBackend(composed, is_gpu=is_gpu)
    figures = []
    for num_rows in row_counts:
        rng = np.random.default_rng(0)
        rows = [_train_row(i, rng) for i in range(num_rows)]
        planned = plan([r.size for r in rows], schedule)
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            state = checkpoints.State(run_id="bench", batch=1, config_digest="")
            marks = [time.perf_counter()]
            metrics = backend.update(rows, planned)
            marks.append(time.perf_counter())
            checkpoints.write(root / "checkpoints", state, backend.save)
            marks.append(time.perf_counter())
            weights.write(root / "weights", 1, backend.weights(), model_dir=model, dtype="float32")
            marks.append(time.perf_counter())
        update, checkpoint, publish = np.diff(marks).round(3).tolist()
        figures.append(
            {
                "rows": num_rows,
                "steps": metrics["actor/optimizer_steps"],
                "update_s": update,
                "checkpoint_s": checkpoint,
                "publish_s": publish,
            }
        )
    return figures


def _train_row(index: int, rng: np.random.Generator) -> TrainRow:
    length = int(rng.integers(20, 60))
    mask = [0] * 8 + [1] * (length - 8)
    made = row(rng.integers(3, 64, length).tolist(), mask)
    group = f"g{index % GROUPS}"
    return TrainRow(f"{group}-{index}", group, made, float(rng.normal()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="Directory of a small model to update.")
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 1536])
    options = parser.parse_args()
    figures: dict[str, Any] = {
        "plan": [plan_figures(n, *shape) for n in options.rows for shape in SHAPES]
    }
    if options.model:
        with redirect_stdout(sys.stderr):  # verl talks while it builds
            figures["update"] = update_figures(options.model, options.rows)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

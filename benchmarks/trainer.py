"""Planning and updating: steps, padding, balance and seconds for batches of many shapes.

    python benchmarks/trainer.py                                  plans only, a second
    python benchmarks/trainer.py --verl                           also against verl's own balancing
    python benchmarks/trainer.py --model DIR --rows 512 1536      also updates a real model

`turnfold tiny-model DIR` makes such a model. Prints one JSON object; seconds of an update are those
of the CPU, in one thread, so that others on the machine do not count. `steps_of_fixed_rows` is what a mini-batch of a fixed number of rows would
take, for comparison. `tree` and `linear` are the same rollouts: as a row per turn, each with all of
its context, and as one row.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
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
TURNS, TURN_TOKENS = 4, 24
"""Turns of a rollout and tokens of a turn, half of them sampled."""


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


def schedule_of(mini_batches: int, ranks: int) -> Schedule:
    return Schedule(
        num_mini_batches=mini_batches,
        num_ranks=ranks,
        rollouts_per_mini_batch=GROUPS * GROUP_SIZE // mini_batches,
        max_row_tokens=32_000,
    )


def imbalance(loads: Sequence[int]) -> float:
    """Fullest over mean; 1 is perfect."""
    return round(max(loads) / (sum(loads) / len(loads)), 5)


def plan_figures(num_rows: int, mini_batches: int, ranks: int) -> dict[str, Any]:
    rows, schedule = rows_of(num_rows), schedule_of(mini_batches, ranks)
    began = time.perf_counter()
    planned = plan(rows, schedule)
    seconds = time.perf_counter() - began
    return {
        "rows": num_rows,
        "mini_batches": mini_batches,
        "ranks": ranks,
        "steps": planned.num_steps,
        "steps_of_fixed_rows": -(-num_rows // schedule.rollouts_per_mini_batch),
        "padding_rows": planned.num_padding,
        **balance(planned, rows),
        "seconds": round(seconds, 4),
    }


def balance(planned: Plan, rows: Sequence[PlanRow]) -> dict[str, Any]:
    """Token balance, and groups whose rows are in more than one mini-batch.

    A step takes as long as its fullest rank: `slowdown` is the sum over the mini-batches of that
    rank's tokens, against the same tokens spread evenly.
    """
    schedule = planned.schedule
    slices = [
        [planned.slice(r, j) for r in range(schedule.num_ranks)]
        for j in range(schedule.num_mini_batches)
    ]
    loads = [[sum(rows[i].num_tokens for i in s if i is not None) for s in m] for m in slices]
    homes: dict[str, set[int]] = {}
    for j, members in enumerate(slices):
        for i in (i for s in members for i in s if i is not None):
            homes.setdefault(rows[i].group_id, set()).add(j)
    even = sum(map(sum, loads)) / schedule.num_ranks
    return {
        "tokens_of_mini_batches": imbalance([sum(load) for load in loads]),
        "tokens_of_ranks": max(imbalance(load) for load in loads),
        "slowdown": round(sum(map(max, loads)) / even, 5),
        "groups_torn_apart": sum(len(home) > 1 for home in homes.values()),
    }


def verl_figures(num_rows: int, mini_batches: int, ranks: int) -> dict[str, Any]:
    """Our plan and verl's own balancing on the same padded rows.

    verl spreads all rows of a batch over the ranks by their workload; each rank then cuts its rows
    into mini-batches as they come.
    """
    import torch
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    def figures(planned: Plan) -> dict[str, Any]:
        """`workload_slowdown` is `slowdown` by what verl thinks that a row costs."""
        cost = calculate_workload(torch.tensor([r.num_tokens for r in rows])).tolist()
        costs = [
            PlanRow(group_id=r.group_id, num_tokens=int(c)) for r, c in zip(rows, cost, strict=True)
        ]
        found = balance(planned, costs)["slowdown"]
        return balance(planned, rows) | {"workload_slowdown": found}

    rows, schedule = rows_of(num_rows), schedule_of(mini_batches, ranks)
    padding = -num_rows % schedule.row_multiple
    lengths = torch.tensor([r.num_tokens for r in rows] + [2] * padding)
    began = time.perf_counter()
    parts = get_seqlen_balanced_partitions(
        calculate_workload(lengths), k_partitions=ranks, equal_size=True
    )
    seconds = time.perf_counter() - began
    order = tuple(i if i < num_rows else None for part in parts for i in part)
    theirs = Plan(schedule=schedule, order=order, num_rows=num_rows)
    return {
        "rows": num_rows,
        "mini_batches": mini_batches,
        "ranks": ranks,
        "turnfold": figures(plan(rows, schedule)),
        "verl": figures(theirs) | {"seconds": round(seconds, 4)},
    }


class Bench:
    """A model on this machine, with a schedule of 4 mini-batches."""

    def __init__(self, model: Path) -> None:
        from turnfold.trainer import config
        from turnfold.trainer.backend import TrainerBackend
        from turnfold.trainer.backends import environment

        is_gpu = environment.prepare("auto")
        run = RunConfig(groups_per_batch=GROUPS, group_size=GROUP_SIZE, max_row_tokens=2048)
        mini_batch = f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS // 4}"
        composed = config.compose([mini_batch], run, model=str(model), is_gpu=is_gpu)
        self.model = model
        self.schedule = config.check(composed, run, is_gpu=is_gpu)
        self.backend = TrainerBackend(composed, is_gpu=is_gpu)

    def update(self, rows: Sequence[TrainRow]) -> dict[str, Any]:
        planned = plan([r.size for r in rows], self.schedule)
        began = time.process_time()
        metrics = self.backend.update(rows, planned)
        return {
            "rows": len(rows),
            "tokens": sum(len(r.row.token_ids) for r in rows),
            "steps": metrics["actor/optimizer_steps"],
            "cpu_s": round(time.process_time() - began, 3),
        }

    def publish(self) -> dict[str, Any]:
        """Seconds from the last step to published weights: training waits (`take`), then not (`keep`).

        By the clock, for most of it is waiting for the disk.
        """
        from turnfold.trainer import checkpoints, weights

        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory)
            state = checkpoints.State(run_id="bench", batch=1, config_digest="")
            publication = weights.Publication(
                root=root / "weights", version=1, model_dir=self.model, dtype="float32"
            )
            marks = [time.perf_counter()]
            draft = checkpoints.begin(root / "checkpoints", 1)
            self.backend.save(draft / "actor")
            kept = self.backend.snapshot("float32")
            marks.append(time.perf_counter())
            checkpoints.commit(root / "checkpoints", state, draft)
            weights.write(publication, kept.items())
            marks.append(time.perf_counter())
        take, keep = np.diff(marks).round(3).tolist()
        return {"take_s": take, "keep_s": keep}


def update_figures(model: Path, row_counts: list[int]) -> dict[str, Any]:
    bench = Bench(model)
    rng = np.random.default_rng(0)
    bench.update([_train_row(i, rng) for i in range(GROUPS)])  # warm-up
    rollouts = [_linear_row(i, rng) for i in range(128)]
    return {
        "rows": [bench.update([_train_row(i, rng) for i in range(n)]) for n in row_counts],
        "linear": bench.update(rollouts),
        "tree": bench.update([part for rollout in rollouts for part in _tree_rows(rollout)]),
        "publish": bench.publish(),
    }


def _train_row(index: int, rng: np.random.Generator) -> TrainRow:
    length = int(rng.integers(20, 60))
    mask = [0] * 8 + [1] * (length - 8)
    made = row(rng.integers(3, 64, length).tolist(), mask)
    group = f"g{index % GROUPS}"
    return TrainRow(f"{group}-{index}", group, made, float(rng.normal()))


def _linear_row(index: int, rng: np.random.Generator) -> TrainRow:
    half = TURN_TOKENS // 2
    mask = ([0] * half + [1] * half) * TURNS
    made = row(rng.integers(3, 64, len(mask)).tolist(), mask)
    group = f"g{index % GROUPS}"
    return TrainRow(f"{group}-{index}", group, made, float(rng.normal()))


def _tree_rows(linear: TrainRow) -> list[TrainRow]:
    """A row per turn: all tokens up to its end, of which its own are trained."""
    rows = []
    for turn in range(TURNS):
        end, half = (turn + 1) * TURN_TOKENS, TURN_TOKENS // 2
        mask = [0] * (end - half) + [1] * half
        made = row(linear.row.token_ids.tolist()[:end], mask)
        rows.append(TrainRow(linear.rollout_id, linear.group_id, made, linear.advantage))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Directory of a small model to update.")
    parser.add_argument("--verl", action="store_true", help="Compare with verl's own balancing.")
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 1536])
    options = parser.parse_args()
    figures: dict[str, Any] = {
        "plan": [plan_figures(n, *shape) for n in options.rows for shape in SHAPES]
    }
    with redirect_stdout(sys.stderr):  # verl talks while it builds
        if options.verl:
            from turnfold.trainer.backends import environment

            environment.prepare("auto")
            figures["balance"] = [verl_figures(n, *s) for n in options.rows for s in SHAPES]
        if options.model:
            figures["update"] = update_figures(options.model, options.rows)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()

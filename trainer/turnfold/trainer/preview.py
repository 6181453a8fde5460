"""What a configuration does to batches of various shapes, for `turnfold train --dry-run`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from turnfold.schemas.run import RunConfig
from turnfold.trainer.plan import PlanRow, Schedule, plan

Line = tuple[str, int, int, int, int, int]
"""Rows a rollout, rows, padding, rows a mini-batch, rows of it a rank, optimizer steps."""


def preview(run: RunConfig, schedule: Schedule) -> list[Line]:
    """Rollouts of one row, of two, of three, and of one to three in turn."""
    shapes = {"1": [1], "2": [2], "3": [3], "1, 2, 3 in turn": [1, 2, 3]}
    return [_line(name, shape, run, schedule) for name, shape in shapes.items()]


def _line(name: str, shape: Sequence[int], run: RunConfig, schedule: Schedule) -> Line:
    num_rollouts = run.groups_per_batch * run.group_size
    rows = [
        PlanRow(group_id=str(rollout // run.group_size), num_tokens=schedule.max_row_tokens // 2)
        for rollout in range(num_rollouts)
        for _ in range(shape[rollout % len(shape)])
    ]
    planned = plan(rows, schedule)
    per_mini_batch = schedule.rows_per_step(len(planned.order))
    per_rank = per_mini_batch // schedule.num_ranks
    return (
        name,
        planned.num_rows,
        planned.num_padding,
        per_mini_batch,
        per_rank,
        planned.num_steps,
    )

"""What a configuration does to batches: of various shapes for `turnfold train --dry-run`, to the rows
of one batch for `turnfold train explain`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnfold.schemas.run import RunConfig
from turnfold.schemas.wire import Wire
from turnfold.trainer.plan import Plan, PlanRow, Schedule, plan
from turnfold.trainer.rows import TrainRow

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


class PlacedRow(Wire, frozen=True, kw_only=True):
    """Where a row of a batch goes: it is trained in this mini-batch of every epoch."""

    mini_batch: int
    rank: int
    row: TrainRow


class MiniBatch(Wire, frozen=True, kw_only=True):
    """Sizes of one mini-batch over all ranks."""

    number: int
    steps: tuple[int, ...]
    """Optimizer steps of the batch that it is, counted from 1: one in every epoch."""
    groups: int
    rollouts: int
    rows: int
    padding: int
    tokens: int
    trained_tokens: int
    fullest_rank: float
    """Tokens of the fullest rank over the mean; 1 is perfect."""


def placed(rows: Sequence[TrainRow], planned: Plan) -> list[PlacedRow]:
    """Every row with its place, in the order in which they are trained."""
    schedule = planned.schedule
    return [
        PlacedRow(mini_batch=j, rank=r, row=rows[index])
        for j in range(schedule.num_mini_batches)
        for r in range(schedule.num_ranks)
        for index in planned.slice(r, j)
        if index is not None
    ]


def mini_batches(rows: Sequence[TrainRow], planned: Plan) -> list[MiniBatch]:
    """A summary of every mini-batch."""
    schedule = planned.schedule
    return [
        _mini_batch(j, [p for p in placed(rows, planned) if p.mini_batch == j], planned)
        for j in range(schedule.num_mini_batches)
    ]


def _mini_batch(number: int, members: Sequence[PlacedRow], planned: Plan) -> MiniBatch:
    schedule = planned.schedule
    per_rank = [0] * schedule.num_ranks
    for member in members:
        per_rank[member.rank] += len(member.row.row.token_ids)
    tokens = sum(per_rank)
    epochs = range(schedule.num_epochs)
    return MiniBatch(
        number=number,
        steps=tuple(epoch * schedule.num_mini_batches + number + 1 for epoch in epochs),
        groups=len({m.row.group_id for m in members}),
        rollouts=len({m.row.rollout_id for m in members}),
        rows=len(members),
        padding=schedule.rows_per_step(len(planned.order)) - len(members),
        tokens=tokens,
        trained_tokens=sum(m.row.row.num_trained for m in members),
        fullest_rank=max(per_rank) * schedule.num_ranks / tokens if tokens else 1.0,
    )

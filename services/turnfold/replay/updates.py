"""Which optimizer steps a row went into: the trainer's plan, made again. Pure.

The plan is a function of the row lengths of a batch and of the schedule, which the trainer writes
into `PolicyPublished`, so a step needs no record of its own:

    2 mini-batches, 2 epochs        row in mini-batch 1 (the second)
    steps of the batch              1 2 | 3 4      →  2 and 4
    steps of the run, batch 5       4 x 4 before   →  18 and 20
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from turnfold.schemas.batches import BatchCut
from turnfold.schemas.errors import UserError
from turnfold.schemas.policies import PolicyPublished, UpdateSchedule
from turnfold.trainer.plan import PlanRow, Schedule, plan, schedule

RowLengths = Mapping[str, Sequence[int]]
"""Tokens of each row, by rollout_id."""

_NO_LIMIT = 2**31


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer was told besides the RunConfig, for a log that does not say it.

    None is what the log says or, where it says nothing, the trainer's own default.
    """

    groups_per_mini_batch: int | None = None
    """verl: actor_rollout_ref.actor.ppo_mini_batch_size; by default the whole batch."""
    num_epochs: int | None = None
    """verl: actor_rollout_ref.actor.ppo_epochs; by default 1."""
    num_ranks: int | None = None
    """Data-parallel ranks; by default 1."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a row was trained."""

    mini_batch: int
    """Counted from 0."""
    num_mini_batches: int
    rank: int
    steps: tuple[int, ...]
    """Optimizer steps within the batch, counted from 1; one for each epoch."""
    run_steps: tuple[int, ...]
    """The same steps counted over the run, from 1."""


def schedule_of(cut: BatchCut, sizes: Sizes, logged: UpdateSchedule | None = None) -> Schedule:
    """The schedule of a batch: what the trainer logged, and `sizes` for what it did not log.

    Raises UserError when the manifest does not say its configuration, when the logged mini-batches
    do not divide it, or when `sizes` says something else than the log.
    """
    if cut.config is None:
        raise UserError(
            f"batch {cut.index} does not name its run configuration, so its mini-batches are not "
            "known: it was cut by an older version"
        )
    groups_per_batch = cut.config.groups_per_batch
    if logged is not None:
        sizes = _logged_sizes(cut, groups_per_batch, sizes, logged)
    return schedule(
        groups_per_batch=groups_per_batch,
        groups_per_mini_batch=sizes.groups_per_mini_batch or groups_per_batch,
        group_size=cut.config.group_size,
        num_epochs=sizes.num_epochs or 1,
        num_ranks=sizes.num_ranks or 1,
        max_row_tokens=_NO_LIMIT,
    )


def _logged_sizes(
    cut: BatchCut, groups_per_batch: int, given: Sizes, logged: UpdateSchedule
) -> Sizes:
    if logged.num_mini_batches < 1 or groups_per_batch % logged.num_mini_batches:
        raise UserError(
            f"batch {cut.index}: the trainer logged {logged.num_mini_batches} mini-batches, which "
            f"do not divide the {groups_per_batch} groups of the manifest's configuration"
        )
    found = Sizes(
        groups_per_mini_batch=groups_per_batch // logged.num_mini_batches,
        num_epochs=logged.epochs,
        num_ranks=logged.ranks,
    )
    for name in Sizes.__struct_fields__:
        was_given, is_logged = getattr(given, name), getattr(found, name)
        if was_given is not None and was_given != is_logged:
            raise UserError(
                f"batch {cut.index}: {name} {was_given} was given, but the trainer logged "
                f"{is_logged}; leave the option out"
            )
    return found


def check_steps(schedule: Schedule, published: PolicyPublished | None) -> None:
    """Raise UserError when the trainer took another number of steps than these sizes give."""
    taken = published.metrics.get("optimizer_steps") if published else None
    if published is not None and taken is not None and int(taken) != schedule.num_steps:
        raise UserError(
            f"the trainer took {taken:.0f} optimizer steps for batch {published.policy_version}, "
            f"these sizes give {schedule.num_steps} ({schedule.num_mini_batches} mini-batches x "
            f"{schedule.num_epochs} epochs): give its ppo_mini_batch_size and ppo_epochs with "
            "--groups-per-mini-batch and --epochs"
        )


def placements(
    cut: BatchCut, lengths: RowLengths, schedule: Schedule
) -> dict[tuple[str, int], Placement]:
    """Where each row of a batch was trained, by rollout_id and row index.

    `lengths` names every rollout of the manifest.
    """
    keys, rows = [], []
    for group in cut.groups:
        for ref in group.rollouts:
            for index, num_tokens in enumerate(lengths[ref.rollout_id]):
                keys.append((ref.rollout_id, index))
                rows.append(PlanRow(group_id=group.group_id, num_tokens=num_tokens))
    planned = plan(rows, schedule)
    return {
        keys[row]: _placement(cut, schedule, mini_batch, rank)
        for rank in range(schedule.num_ranks)
        for mini_batch in range(schedule.num_mini_batches)
        for row in planned.slice(rank, mini_batch)
        if row is not None
    }


def _placement(cut: BatchCut, schedule: Schedule, mini_batch: int, rank: int) -> Placement:
    count = schedule.num_mini_batches
    steps = tuple(epoch * count + mini_batch + 1 for epoch in range(schedule.num_epochs))
    before = (cut.index - 1) * schedule.num_steps
    return Placement(
        mini_batch=mini_batch,
        num_mini_batches=count,
        rank=rank,
        steps=steps,
        run_steps=tuple(before + step for step in steps),
    )

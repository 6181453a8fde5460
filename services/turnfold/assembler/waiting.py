"""Who an assembler that takes no decision waits for, in words. Pure."""

from __future__ import annotations

from turnfold.assembler.cut import is_too_early
from turnfold.assembler.groups import Group, GroupsState
from turnfold.schemas.batches import BatchCut

_MAX_NAMED = 3


def awaited(
    state: GroupsState, held: BatchCut | None, now: float, published: int, max_ahead: int | None
) -> str:
    """One line that names the party that everything waits for, and since when.

        batch 7 is ready, and the trainer has published version 4: waiting for the trainer
        batch 7 waits for group run-000031, dispatched 312 s ago: run-000031-04 has not ended
        batch 7 needs 8 groups, 3 have ended: waiting for the dispatcher, no group is running

    `held` is the cut that has been put off, when there is one.
    """
    if held is not None and is_too_early(held, published, max_ahead):
        return (
            f"batch {held.index} is ready, and the trainer has published version {published}: "
            "waiting for the trainer"
        )
    slowest = next(state.running(now), None)
    if held is not None and slowest is not None:
        return f"batch {held.index} is ready and waits for {_named(slowest, now)}"
    index, num_done = state.next_index, state.num_complete
    if num_done >= state.config.groups_per_batch:
        return (
            f"batch {index}: {num_done} groups have ended that newer versions have sampled: "
            "waiting for the batches before it"
        )
    needs = f"batch {index} needs {state.config.groups_per_batch} groups, {num_done} have ended"
    if slowest is None:
        return f"{needs}: waiting for the dispatcher, no group is running"
    return f"{needs}: waiting for {_named(slowest, now)}"


def _named(group: Group, now: float) -> str:
    assert group.task is not None, f"group {group.group_id} runs without a task"
    ended = {rollout.index for rollout in group.rollouts.values()}
    missing = [f"{group.group_id}-{i:02d}" for i in range(group.task.n) if i not in ended]
    shown = ", ".join(missing[:_MAX_NAMED])
    if len(missing) > _MAX_NAMED:
        shown += f" and {len(missing) - _MAX_NAMED} more"
    verb = "has" if len(missing) == 1 else "have"
    since = f", dispatched {now - group.task.dispatched_at:.0f} s ago" * (
        group.task.dispatched_at > 0
    )
    return f"group {group.group_id}{since}: {shown} {verb} not ended"

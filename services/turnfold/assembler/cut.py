"""The next decision of the assembler: cut a batch, drop a group, or wait. Pure.

    groups by dispatch    0 done   1 running   2 done   3 done   4 done        groups_per_batch = 2
    decisions             cut 1: [0, 2]        cut 2: [3, 4]     then wait for group 1

An older group that is still running blocks nobody; it goes into a later batch while its staleness
allows. Batch b trains on top of version b - 1, so the staleness of a rollout in it is
b - 1 - min_policy_version, exactly, whether it waited in flight or in a queue.
"""

from __future__ import annotations

import heapq
from collections import Counter

import msgspec

from turnfold.assembler.groups import NEVER, Group, GroupsState
from turnfold.assembler.rollouts import RolloutSummary, reason_to_leave_out
from turnfold.schemas.batches import BatchCut, GroupDropped, GroupRef, LeftOut
from turnfold.schemas.decisions import group_ids
from turnfold.schemas.run import RunConfig


class Wait(msgspec.Struct, frozen=True):
    """Nothing to decide before new records arrive, or before the time `until`."""

    until: float | None = None


def decide(state: GroupsState, config: RunConfig, now: float) -> BatchCut | GroupDropped | Wait:
    """One decision. A function of the log up to `state.positions`, of the decisions before it, of
    the configuration and of `now`, which the decision records: a replay finds the same bytes.

    Closed groups (complete, or past their deadline) are taken oldest dispatched first. The first
    one that cannot be trained is dropped; as soon as `groups_per_batch` can be, they are cut.
    """
    assert config == state.config, "decide with the configuration that the state was made with"
    ready: list[GroupRef] = []
    closed = heapq.merge(state.complete(), state.overdue(now), key=lambda group: group.order)
    for group in closed:
        rollouts, left_out = survivors(group, config)
        reason = _reason_to_drop(group, rollouts, state.next_index, config)
        if reason is not None:
            return _dropped(state, config, now, group, reason, rollouts, left_out)
        if max(rollout.max_policy_version for rollout in rollouts) >= state.next_index:
            continue  # sampled by a version that this batch has yet to make
        ready.append(_group_ref(group, rollouts, left_out))
        if len(ready) == config.groups_per_batch:
            return _cut(state, config, now, ready)
    return Wait(state.next_deadline(now))


def is_too_early(cut: BatchCut, published: int, max_ahead: int | None) -> bool:
    """Whether nobody needs this batch yet, so that it had better be cut later.

    The trainer has published version `published` and works on the batch after it; `max_ahead` more
    are wanted on top. Cutting earlier would fill batches with quick groups only, and use up the
    staleness that slow ones are allowed. None cuts at once.
    """
    return max_ahead is not None and cut.index > published + 1 + max_ahead


def strands_running(state: GroupsState, cut: BatchCut, now: float) -> bool:
    """Whether this cut had better wait for a group that still runs.

    A group sampled by version v can be trained in batches up to v + max_staleness + 1. A cut that
    leaves more groups than there are seats in the batches up to their last one makes some of them
    stale, and always slow ones. With groups_per_batch 2 and max_staleness 1, for batch 2 and the
    versions of the groups that it leaves:

        0 running                   its last batch is 2: wait
        0 complete                  waiting does not help: cut
        1 running, 1 and 1 done     three groups for the two seats of batch 3: wait
        1 running, 1 done           both fit into batch 3: cut

    No wait is longer than until the deadline of the group.
    """
    left, running = _groups_left(state, cut, now)
    num_left = num_running = 0
    for last in sorted(left):
        num_left += left[last]
        num_running += running[last]
        if num_running and num_left > (last - cut.index) * state.config.groups_per_batch:
            return True
    return False


def decide_early(state: GroupsState, config: RunConfig, now: float) -> GroupDropped | None:
    """Drop a group that still runs and that no batch can hold, whatever becomes of it.

    Its task comes back sooner, and workers stop what is no longer wanted. `decide` would drop it
    for the same reason when it closes; the decision says that it is early (`is_early`), so that a
    replay knows which of the two to take again.
    """
    assert config == state.config, "decide with the configuration that the state was made with"
    group = state.doomed()
    if group is None or group.standing is None:
        return None
    rollouts, left_out = survivors(group, config)
    reason = "too_few_survivors" if group.standing.last_batch == NEVER else "stale"
    dropped = _dropped(state, config, now, group, reason, rollouts, left_out)
    return msgspec.structs.replace(dropped, is_early=True)


def survivors(group: Group, config: RunConfig) -> tuple[list[RolloutSummary], list[LeftOut]]:
    """The rollouts of a closed group that are trained, by slot, and why the others are not."""
    ended = sorted(group.rollouts.values(), key=lambda rollout: (rollout.index, rollout.rank))
    winners = _winners(group, ended)
    trained: list[RolloutSummary] = []
    left_out: list[LeftOut] = []
    for rollout in ended:
        reason = reason_to_leave_out(rollout, config)
        if reason is None and rollout.rollout_id not in winners:
            reason = "superseded"
        if reason is None and group.task is not None and not 0 <= rollout.index < group.task.n:
            reason = "no_such_slot"
        if reason is None and group.task is None and len(trained) == config.group_size:
            reason = "surplus"
        if reason is None:
            trained.append(rollout)
        else:
            left_out.append(LeftOut(rollout_id=rollout.rollout_id, reason=reason))
    return trained, left_out + _unfinished(group)


def staleness(rollouts: list[RolloutSummary], index: int) -> int:
    """Versions between the oldest sampled token and the policy that batch `index` trains."""
    return index - 1 - min(rollout.min_policy_version for rollout in rollouts)


def _groups_left(
    state: GroupsState, cut: BatchCut, now: float
) -> tuple[Counter[int], Counter[int]]:
    """Dispatched groups that a cut leaves, and of these the running ones, by their last batch."""
    left, running = Counter[int](), Counter[int]()

    def last_batch(version: int) -> int:
        return max(cut.index, version + state.config.max_staleness + 1)

    for version, num_open, num_running in state.seats_taken():
        left[last_batch(version)] += num_open
        running[last_batch(version)] += num_running
    in_batch = [state.open[group_id] for group_id in group_ids(cut)]
    for group in in_batch:
        if group.standing is not None:
            left[last_batch(group.standing.oldest_version)] -= 1
    names = {group.group_id for group in in_batch}
    late = (group for group in state.overdue(now) if group.group_id not in names)
    for group in (*in_batch, *late):
        if group.standing is not None and group.standing.is_open:
            running[last_batch(group.standing.oldest_version)] -= 1
    return left, running


def _winners(group: Group, ended: list[RolloutSummary]) -> set[str]:
    """Of the rollouts of one slot the first that completed counts; without a task all count."""
    if group.task is None:
        return {rollout.rollout_id for rollout in ended}
    first: dict[int, str] = {}
    for rollout in ended:
        if rollout.is_completed:
            first.setdefault(rollout.index, rollout.rollout_id)
    return set(first.values())


def _unfinished(group: Group) -> list[LeftOut]:
    """Slots without a trajectory, under the name that the agents' worker gives their rollout."""
    if group.task is None:
        return []
    ended = {rollout.index for rollout in group.rollouts.values()}
    return [
        LeftOut(rollout_id=f"{group.group_id}-{index:02d}", reason="not_finished")
        for index in range(group.task.n)
        if index not in ended
    ]


def _reason_to_drop(
    group: Group, rollouts: list[RolloutSummary], index: int, config: RunConfig
) -> str | None:
    if len(rollouts) < config.min_group_size:
        is_complete = group.is_complete(config.group_size)
        return "too_few_survivors" if is_complete else "group_timeout"
    if config.on_stale == "drop" and staleness(rollouts, index) > config.max_staleness:
        return "stale"
    if config.is_zero_variance_dropped and len({rollout.reward for rollout in rollouts}) == 1:
        return "zero_variance"
    return None


def _group_ref(group: Group, rollouts: list[RolloutSummary], left_out: list[LeftOut]) -> GroupRef:
    return GroupRef(
        group_id=group.group_id,
        task_id=group.task_id,
        dispatch_index=group.dispatch_index,
        rollouts=tuple(rollout.ref() for rollout in rollouts),
        left_out=tuple(left_out),
    )


def _cut(state: GroupsState, config: RunConfig, now: float, ready: list[GroupRef]) -> BatchCut:
    return BatchCut(
        run_id=config.run_id,
        index=state.next_index,
        groups=tuple(ready),
        positions=state.positions,
        at=now,
        config_digest=config.digest,
        config=config,
    )


def _dropped(
    state: GroupsState,
    config: RunConfig,
    now: float,
    group: Group,
    reason: str,
    rollouts: list[RolloutSummary],
    left_out: list[LeftOut],
) -> GroupDropped:
    not_trained = [LeftOut(rollout_id=r.rollout_id, reason=reason) for r in rollouts]
    return GroupDropped(
        run_id=config.run_id,
        group_id=group.group_id,
        dispatch_index=group.dispatch_index,
        reason=reason,
        left_out=tuple(not_trained + left_out),
        positions=state.positions,
        at=now,
        config_digest=config.digest,
        config=config,
    )

"""What must hold after a disturbed run, and what does not. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from turnfold.schemas.batches import BatchCut, Decision
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.decisions import DecisionLog, group_ids
from turnfold.schemas.events import Event, RolloutFinished, TurnCompleted
from turnfold.schemas.tasks import Task
from turnfold.schemas.trajectories import Trajectory
from turnfold.schemas.wire import Wire

AGAIN_HEADER = "chaos-again"
"""Header of the records that were appended a second time on purpose."""

Outcome = tuple[float | None, tuple[tuple[bytes, bytes, bytes], ...]]
"""The reward, and token ids, mask and logprobs of each row."""


class Left(Wire, frozen=True, kw_only=True):
    """What a run left behind in the log and elsewhere."""

    acknowledged_turns: tuple[tuple[str, str], ...] = ()
    """(rollout_id, turn_id) of every answer that an agent got."""
    acknowledged_rewards: tuple[tuple[str, float], ...] = ()
    """(rollout_id, reward) of every rollout whose end was confirmed to its agent."""
    events: tuple[Event, ...]
    trajectories: tuple[Trajectory, ...]
    decisions: tuple[Decision, ...]
    tasks: tuple[Task, ...] = ()
    dead_letters: tuple[DeadLetter, ...] = ()
    num_rows: int = 1
    """Rows of the data set."""
    undisturbed: frozenset[str]
    """Rollouts whose trajectory was written before the first fault."""
    max_staleness: int
    num_batches_trained: int
    num_steps: int
    """Optimizer steps that the trainer's checkpoint counts."""
    num_steps_a_batch: int


def lost_turns(left: Left) -> list[str]:
    """Answers that arrived at an agent and are not in the log exactly once."""
    ids: dict[tuple[str, str], set[str]] = defaultdict(set)
    for event in left.events:
        if isinstance(event, TurnCompleted):
            # Events that were delivered again are one fact: they repeat their event_id.
            ids[event.rollout_id, event.turn_id].add(event.event_id)
    return [
        f"rollout {rollout_id}, turn {turn_id}: acknowledged, {len(ids[rollout_id, turn_id])} in "
        "the log"
        for rollout_id, turn_id in left.acknowledged_turns
        if len(ids[rollout_id, turn_id]) != 1
    ]


def lost_rewards(left: Left) -> list[str]:
    """Rewards that were confirmed to an agent and are not in the log."""
    logged = {
        (event.rollout_id, event.reward)
        for event in left.events
        if isinstance(event, RolloutFinished)
    }
    return [
        f"rollout {rollout_id}: reward {reward} acknowledged, not in the log"
        for rollout_id, reward in left.acknowledged_rewards
        if (rollout_id, reward) not in logged
    ]


def num_resampled(left: Left) -> int:
    """Requests that the log holds more than one answer to.

    A gateway that was told neither yes nor no by the log asks the engine again when the request is
    repeated; the turn that no agent saw is then an orphan.
    """
    turns: dict[tuple[str, str], set[str]] = defaultdict(set)
    for event in left.events:
        if isinstance(event, TurnCompleted):
            turns[event.rollout_id, event.idempotency_key].add(event.turn_id)
    return sum(len(ids) > 1 for ids in turns.values())


def doubled(left: Left) -> list[str]:
    """Trajectories, manifests and groups that are there more than once, or not in order."""
    written = Counter((t.rollout_id, t.revision) for t in left.trajectories)
    found = [f"trajectory {key} was written {n} times" for key, n in written.items() if n > 1]
    accepted = _accepted(left.decisions)
    if len(accepted) != len(left.decisions):
        found.append(f"{len(left.decisions) - len(accepted)} decisions were made twice")
    cuts = [decision for decision in accepted if isinstance(decision, BatchCut)]
    rollouts = Counter(
        ref.rollout_id for cut in cuts for group in cut.groups for ref in group.rollouts
    )
    found += [f"rollout {name} is in {n} batches" for name, n in rollouts.items() if n > 1]
    indices = [cut.index for cut in cuts]
    if indices != list(range(1, len(indices) + 1)):
        found.append(f"batches were cut as {indices}")
    return found


def unequal_rows(left: Left) -> list[str]:
    """Rollouts whose reward or rows are not those of their task before the first fault.

    Engine and agent are functions of the prompt, of the task and of the place in the group. So an
    undisturbed run gives rollout 2 of every group of a task the same tokens, masks, logprobs and
    reward; a disturbed one must as well, or abort it.
    """
    completed = [t for t in left.trajectories if t.status == "completed"]
    expected: dict[tuple[str, int], Outcome] = {}
    for trajectory in completed:
        if trajectory.rollout_id in left.undisturbed:
            expected.setdefault((trajectory.task_id, trajectory.index), _outcome(trajectory))
    return [
        f"rollout {trajectory.rollout_id} has other rows or another reward than undisturbed"
        for trajectory in completed
        if _outcome(trajectory) != expected.get((trajectory.task_id, trajectory.index))
    ]


def wrong_tasks(left: Left) -> list[str]:
    """Rows of the data set that were skipped, or dispatched twice in one attempt."""
    attempts = Counter((task.epoch, task.cursor, task.attempt) for task in left.tasks)
    found = [f"task {key} was dispatched {n} times" for key, n in attempts.items() if n > 1]
    found += [
        f"attempt {attempt} at task {epoch, cursor} follows no attempt {attempt - 1}"
        for epoch, cursor, attempt in attempts
        if attempt > 0 and (epoch, cursor, attempt - 1) not in attempts
    ]
    first = sorted((epoch, cursor) for epoch, cursor, attempt in attempts if attempt == 0)
    expected = [divmod(number, left.num_rows) for number in range(len(first))]
    found += [f"task {place} was skipped" for place in sorted({*expected} - {*first})]
    indices = sorted(task.dispatch_index for task in left.tasks)
    if indices != list(range(len(indices))):
        found.append(f"groups were counted as {indices}")
    return found


def lost_groups(left: Left) -> list[str]:
    """Groups that were dispatched and are neither decided on nor complete and waiting."""
    decided = {group_id for one in _accepted(left.decisions) for group_id in group_ids(one)}
    ended = Counter(t.group_id for t in left.trajectories if t.revision == 0)
    return [
        f"group {task.group_id}: {ended[task.group_id]} of {task.n} rollouts have ended"
        for task in left.tasks
        if task.group_id not in decided and ended[task.group_id] < task.n
    ]


def refused_records(left: Left) -> list[str]:
    """Records in the dead letters that nobody sent twice.

    An event of a rollout that ended long ago, which the healer has forgotten, goes there when it is
    delivered again.
    """
    return [
        f"{letter.topic}/{letter.partition}@{letter.offset}: {letter.reason}"
        for letter in left.dead_letters
        if AGAIN_HEADER not in dict(letter.headers)
    ]


def beyond_staleness(left: Left) -> list[str]:
    """Rollouts in a batch that are older than allowed, or sampled by a later version."""
    return [
        f"batch {cut.index}, rollout {ref.rollout_id}: versions {ref.min_policy_version} to "
        f"{ref.max_policy_version}"
        for cut in _accepted(left.decisions)
        if isinstance(cut, BatchCut)
        for group in cut.groups
        for ref in group.rollouts
        if cut.policy_version - ref.min_policy_version > left.max_staleness
        or ref.max_policy_version > cut.policy_version
    ]


def wrong_steps(left: Left) -> list[str]:
    """Optimizer steps that are not those of the configuration."""
    expected = left.num_batches_trained * left.num_steps_a_batch
    if left.num_steps == expected:
        return []
    return [
        f"{left.num_steps} optimizer steps for {left.num_batches_trained} batches, not {expected}"
    ]


CHECKS = {
    "acknowledged turns are in the log exactly once": lost_turns,
    "acknowledged rewards are in the log": lost_rewards,
    "no trajectory, batch or rollout is doubled": doubled,
    "rows and rewards are those of the undisturbed run": unequal_rows,
    "no task is skipped and none dispatched twice": wrong_tasks,
    "every group is in a batch, dropped with a reason, or waiting": lost_groups,
    "dead letters are only what was delivered again long after": refused_records,
    "staleness is within its bound": beyond_staleness,
    "optimizer steps are those of the configuration": wrong_steps,
}


def _accepted(decisions: Iterable[Decision]) -> list[Decision]:
    logs: dict[str, DecisionLog] = {}
    return [
        decision
        for decision in decisions
        if logs.setdefault(decision.run_id, DecisionLog(decision.run_id)).add(decision)
    ]


def _outcome(trajectory: Trajectory) -> Outcome:
    rows = tuple(
        (row.token_ids.data, row.loss_mask.data, row.logprobs.data) for row in trajectory.rows
    )
    return trajectory.reward, rows

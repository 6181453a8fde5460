"""What must hold after a disturbed run, and what does not. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from turnfold.schemas.batches import BatchCut, Decision
from turnfold.schemas.decisions import DecisionLog
from turnfold.schemas.events import Event, TurnCompleted
from turnfold.schemas.trajectories import Trajectory
from turnfold.schemas.wire import Wire

Conversation = tuple[tuple[bytes, bytes, bytes], ...]
"""Token ids, mask and logprobs of each row."""


class Left(Wire, frozen=True, kw_only=True):
    """What a run left behind in the log and elsewhere."""

    acknowledged: tuple[tuple[str, str], ...]
    """(rollout_id, turn_id) of every answer that an agent got."""
    events: tuple[Event, ...]
    trajectories: tuple[Trajectory, ...]
    decisions: tuple[Decision, ...]
    num_undisturbed: int
    """Trajectories that were written before the first fault."""
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
        for rollout_id, turn_id in left.acknowledged
        if len(ids[rollout_id, turn_id]) != 1
    ]


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
    """Rollouts whose rows are not those of the same task before the first fault.

    The engine's answer is a function of its prompt, so an undisturbed run gives each rollout of a
    task the same tokens, masks and logprobs; a disturbed one must as well.
    """
    expected: dict[str, Conversation] = {}
    found = []
    for number, trajectory in enumerate(left.trajectories):
        if trajectory.status != "completed":
            continue
        rows = _conversation(trajectory)
        if number < left.num_undisturbed:
            expected.setdefault(trajectory.task_id, rows)
        if rows != expected.get(trajectory.task_id):
            found.append(f"rollout {trajectory.rollout_id} has other rows than undisturbed")
    return found


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
    "no trajectory, batch or rollout is doubled": doubled,
    "rows are those of the undisturbed run": unequal_rows,
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


def _conversation(trajectory: Trajectory) -> Conversation:
    return tuple(
        (row.token_ids.data, row.loss_mask.data, row.logprobs.data) for row in trajectory.rows
    )


class Report(msgspec.Struct, kw_only=True):
    """How a disturbed run went."""

    seed: int
    seconds: float = 0.0
    faults: Counter[str] = msgspec.field(default_factory=Counter)
    num_rollouts: int = 0
    num_ended: Counter[str] = msgspec.field(default_factory=Counter)
    """Trajectories by status."""
    num_acknowledged: int = 0
    num_redelivered: int = 0
    """Events that were appended to the log a second time."""
    num_batches: int = 0
    num_dropped: Counter[str] = msgspec.field(default_factory=Counter)
    """Groups by reason."""
    problems: dict[str, list[str]] = {}
    """What does not hold, by claim; an empty list is a claim that holds."""
    replay: str = ""
    """The verdict of the replay."""

    @property
    def num_faults(self) -> int:
        return self.faults.total()

    def lines(self) -> list[str]:
        """The report for people, as Markdown."""
        ended = ", ".join(f"{n:,} {status}" for status, n in sorted(self.num_ended.items()))
        dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(self.num_dropped.items()))
        return [
            f"seed {self.seed}: {self.num_faults} faults in {self.seconds:.0f} s; "
            f"{self.num_rollouts:,} rollouts ({ended}), {self.num_acknowledged:,} acknowledged "
            f"turns, {self.num_redelivered:,} events delivered again, {self.num_batches} batches, "
            f"groups dropped: {dropped or 'none'}",
            "",
            "| fault | survived |",
            "|---|---:|",
            *(f"| {name} | {number} |" for name, number in sorted(self.faults.items())),
            "",
            *(
                f"- {claim}: {'yes' if not wrong else f'NO, {len(wrong)}, such as {wrong[0]}'}"
                for claim, wrong in self.problems.items()
            ),
            f"- replay: {self.replay}",
        ]

"""The way of one turn into the policy: which updates it reached, on which tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from turnfold.replay.assignments import Assignment, Assignments
from turnfold.replay.updates import Placement, Sizes, check_steps, placements, schedule_of
from turnfold.schemas.errors import UserError
from turnfold.schemas.events import VersionSpan
from turnfold.schemas.trajectories import Trajectory, TurnLedger


class TurnTrace(msgspec.Struct, frozen=True, kw_only=True):
    """One turn: where its sampled tokens lie and when they were trained."""

    run_id: str
    group_id: str
    rollout_id: str
    status: str
    """Of the rollout."""
    turn: TurnLedger
    start: int = 0
    end: int = 0
    """The sampled tokens within the row that trains the turn."""
    num_row_tokens: int = 0
    versions: tuple[VersionSpan, ...] = ()
    """Policy versions that sampled it, in tokens of the row."""
    assigned: Assignment = Assignment()
    placement: Placement | None = None

    @property
    def is_in_a_batch(self) -> bool:
        return self.turn.row is not None and self.assigned.batch is not None


def trace(
    turn_id: str,
    rollout_id: str,
    trajectories: Mapping[str, Trajectory],
    assignments: Assignments,
    sizes: Sizes,
) -> TurnTrace:
    """What became of a turn of a rollout that has ended.

    `trajectories` holds the rollout and, when it is in a batch, all others of that batch, the newest
    revision of each. `sizes` are for a log in which the trainer did not write its own. Raises
    UserError when the trainer's sizes are not those given.
    """
    own = trajectories[rollout_id]
    turn = next((turn for turn in own.ledger.turns if turn.turn_id == turn_id), None)
    if turn is None:
        raise UserError(f"rollout {rollout_id}, turn {turn_id}: came after the rollout had ended")
    assigned = assignments.of(own.run_id, own.group_id, rollout_id)
    found = TurnTrace(
        run_id=own.run_id,
        group_id=own.group_id,
        rollout_id=rollout_id,
        status=own.status,
        turn=turn,
        assigned=assigned,
    )
    if turn.row is None:
        return found
    row = own.rows[turn.row]
    span = next(span for span in row.turns if span.turn_id == turn_id)
    found = msgspec.structs.replace(
        found,
        start=span.start,
        end=span.end,
        num_row_tokens=len(row.token_ids),
        versions=tuple(v for v in row.policy_versions if span.start <= v.start < span.end),
    )
    if assigned.batch is None:
        return found
    cut = assignments.batches[own.run_id, assigned.batch]
    schedule = schedule_of(cut, sizes, assignments.schedule(own.run_id, cut.index))
    check_steps(schedule, assignments.published.get(own.run_id))
    lengths = {
        rollout: [len(row.token_ids) for row in trajectory.rows]
        for rollout, trajectory in trajectories.items()
    }
    placement = placements(cut, lengths, schedule)[rollout_id, turn.row]
    return msgspec.structs.replace(found, placement=placement)


def lines(found: TurnTrace) -> list[str]:
    """The trace for people."""
    turn = found.turn
    text = [
        f"turn {turn.turn_id} of rollout {found.rollout_id} ({found.status}), session "
        f"{turn.session_id}, group {found.group_id}, run {found.run_id}",
        f"  sampled      {turn.num_sampled} tokens{_versions(found)}, "
        f"{turn.continuity or 'no continuity'}, finish {turn.finish_reason or 'unknown'}",
    ]
    for name, reasons in (("masked", turn.masked), ("dropped", turn.dropped)):
        text += [f"  {name:<12} {number} tokens: {why}" for why, number in reasons.items()]
    if turn.row is not None:
        text.append(
            f"  row          {turn.row}, tokens {found.start} to {found.end - 1} of "
            f"{found.num_row_tokens}, all {turn.num_trained} with mask 1"
        )
        text += _batch_lines(found)
    return text


def _versions(found: TurnTrace) -> str:
    if not found.versions:
        return ""
    return " by policy " + ", ".join(
        f"{v.policy_version} (tokens {v.start} to {v.end - 1})" for v in found.versions
    )


def _batch_lines(found: TurnTrace) -> list[str]:
    assigned, placement = found.assigned, found.placement
    if assigned.batch is None:
        return [f"  batch        none: {assigned.reason or 'its group is not decided on yet'}"]
    trained = "trained" if assigned.is_trained else "not trained yet"
    text = [
        f"  batch        {assigned.batch}, policy {assigned.batch - 1} → {assigned.batch}, {trained}"
    ]
    if placement is not None:
        steps, run_steps = (", ".join(map(str, s)) for s in (placement.steps, placement.run_steps))
        text += [
            f"  mini-batch   {placement.mini_batch + 1} of {placement.num_mini_batches}"
            f", rank {placement.rank}",
            f"  optimizer    step {steps} of the batch, step {run_steps} of the run",
        ]
    return text

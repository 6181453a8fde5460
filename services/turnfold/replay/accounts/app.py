"""Accounts for every sampled token of a log, and follows one turn into the policy."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from turnfold.replay.app import events
from turnfold.replay.assignments import Assignments
from turnfold.replay.client import LogSource, OnProgress
from turnfold.replay.folding.app import rebuilt
from turnfold.replay.ledger import Accounts
from turnfold.replay.rebuild import Rebuild, Selection
from turnfold.replay.trace import TurnTrace, trace
from turnfold.replay.updates import Sizes
from turnfold.schemas import codec
from turnfold.schemas.batches import Decision
from turnfold.schemas.errors import UserError
from turnfold.schemas.events import RolloutStarted, TurnCompleted
from turnfold.schemas.policies import PolicyEvent


async def account(
    source: LogSource, selection: Selection, on_progress: OnProgress = lambda _: None
) -> Accounts:
    """Fold the events and account for every sampled token."""
    accounts, rebuild = Accounts(await assignments(source)), Rebuild()
    async for record in source.read(source.topics.events):
        on_progress(1)
        if selection.holds_event(record):
            accounts.add_event(record)
            for trajectory in rebuild.feed(record):
                accounts.add_trajectory(trajectory)
    return accounts


async def trace_turn(
    source: LogSource,
    turn_id: str,
    rollouts: Collection[str],
    sizes: Sizes,
    on_progress: OnProgress = lambda _: None,
) -> list[TurnTrace]:
    """Which updates a turn reached, in each of `rollouts` (all when empty) that has it.

    Raises UserError when there is no such turn, or its rollout has not ended.
    """
    groups = await _rollouts_with(source, turn_id, rollouts, on_progress)
    if not groups:
        raise UserError(f"there is no turn {turn_id} in the log")
    decided, traces = await assignments(source), []
    for rollout_id, (run_id, group_id) in groups.items():
        wanted = {rollout_id}
        batch = decided.of(run_id, group_id, rollout_id).batch
        if batch is not None:
            cut = decided.batches[run_id, batch]
            wanted |= {ref.rollout_id for group in cut.groups for ref in group.rollouts}
        newest = {}
        async for trajectory in rebuilt(source, Rebuild(), Selection(wanted), lambda _: None):
            newest[trajectory.rollout_id] = trajectory  # revisions come last
        if rollout_id not in newest:
            raise UserError(
                f"rollout {rollout_id} has not ended, so turn {turn_id} is in no row yet"
            )
        traces.append(trace(turn_id, rollout_id, newest, decided, sizes))
    return traces


async def _rollouts_with(
    source: LogSource, turn_id: str, rollouts: Collection[str], on_progress: OnProgress
) -> dict[str, tuple[str, str]]:
    """Run and group of each rollout that has a turn of this id."""
    starts: dict[str, tuple[str, str]] = {}
    found: dict[str, tuple[str, str]] = {}
    async for record, event in events(source, Selection(rollouts)):
        on_progress(1)
        match event:
            case RolloutStarted():
                starts.setdefault(event.rollout_id, (event.run_id, event.group_id))
            case TurnCompleted() if event.turn_id == turn_id and record.key:
                if event.rollout_id in starts:
                    found[event.rollout_id] = starts[event.rollout_id]
    return found


async def assignments(source: LogSource) -> Assignments:
    """What was decided and trained; topics that are not there (an export of events) hold nothing."""
    decided, topics = Assignments(), source.topics
    existing = await source.num_partitions((topics.batches, topics.policies))
    async for record in source.read(*existing):
        if record.value is None:
            continue
        with suppress(codec.CodecError):
            if record.topic == topics.batches:
                decided.add_decision(codec.decode(Decision, record.value, record.content_type))
            else:
                decided.add_policy(codec.decode(PolicyEvent, record.value, record.content_type))
    return decided

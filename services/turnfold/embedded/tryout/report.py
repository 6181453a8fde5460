"""What became of a few rollouts, for the author of an agent. Pure.

task door-3
  try-000000-00   reward 0.5 (call 0.1, door 0.4)   2 turns, 1 row, 17 of 60 tokens to train on
    main  31 → 11 tokens   first      lookup({"door": "3"})
    main  52 → 6 tokens    healed     the code is 5
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from turnfold.healer.fold import fold_all
from turnfold.healer.rows import trajectory
from turnfold.schemas.events import (
    Event,
    RolloutAborted,
    RolloutFinished,
    RolloutStarted,
    TurnCompleted,
    TurnFailed,
)
from turnfold.schemas.messages import ChatMessage
from turnfold.schemas.trajectories import Trajectory

_MAX_REPLY_CHARS = 100
_NEW_ROW = ("reset", "forked", "passthrough")


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout, as far as the log has it."""

    events: tuple[Event, ...]
    trajectory: Trajectory | None
    """None while it has not ended."""

    @property
    def has_reward(self) -> bool:
        return self.trajectory is not None and self.trajectory.reward is not None


def told(events: Iterable[Event]) -> Told:
    """The rollout of these events, the first of which starts it."""
    events = tuple(events)
    state = fold_all(enumerate(events))
    made = trajectory(state, topic="events", partition=0) if state.is_closed else None
    return Told(events=events, trajectory=made)


def rollout_lines(one: Told) -> list[str]:
    """Its end in one line, then a line for each turn."""
    started = one.events[0]
    assert isinstance(started, RolloutStarted), "a rollout begins with its start"
    lines = [f"  {started.rollout_id}   {_end(one)}"]
    for event in one.events:
        match event:
            case TurnCompleted():
                lines.append(f"    {_turn(event)}")
            case TurnFailed():
                lines.append(f"    {event.session_id}  no answer: {event.reason}: {event.message}")
            case _:
                pass
    return lines


def _end(one: Told) -> str:
    made = one.trajectory
    end = next((e for e in one.events if isinstance(e, RolloutFinished | RolloutAborted)), None)
    if made is None or end is None:
        return "has not ended"
    if isinstance(end, RolloutAborted):
        return f"no reward: {end.reason}" + _indented(end.message)
    parts = ", ".join(f"{name} {part:g}" for name, part in end.rewards.items())
    num_turns = sum(isinstance(event, TurnCompleted) for event in one.events)
    num_trained = sum(row.num_trained for row in made.rows)
    num_tokens = sum(len(row.token_ids) for row in made.rows)
    return (
        f"reward {end.reward:g}"
        + (f" ({parts})" if parts else "")
        + (" truncated" if end.is_truncated else "")
        + f"   {_count(num_turns, 'turn')}, {_count(len(made.rows), 'row')}, "
        + f"{num_trained} of {num_tokens} tokens to train on"
    )


def _turn(turn: TurnCompleted) -> str:
    tokens = f"{turn.num_prompt_tokens} → {len(turn.output_ids)} tokens"
    cause = f"  [{turn.divergence.cause}]" if turn.divergence is not None else ""
    return f"{turn.session_id}  {tokens:<18} {turn.continuity:<11} {_reply(turn.reply)}{cause}"


def _reply(reply: ChatMessage | None) -> str:
    if reply is None:
        return ""
    said = [str(reply.content)] if reply.content else []
    for call in reply.tool_calls or ():
        said.append(f"{call.name}({msgspec.json.encode(call.arguments).decode()})")
    text = " ".join(" ".join(said).split())
    return text if len(text) <= _MAX_REPLY_CHARS else f"{text[:_MAX_REPLY_CHARS]}…"


def _indented(message: str) -> str:
    return "".join(f"\n      {line}" for line in message.splitlines())


def summary(groups: Mapping[str, Sequence[Told]]) -> list[str]:
    """Counts, and what is worth knowing before a run begins. `groups` is by group id."""
    all_told = [one for group in groups.values() for one in group]
    turns = [event for one in all_told for event in one.events if isinstance(event, TurnCompleted)]
    num_scored = sum(one.has_reward for one in all_told)
    lines = [
        f"{num_scored} of {len(all_told)} rollouts have a reward; "
        f"{_count(len(turns), 'turn')}, {sum(t.continuity == 'healed' for t in turns)} healed"
    ]
    causes = Counter(
        turn.divergence.cause if turn.divergence else turn.continuity
        for turn in turns
        if turn.continuity in _NEW_ROW
    )
    if causes:
        named = ", ".join(f"{number} {cause}" for cause, number in causes.most_common())
        lines.append(
            f"{_count(causes.total(), 'turn')} began a new row: the agent changed its history "
            f"({named}); see docs/healing.md"
        )
    if all_told and not turns:
        lines.append("the agent made no model call: does it use rollout.base_url?")
    if _all_equal(groups):
        lines.append(
            "all rewards of a group are equal everywhere: such groups teach nothing; with this "
            "model that may be its fault and not the reward's"
        )
    return lines


def _all_equal(groups: Mapping[str, Sequence[Told]]) -> bool:
    rewards = [
        {one.trajectory.reward for one in group if one.trajectory is not None and one.has_reward}
        for group in groups.values()
        if len(group) > 1
    ]
    scored = [group for group in rewards if group]
    return bool(scored) and all(len(group) == 1 for group in scored)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"

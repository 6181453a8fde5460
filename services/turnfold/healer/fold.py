"""One rollout, one event at a time.

    open_rollout(RolloutStarted)  -> state
    fold(state, TurnCompleted)    -> state with one turn more
    fold(state, RolloutFinished)  -> closed state, ready for `rows.trajectory`

An event that came before changes nothing. The first terminal event in the log closes the rollout;
what comes later is counted as late, except a revised reward. An event that cannot be right is kept
out of the rows and remembered as a problem, so that the trajectory is marked and the caller can
send the record to the dead letters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import assert_never

import msgspec
import numpy as np

from turnfold.schemas.events import (
    Event,
    RewardRevised,
    RolloutAborted,
    RolloutFinished,
    RolloutStarted,
    TurnCompleted,
    TurnFailed,
    VersionSpan,
)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something wrong with one event of a rollout."""

    kind: str
    """counts_differ, logprobs_differ, logprobs_not_finite, versions_do_not_cover, prompt_empty,
    turn_conflict, start_conflict, not_finished, was_aborted, reward_not_finite, undecodable, parent_missing, gap."""
    detail: str
    """What was expected, what came and where, for people."""
    offset: int
    turn_id: str = ""

    @property
    def mark(self) -> str:
        """How the trajectory shows it: `logprobs_not_finite:t3`."""
        return f"{self.kind}:{self.turn_id}" if self.turn_id else self.kind


class FoldedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of the rollout, without its messages."""

    event: TurnCompleted
    offset: int
    untrusted: str = ""
    """Kind of the problem that makes its token ids unusable, as a turn and as a parent."""
    untrained: str = ""
    """Kind of the problem that keeps it out of training; its ids are sound as context."""

    @property
    def num_tokens(self) -> int:
        """Length of the whole sequence, prompt and output."""
        return self.event.num_prompt_tokens + len(self.event.output_ids)


class RolloutState(msgspec.Struct, frozen=True, kw_only=True):
    """What the events so far say about one rollout."""

    started: RolloutStarted
    first_offset: int
    last_offset: int
    """Of the event that closed or revised it; of its start while it is open."""
    turns: dict[str, FoldedTurn] = {}
    """By turn_id, in the order of the log."""
    num_failed_turns: int = 0
    terminal: RolloutFinished | RolloutAborted | None = None
    revision: int = 0
    revised: RewardRevised | None = None
    problems: tuple[Problem, ...] = ()
    event_ids: frozenset[str] = frozenset()
    num_duplicates: int = 0
    num_late: int = 0

    @property
    def rollout_id(self) -> str:
        return self.started.rollout_id

    @property
    def is_closed(self) -> bool:
        return self.terminal is not None

    def problem_at(self, offset: int) -> Problem | None:
        return next((p for p in self.problems if p.offset == offset), None)


def open_rollout(started: RolloutStarted, offset: int) -> RolloutState:
    """The state of a rollout of which nothing but the start is known."""
    return RolloutState(
        started=started,
        first_offset=offset,
        last_offset=offset,
        event_ids=frozenset({started.event_id}),
    )


def fold(state: RolloutState, event: Event, offset: int) -> RolloutState:
    """The state after one more event of the same rollout.

    Folding an event twice is folding it once. `offset` only serves the source range and the place
    of a problem; no row depends on it.
    """
    assert event.rollout_id == state.rollout_id, (event.rollout_id, state.rollout_id)
    if event.event_id in state.event_ids:
        return _changed(state, num_duplicates=state.num_duplicates + 1)
    state = _changed(state, event_ids=state.event_ids | {event.event_id})
    if state.is_closed and not isinstance(event, RewardRevised):
        return _changed(state, num_late=state.num_late + 1)
    match event:
        case RolloutStarted():
            return _started_again(state, event, offset)
        case TurnCompleted():
            return _turn(state, event, offset)
        case TurnFailed():
            return _changed(state, num_failed_turns=state.num_failed_turns + 1)
        case RolloutFinished():
            return _closed(state, event, offset)
        case RolloutAborted():
            return _changed(state, terminal=event, last_offset=offset)
        case RewardRevised():
            return _revised(state, event, offset)
        case _:
            assert_never(event)


def fold_all(events: Iterable[tuple[int, Event]]) -> RolloutState:
    """Fold (offset, event) pairs of one rollout, the first of which starts it."""
    pairs = iter(events)
    offset, first = next(pairs)
    assert isinstance(first, RolloutStarted), f"expected RolloutStarted first, got {first}"
    state = open_rollout(first, offset)
    for offset, event in pairs:
        state = fold(state, event, offset)
    return state


def mark_undecodable(state: RolloutState, offset: int, detail: str) -> RolloutState:
    """The state after a record with this rollout's key that is no event."""
    if state.is_closed:
        return _changed(state, num_late=state.num_late + 1)
    return _with_problem(state, Problem(kind="undecodable", detail=detail, offset=offset))


def _changed(state: RolloutState, **fields: object) -> RolloutState:
    return msgspec.structs.replace(state, **fields)


def _with_problem(state: RolloutState, problem: Problem) -> RolloutState:
    return _changed(state, problems=(*state.problems, problem))


def _started_again(state: RolloutState, event: RolloutStarted, offset: int) -> RolloutState:
    first = state.started
    if msgspec.structs.replace(event, event_id=first.event_id, at=first.at) == first:
        return _changed(state, num_duplicates=state.num_duplicates + 1)
    detail = (
        f"rollout {state.rollout_id} was already started in group {first.group_id!r} with other "
        f"settings; this start names group {event.group_id!r}"
    )
    return _with_problem(state, Problem(kind="start_conflict", detail=detail, offset=offset))


def _turn(state: RolloutState, event: TurnCompleted, offset: int) -> RolloutState:
    earlier = state.turns.get(event.turn_id)
    if earlier is not None:
        return _turn_again(state, earlier.event, event, offset)
    slim = msgspec.structs.replace(event, new_messages=(), reply=None, tools=None, pinned=())
    problem = _problem_of(slim, offset)
    if problem is None:
        turn = FoldedTurn(event=slim, offset=offset)
    elif problem.kind in ("logprobs_not_finite", "versions_do_not_cover"):
        turn = FoldedTurn(event=slim, offset=offset, untrained=problem.kind)
    else:
        turn = FoldedTurn(event=slim, offset=offset, untrusted=problem.kind)
    state = _changed(state, turns={**state.turns, event.turn_id: turn})
    return state if problem is None else _with_problem(state, problem)


def _turn_again(
    state: RolloutState, first: TurnCompleted, event: TurnCompleted, offset: int
) -> RolloutState:
    same = (first.prompt_tail, first.output_ids, first.parent_turn_id, first.shared_len) == (
        event.prompt_tail,
        event.output_ids,
        event.parent_turn_id,
        event.shared_len,
    )
    if same:
        return _changed(state, num_duplicates=state.num_duplicates + 1)
    detail = (
        f"rollout {state.rollout_id}, turn {event.turn_id}: came before with other tokens; "
        "the first one counts"
    )
    problem = Problem(kind="turn_conflict", detail=detail, offset=offset, turn_id=event.turn_id)
    return _with_problem(state, problem)


def _closed(state: RolloutState, event: RolloutFinished, offset: int) -> RolloutState:
    state = _changed(state, terminal=event, last_offset=offset)
    if is_reward_finite(event.reward, event.rewards):
        return state
    detail = f"rollout {state.rollout_id}: expected a finite reward, got {event.reward}"
    return _with_problem(state, Problem(kind="reward_not_finite", detail=detail, offset=offset))


def _revised(state: RolloutState, event: RewardRevised, offset: int) -> RolloutState:
    where = f"rollout {state.rollout_id}, revised reward {event.reward}"
    if not is_reward_finite(event.reward, event.rewards):
        problem = Problem(
            kind="reward_not_finite", detail=f"{where}: expected a finite number", offset=offset
        )
    elif state.terminal is None:
        problem = Problem(
            kind="not_finished", detail=f"{where}: the rollout is not finished yet", offset=offset
        )
    elif isinstance(state.terminal, RolloutAborted):
        detail = f"{where}: the rollout was aborted ({state.terminal.reason}), it has no reward"
        problem = Problem(kind="was_aborted", detail=detail, offset=offset)
    else:
        return _changed(state, revision=state.revision + 1, revised=event, last_offset=offset)
    return _with_problem(state, problem)


def is_reward_finite(reward: float, rewards: dict[str, float]) -> bool:
    return all(math.isfinite(value) for value in (reward, *rewards.values()))


def _problem_of(event: TurnCompleted, offset: int) -> Problem | None:
    """What is wrong with a turn as it stands, without looking at its parent."""
    num_output = len(event.output_ids)
    num_prompt = event.shared_len + len(event.prompt_tail)
    found: tuple[str, str] | None = None
    if event.num_prompt_tokens != num_prompt or event.shared_len < 0:
        found = (
            "counts_differ",
            f"shared_len {event.shared_len} and a tail of {len(event.prompt_tail)} tokens "
            f"do not make the {event.num_prompt_tokens} prompt tokens it names",
        )
    elif num_prompt == 0:
        found = ("prompt_empty", "a turn needs at least one prompt token")
    elif len(event.logprobs) != num_output:
        found = (
            "logprobs_differ",
            f"expected one logprob for each of {num_output} output tokens, "
            f"got {len(event.logprobs)}",
        )
    elif not np.isfinite(event.logprobs.array).all():
        place = int(np.flatnonzero(~np.isfinite(event.logprobs.array))[0])
        found = ("logprobs_not_finite", f"the logprob of output token {place} is not finite")
    elif not _is_covered(event.policy_versions, num_output):
        spans = [(span.start, span.end) for span in event.policy_versions]
        found = (
            "versions_do_not_cover",
            f"policy version spans {spans} do not cover output tokens 0 to {num_output}",
        )
    if found is None:
        return None
    kind, what = found
    detail = f"rollout {event.rollout_id}, turn {event.turn_id}: {what}"
    return Problem(kind=kind, detail=detail, offset=offset, turn_id=event.turn_id)


def _is_covered(spans: tuple[VersionSpan, ...], num_output: int) -> bool:
    """Whether the spans follow each other from 0 to the end; none at all is "not known"."""
    if not spans or num_output == 0:
        return True
    ends = [0, *(span.end for span in spans)]
    is_chained = all(
        span.start == end and span.end > span.start
        for span, end in zip(spans, ends[:-1], strict=True)
    )
    return is_chained and ends[-1] == num_output

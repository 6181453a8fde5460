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
    Continuity,
    Event,
    RewardRevised,
    RolloutAborted,
    RolloutFinished,
    RolloutStarted,
    TurnCompleted,
    TurnFailed,
    VersionSpan,
)
from turnfold.schemas.wire import Logprobs, Packed, TokenIds

_SOUND_AS_CONTEXT = frozenset({"logprobs_not_finite", "versions_do_not_cover"})
"""Problems of a turn that leave its ids as they should be."""


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
    """What rows are made of: a turn without its messages. Other fields are as in its event."""

    rollout_id: str
    turn_id: str
    session_id: str
    parent_turn_id: str | None
    shared_len: int
    prompt_tail: bytes
    """Ids as they travel, as are those of the output; most are only copied."""
    output_ids: bytes
    logprobs: bytes
    num_prompt_tokens: int
    """Where the output begins in the turn's sequence, and so in every row that holds it."""
    num_tokens: int
    """Length of the whole sequence, prompt and output."""
    policy_versions: tuple[VersionSpan, ...]
    continuity: Continuity
    finish_reason: str
    offset: int
    untrusted: str = ""
    """Kind of the problem that makes its token ids unusable, as a turn and as a parent."""
    untrained: str = ""
    """Kind of the problem that keeps it out of training; its ids are sound as context."""

    @property
    def num_output(self) -> int:
        return len(self.output_ids) // TokenIds.itemsize


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
    running = RunningFold(state)
    running.add(event, offset)
    return running.state()


def fold_all(events: Iterable[tuple[int, Event]]) -> RolloutState:
    """Fold (offset, event) pairs of one rollout, the first of which starts it."""
    pairs = iter(events)
    offset, first = next(pairs)
    assert isinstance(first, RolloutStarted), f"expected RolloutStarted first, got {first}"
    running = RunningFold(open_rollout(first, offset))
    for offset, event in pairs:
        running.add(event, offset)
    return running.state()


class RunningFold:
    """A fold under way. `fold` copies a state for each event; this one changes its own.

        running = RunningFold(open_rollout(started, 0))
        running.add(turn, 1)
        running.add(finished, 2)
        running.state()             the same as fold(fold(open_rollout(…), turn, 1), finished, 2)

    The time of an event does not depend on how many came before it. States that were handed out
    stay as they are.
    """

    def __init__(self, state: RolloutState) -> None:
        self.started = state.started
        self.first_offset = state.first_offset
        self.terminal = state.terminal
        self.revision = state.revision
        self.num_duplicates = state.num_duplicates
        self.turns = dict(state.turns)
        """By turn_id, in the order of the log."""
        self._last_offset = state.last_offset
        self._num_failed_turns = state.num_failed_turns
        self._revised = state.revised
        self._problems = list(state.problems)
        self._event_ids = set(state.event_ids)
        self._num_late = state.num_late

    @property
    def rollout_id(self) -> str:
        return self.started.rollout_id

    @property
    def is_closed(self) -> bool:
        return self.terminal is not None

    def state(self) -> RolloutState:
        """What the events so far say."""
        return RolloutState(
            started=self.started,
            first_offset=self.first_offset,
            last_offset=self._last_offset,
            turns=dict(self.turns),
            num_failed_turns=self._num_failed_turns,
            terminal=self.terminal,
            revision=self.revision,
            revised=self._revised,
            problems=tuple(self._problems),
            event_ids=frozenset(self._event_ids),
            num_duplicates=self.num_duplicates,
            num_late=self._num_late,
        )

    def add(self, event: Event, offset: int) -> Problem | None:
        """Take in the next event of this rollout; what is wrong with it, if anything is."""
        assert event.rollout_id == self.rollout_id, (event.rollout_id, self.rollout_id)
        if event.event_id in self._event_ids:
            self.num_duplicates += 1
            return None
        self._event_ids.add(event.event_id)
        if self.is_closed and not isinstance(event, RewardRevised):
            self._num_late += 1
            return None
        problem = self._take(event, offset)
        if problem is not None:
            self._problems.append(problem)
        return problem

    def mark_undecodable(self, offset: int, detail: str) -> None:
        """A record with this rollout's key is no event."""
        if self.is_closed:
            self._num_late += 1
        else:
            self._problems.append(Problem(kind="undecodable", detail=detail, offset=offset))

    def _take(self, event: Event, offset: int) -> Problem | None:
        match event:
            case TurnCompleted():
                return self._turn(event, offset)
            case TurnFailed():
                self._num_failed_turns += 1
                return None
            case RolloutStarted():
                return self._started_again(event, offset)
            case RolloutFinished():
                self.terminal, self._last_offset = event, offset
                return _problem_of_end(event, offset)
            case RolloutAborted():
                self.terminal, self._last_offset = event, offset
                return None
            case RewardRevised():
                return self._revise(event, offset)
            case _:
                assert_never(event)

    def _started_again(self, event: RolloutStarted, offset: int) -> Problem | None:
        first = self.started
        if msgspec.structs.replace(event, event_id=first.event_id, at=first.at) == first:
            self.num_duplicates += 1
            return None
        detail = (
            f"rollout {self.rollout_id} was already started in group {first.group_id!r} with other "
            f"settings; this start names group {event.group_id!r}"
        )
        return Problem(kind="start_conflict", detail=detail, offset=offset)

    def _turn(self, event: TurnCompleted, offset: int) -> Problem | None:
        turn = _folded_turn(event, offset)
        earlier = self.turns.get(event.turn_id)
        if earlier is not None:
            return self._turn_again(earlier, turn)
        problem = _problem_of_turn(turn)
        if problem is not None:
            context = problem.kind in _SOUND_AS_CONTEXT
            turn = msgspec.structs.replace(
                turn,
                untrained=problem.kind if context else "",
                untrusted="" if context else problem.kind,
            )
        self.turns[event.turn_id] = turn
        return problem

    def _turn_again(self, first: FoldedTurn, turn: FoldedTurn) -> Problem | None:
        same = (first.prompt_tail, first.output_ids, first.parent_turn_id, first.shared_len) == (
            turn.prompt_tail,
            turn.output_ids,
            turn.parent_turn_id,
            turn.shared_len,
        )
        if same:
            self.num_duplicates += 1
            return None
        detail = (
            f"rollout {self.rollout_id}, turn {turn.turn_id}: came before with other tokens; "
            "the first one counts"
        )
        return Problem(
            kind="turn_conflict", detail=detail, offset=turn.offset, turn_id=turn.turn_id
        )

    def _revise(self, event: RewardRevised, offset: int) -> Problem | None:
        where = f"rollout {self.rollout_id}, revised reward {event.reward}"
        if not is_reward_finite(event):
            return Problem(
                kind="reward_not_finite", detail=f"{where}: expected a finite number", offset=offset
            )
        if self.terminal is None:
            detail = f"{where}: the rollout is not finished yet"
            return Problem(kind="not_finished", detail=detail, offset=offset)
        if isinstance(self.terminal, RolloutAborted):
            detail = f"{where}: the rollout was aborted ({self.terminal.reason}), it has no reward"
            return Problem(kind="was_aborted", detail=detail, offset=offset)
        self.revision += 1
        self._revised, self._last_offset = event, offset
        return None


def _folded_turn(event: TurnCompleted, offset: int) -> FoldedTurn:
    output_ids = _bytes(event.output_ids)
    return FoldedTurn(
        rollout_id=event.rollout_id,
        turn_id=event.turn_id,
        session_id=event.session_id,
        parent_turn_id=event.parent_turn_id,
        shared_len=event.shared_len,
        prompt_tail=_bytes(event.prompt_tail),
        output_ids=output_ids,
        logprobs=_bytes(event.logprobs),
        num_prompt_tokens=event.num_prompt_tokens,
        num_tokens=event.num_prompt_tokens + len(output_ids) // TokenIds.itemsize,
        policy_versions=event.policy_versions,
        continuity=event.continuity,
        finish_reason=event.finish_reason,
        offset=offset,
    )


def _bytes(array: Packed | bytes) -> bytes:
    """Of an array, or of a turn that was decoded for the fold: see `recorded`."""
    return array if isinstance(array, bytes) else array.data


def _problem_of_end(event: RolloutFinished, offset: int) -> Problem | None:
    if is_reward_finite(event):
        return None
    detail = f"rollout {event.rollout_id}: expected a finite reward, got {event.reward}"
    return Problem(kind="reward_not_finite", detail=detail, offset=offset)


def is_reward_finite(end: RolloutFinished | RewardRevised) -> bool:
    """Whether the reward and all its parts are numbers."""
    values = (end.reward, *end.rewards.values(), *end.turn_rewards.values())
    return all(map(math.isfinite, values))


def _problem_of_turn(turn: FoldedTurn) -> Problem | None:
    """What is wrong with a turn as it stands, without looking at its parent."""
    num_output = turn.num_output
    num_tail = len(turn.prompt_tail) // TokenIds.itemsize
    num_logprobs = len(turn.logprobs) // Logprobs.itemsize
    if turn.num_prompt_tokens != turn.shared_len + num_tail or turn.shared_len < 0:
        kind = "counts_differ"
        what = (
            f"shared_len {turn.shared_len} and a tail of {num_tail} tokens "
            f"do not make the {turn.num_prompt_tokens} prompt tokens it names"
        )
    elif turn.num_prompt_tokens == 0:
        kind, what = "prompt_empty", "a turn needs at least one prompt token"
    elif num_logprobs != num_output:
        kind = "logprobs_differ"
        what = f"expected one logprob for each of {num_output} output tokens, got {num_logprobs}"
    elif not _is_finite(turn.logprobs):
        place = int(np.flatnonzero(~np.isfinite(np.frombuffer(turn.logprobs, Logprobs.dtype)))[0])
        kind, what = "logprobs_not_finite", f"the logprob of output token {place} is not finite"
    elif not _is_covered(turn.policy_versions, num_output):
        spans = [(span.start, span.end) for span in turn.policy_versions]
        kind = "versions_do_not_cover"
        what = f"policy version spans {spans} do not cover output tokens 0 to {num_output}"
    else:
        return None
    detail = f"rollout {turn.rollout_id}, turn {turn.turn_id}: {what}"
    return Problem(kind=kind, detail=detail, offset=turn.offset, turn_id=turn.turn_id)


def _is_finite(logprobs: bytes) -> bool:
    """Whether every logprob is a number.

    The sum of squares is not finite as soon as one of them is not; it takes a tenth of the time of
    a look at each. Huge numbers can overflow it, so that it alone does not condemn.
    """
    values = np.frombuffer(logprobs, Logprobs.dtype)
    return math.isfinite(values.dot(values)) or bool(np.isfinite(values).all())


def _is_covered(spans: tuple[VersionSpan, ...], num_output: int) -> bool:
    """Whether the spans follow each other from 0 to the end; none at all is "not known"."""
    if not spans or num_output == 0:
        return True
    if len(spans) == 1:
        return spans[0].start == 0 and spans[0].end == num_output
    ends = [0, *(span.end for span in spans)]
    is_chained = all(
        span.start == end and span.end > span.start
        for span, end in zip(spans, ends[:-1], strict=True)
    )
    return is_chained and ends[-1] == num_output

"""A rollout as a gateway knows it: the fold of its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import assert_never

import msgspec

from turnfold.history.errors import HistoryError
from turnfold.history.session import Session
from turnfold.schemas.events import (
    Event,
    RewardRevised,
    RolloutAborted,
    RolloutFinished,
    RolloutStarted,
    TurnCompleted,
    TurnFailed,
)
from turnfold.schemas.messages import ChatMessage
from turnfold.schemas.wire import Logprobs


class RecordedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to give the answer of a turn again."""

    turn_id: str
    request_digest: str
    idempotency_key: str
    at: float
    model: str
    reply: ChatMessage
    finish_reason: str
    stop_reason: int | str | None
    num_prompt_tokens: int
    logprobs: Logprobs
    num_cached_tokens: int | None
    num_reasoning_tokens: int
    has_instructions: bool


def recorded_turn(turn: TurnCompleted) -> RecordedTurn:
    """The part of the event that an answer is made of."""
    return RecordedTurn(
        turn_id=turn.turn_id,
        request_digest=turn.request_digest,
        idempotency_key=turn.idempotency_key,
        at=turn.at,
        model=turn.model,
        reply=turn.reply or ChatMessage(role="assistant"),
        finish_reason=turn.finish_reason,
        stop_reason=turn.stop_reason,
        num_prompt_tokens=turn.num_prompt_tokens,
        logprobs=turn.logprobs,
        num_cached_tokens=turn.num_cached_tokens,
        num_reasoning_tokens=turn.num_reasoning_tokens,
        has_instructions=turn.has_instructions,
    )


class RolloutState:
    """Folds the events of one rollout; a second event with the same id changes nothing.

        state = RolloutState(started)
        state.apply(turn)                     # True: it was new
        state.session("main").lookup(…)       # its conversation, healed by turnfold.history
        state.recorded("main", digest)        # the turn that a client's retry means

    Not safe for concurrent use of one session: whoever plans a turn and whoever folds one take turns.
    """

    def __init__(self, started: RolloutStarted) -> None:
        self.started = started
        self.terminal: RolloutFinished | RolloutAborted | None = None
        self.revised: RewardRevised | None = None
        self.num_turns = 0
        self.num_output_tokens = 0
        self.continuity: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.num_unusable = 0
        """Turns, of foreign publishers, that do not fit the history."""
        self.turns_by_session: Counter[str] = Counter()
        self._sessions: dict[str, Session] = {}
        self._recorded: dict[str, dict[str, RecordedTurn]] = {}
        self._seen: set[str] = set()

    @property
    def rollout_id(self) -> str:
        return self.started.rollout_id

    @property
    def status(self) -> str:
        """open, finished or aborted."""
        match self.terminal:
            case None:
                return "open"
            case RolloutFinished():
                return "finished"
            case RolloutAborted():
                return "aborted"

    @property
    def reward(self) -> float | None:
        if self.revised is not None:
            return self.revised.reward
        return self.terminal.reward if isinstance(self.terminal, RolloutFinished) else None

    def session(self, session_id: str) -> Session:
        """The conversation of that name, empty when it has no turn yet."""
        if session_id not in self._sessions:
            self._sessions[session_id] = Session(session_id, self.rollout_id)
        return self._sessions[session_id]

    def apply(self, event: Event) -> bool:
        """Fold one event; False when it was known, late, or does not fit."""
        if event.event_id in self._seen:
            return False
        self._seen.add(event.event_id)
        match event:
            case TurnCompleted():
                return self.terminal is None and self._add_turn(event)
            case TurnFailed():
                self.failures[event.reason] += 1
            case RolloutFinished() | RolloutAborted():
                if self.terminal is not None:
                    return False
                self.terminal = event
                # Nothing is asked of a closed rollout any more but its counts.
                self._sessions.clear()
                self._recorded.clear()
            case RewardRevised():
                self.revised = event
            case RolloutStarted():
                pass
            case _:
                assert_never(event)
        return True

    def _add_turn(self, turn: TurnCompleted) -> bool:
        try:
            if not self.session(turn.session_id).apply(turn):
                return False
        except HistoryError:
            self.num_unusable += 1
            return False
        self.num_turns += 1
        self.turns_by_session[turn.session_id] += 1
        self.num_output_tokens += len(turn.output_ids)
        self.continuity[turn.continuity] += 1
        self._recorded.setdefault(turn.session_id, {})[turn.turn_id] = recorded_turn(turn)
        return True

    def turn(self, session_id: str, turn_id: str) -> RecordedTurn | None:
        """The session's turn of that id."""
        return self._recorded.get(session_id, {}).get(turn_id)

    def recorded(
        self, session_id: str, request_digest: str, *, idempotency_key: str = ""
    ) -> RecordedTurn | None:
        """The latest turn that a repeated request means.

        A request with an idempotency key means the turn that has the same one. Without a key only a
        turn counts that nobody continued: a conversation that went on and came back to the same
        request asks for a new sample.
        """
        sequences = self.session(session_id).sequences
        for turn in self._latest_first(session_id):
            if turn.request_digest != request_digest:
                continue
            if idempotency_key and turn.idempotency_key == idempotency_key:
                return turn
            if not idempotency_key and not sequences.children(turn.turn_id):
                return turn
        return None

    def _latest_first(self, session_id: str) -> Iterator[RecordedTurn]:
        return reversed(list(self._recorded.get(session_id, {}).values()))

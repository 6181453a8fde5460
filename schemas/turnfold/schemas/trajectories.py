"""What the healer makes of a finished rollout: its rows, its reward and its ledger."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from turnfold.schemas.events import HistoryMode, Split, VersionSpan
from turnfold.schemas.wire import Logprobs, LossMask, TokenIds, Wire

Status = Literal["completed", "truncated", "aborted"]


class TurnSpan(Wire, frozen=True, kw_only=True):
    """Tokens [start, end) of the row are the sampled output of this turn."""

    turn_id: str
    start: int
    end: int
    is_trained: bool = True


class Row(Wire, frozen=True, kw_only=True):
    """One token sequence to train on. The arrays have one entry per token.

    turn 0: [P1] -> A1, turn 1: [P1 A1 E1] -> A2
        token_ids  P1 A1 E1 A2
        loss_mask   0  1  0  1
        logprobs    0  …  0  …
    """

    token_ids: TokenIds
    loss_mask: LossMask
    logprobs: Logprobs
    """Sampling logprobs; 0 where the mask is 0."""
    session_id: str
    turns: tuple[TurnSpan, ...]
    policy_versions: tuple[VersionSpan, ...] = ()
    """Spans over the row's sampled tokens."""

    @property
    def num_trained(self) -> int:
        return int(self.loss_mask.array.sum())


class TurnLedger(Wire, frozen=True, kw_only=True):
    """Where each sampled token of one turn went: trained + masked + dropped = sampled."""

    turn_id: str
    session_id: str
    num_sampled: int
    num_trained: int = 0
    masked: dict[str, int] = {}
    """Tokens in a row with mask 0, by reason."""
    dropped: dict[str, int] = {}
    """Tokens in no row, by reason: orphan, rollout_aborted, …"""
    row: int | None = None
    """Index of the row that trains it."""
    continuity: str = ""
    finish_reason: str = ""
    """As the engine said: stop, length or abort."""

    @property
    def is_balanced(self) -> bool:
        if not self.masked and not self.dropped:
            return self.num_trained == self.num_sampled
        accounted = self.num_trained + sum(self.masked.values()) + sum(self.dropped.values())
        return accounted == self.num_sampled


class Ledger(Wire, frozen=True, kw_only=True):
    """The account of every sampled token of a rollout."""

    turns: tuple[TurnLedger, ...] = ()

    @property
    def num_sampled(self) -> int:
        return sum(turn.num_sampled for turn in self.turns)

    @property
    def num_trained(self) -> int:
        return sum(turn.num_trained for turn in self.turns)

    @property
    def masked(self) -> Counter[str]:
        return sum((Counter(turn.masked) for turn in self.turns), Counter())

    @property
    def dropped(self) -> Counter[str]:
        return sum((Counter(turn.dropped) for turn in self.turns), Counter())

    @property
    def is_balanced(self) -> bool:
        return all(turn.is_balanced for turn in self.turns)


class Source(Wire, frozen=True, kw_only=True):
    """The events this was made of: offsets of one partition, both ends included."""

    topic: str
    partition: int
    first_offset: int
    last_offset: int


class Trajectory(Wire, frozen=True, kw_only=True, tag="trajectory"):
    """All rows of one finished rollout. A function of the log: equal logs give equal bytes."""

    rollout_id: str
    revision: int = 0
    """Counts up when a later event (a revised reward) supersedes an earlier trajectory."""
    run_id: str
    group_id: str
    task_id: str = ""
    index: int = 0
    attempt: int = 0
    split: Split = "train"
    dispatch_index: int = -1
    history_mode: HistoryMode = "linear"
    status: Status
    reason: str = ""
    """Why it was aborted."""
    reward: float | None = None
    """None when the rollout has no reward that counts."""
    rewards: dict[str, float] = {}
    turn_rewards: dict[str, float] = {}
    """Process rewards by turn_id, of turns in the rows."""
    rows: tuple[Row, ...]
    ledger: Ledger
    num_turns: int = 0
    num_failed_turns: int = 0
    num_healed: int = 0
    """Turns whose prompt would have drifted without healing."""
    min_policy_version: int = 0
    max_policy_version: int = 0
    marks: tuple[str, ...] = ()
    """What was wrong with the log of this rollout: gap, damaged_event, …; never silent."""
    source: Source
    fold_version: int = 1
    """Version of the fold's rules; rows of another version may differ."""

    @property
    def num_tokens(self) -> int:
        """Tokens that a trainer processes: all rows, context included."""
        return sum(len(row.token_ids) for row in self.rows)

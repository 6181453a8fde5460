"""The account of a log: where every sampled token of every turn event went. Pure.

Two counts meet here that know nothing of each other: the output tokens of the turn events as they
lie in the log, and the ledgers of the trajectories that the fold makes of them. `is_balanced` says
whether they agree for every rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from turnfold.healer.partition import decode_event
from turnfold.log.records import Record
from turnfold.schemas import codec
from turnfold.schemas.events import RolloutStarted, TurnCompleted
from turnfold.schemas.trajectories import Ledger, Trajectory


class Account(msgspec.Struct, kw_only=True):
    """The tokens of one rollout, or of several added up."""

    name: str
    status: str = ""
    num_rollouts: int = 0
    num_turns: int = 0
    num_sampled: int = 0
    """Output tokens of the distinct turn events in the log."""
    trained: int = 0
    masked: Counter[str] = msgspec.field(default_factory=Counter)
    dropped: Counter[str] = msgspec.field(default_factory=Counter)
    unaccounted: int = 0
    """Tokens of turns that the trajectory's ledger lacks, or has with another count."""

    @property
    def num_accounted(self) -> int:
        return self.trained + self.masked.total() + self.dropped.total()

    @property
    def is_balanced(self) -> bool:
        return self.unaccounted == 0 and self.num_accounted == self.num_sampled


class Accounts:
    """Collects turn events and trajectories of a log.

    accounts = Accounts()
    for record in log: accounts.add_event(record)
    for trajectory in rebuilt: accounts.add_trajectory(trajectory)
    accounts.by_rollout(); accounts.by_run()
    """

    def __init__(self) -> None:
        self._sampled: dict[str, dict[str, int]] = {}
        """rollout_id → turn_id → output tokens, the first event of a turn."""
        self._runs: dict[str, str] = {}
        self._ledgers: dict[str, tuple[int, str, Ledger]] = {}
        """rollout_id → newest revision, status and ledger."""

    def add_event(self, record: Record) -> None:
        try:
            event = decode_event(record)
        except codec.CodecError:
            return  # holds no countable token; replay lists it as a dead letter
        match event:
            case RolloutStarted():
                self._runs.setdefault(event.rollout_id, event.run_id)
            case TurnCompleted():
                turns = self._sampled.setdefault(event.rollout_id, {})
                turns.setdefault(event.turn_id, len(event.output_ids))

    def add_trajectory(self, trajectory: Trajectory) -> None:
        known = self._ledgers.get(trajectory.rollout_id)
        if known is None or trajectory.revision > known[0]:
            entry = (trajectory.revision, trajectory.status, trajectory.ledger)
            self._ledgers[trajectory.rollout_id] = entry

    def by_rollout(self) -> list[Account]:
        rollouts = sorted({*self._runs, *self._sampled, *self._ledgers})
        return [self._account(rollout_id) for rollout_id in rollouts]

    def by_run(self) -> list[Account]:
        """One account a run; rollouts that were never started are under "?"."""
        runs: dict[str, Account] = {}
        for account in self.by_rollout():
            run_id = self._runs.get(account.name, "?")
            runs[run_id] = _sum(runs.get(run_id, Account(name=run_id)), account)
        return [runs[run_id] for run_id in sorted(runs)]

    def _account(self, rollout_id: str) -> Account:
        sampled = self._sampled.get(rollout_id, {})
        account = Account(
            name=rollout_id,
            num_rollouts=1,
            num_turns=len(sampled),
            num_sampled=sum(sampled.values()),
        )
        if rollout_id not in self._ledgers:
            fate = "in_flight" if rollout_id in self._runs else "never_started"
            account.status = fate
            account.dropped = +Counter({fate: account.num_sampled})
            return account
        _, account.status, ledger = self._ledgers[rollout_id]
        account.trained = ledger.num_trained
        account.masked, account.dropped = ledger.masked, ledger.dropped
        listed = {turn.turn_id: turn.num_sampled for turn in ledger.turns}
        late = sum(num for turn_id, num in sampled.items() if turn_id not in listed)
        account.dropped = account.dropped + Counter({"after_the_end": late})
        account.unaccounted = sum(
            abs(num - sampled.get(turn_id, 0)) for turn_id, num in listed.items()
        )
        return account


def total(accounts: Iterable[Account]) -> Account:
    """All accounts added up."""
    found = Account(name="total")
    for account in accounts:
        found = _sum(found, account)
    return found


def _sum(left: Account, right: Account) -> Account:
    return Account(
        name=left.name,
        num_rollouts=left.num_rollouts + right.num_rollouts,
        num_turns=left.num_turns + right.num_turns,
        num_sampled=left.num_sampled + right.num_sampled,
        trained=left.trained + right.trained,
        masked=left.masked + right.masked,
        dropped=left.dropped + right.dropped,
        unaccounted=left.unaccounted + right.unaccounted,
    )

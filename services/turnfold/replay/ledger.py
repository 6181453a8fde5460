"""The account of a log: where every sampled token of every turn event went. Pure.

Three things meet here that know nothing of each other: the output tokens of the turn events as they
lie in the log, the ledgers of the trajectories that the fold makes of them, and the decisions of
the assembler on those. `is_balanced` says whether they add up for every rollout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from turnfold.healer.recorded import decode_event
from turnfold.log.records import Record
from turnfold.replay.assignments import Assignments
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
    """In a batch whose policy version is published."""
    masked: Counter[str] = msgspec.field(default_factory=Counter)
    """In a row with mask 0, by reason."""
    dropped: Counter[str] = msgspec.field(default_factory=Counter)
    """Never to be trained, by reason."""
    waiting: Counter[str] = msgspec.field(default_factory=Counter)
    """`in_flight`: the rollout has not ended; `no_batch_yet`: its group is not decided on;
    `not_trained_yet`: in a batch whose policy version is not published."""
    unaccounted: int = 0
    """Tokens of turns that the trajectory's ledger lacks, or has with another count."""

    @property
    def num_accounted(self) -> int:
        return self.trained + self.masked.total() + self.dropped.total() + self.waiting.total()

    @property
    def is_balanced(self) -> bool:
        return self.unaccounted == 0 and self.num_accounted == self.num_sampled


class Accounts:
    """Collects turn events and trajectories of a log.

    In a run in which nothing was decided (no assembler has run), a token in a row with mask 1
    counts as trained; `undecided_runs` names those.

    accounts = Accounts(assignments)
    for record in log: accounts.add_event(record)
    for trajectory in rebuilt: accounts.add_trajectory(trajectory)
    accounts.by_rollout(); accounts.by_run()
    """

    def __init__(self, assignments: Assignments | None = None) -> None:
        self._assignments = assignments or Assignments()
        self._sampled: dict[str, dict[str, int]] = {}
        """rollout_id → turn_id → output tokens, the first event of a turn."""
        self._runs: dict[str, str] = {}
        self._ended: dict[str, _Ended] = {}
        """By rollout_id, the newest revision."""

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
        known = self._ended.get(trajectory.rollout_id)
        if known is None or trajectory.revision > known.revision:
            self._ended[trajectory.rollout_id] = _Ended(
                run_id=trajectory.run_id,
                group_id=trajectory.group_id,
                revision=trajectory.revision,
                status=trajectory.status,
                is_eval=trajectory.split == "eval",
                ledger=trajectory.ledger,
            )

    @property
    def undecided_runs(self) -> list[str]:
        """Runs without a decision, in which `trained` means: in a row with mask 1."""
        runs = {*self._runs.values()}
        return sorted(run_id for run_id in runs if not self._assignments.has_decided(run_id))

    def by_rollout(self) -> list[Account]:
        rollouts = sorted({*self._runs, *self._sampled, *self._ended})
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
        ended = self._ended.get(rollout_id)
        if ended is None:
            is_open = rollout_id in self._runs
            account.status = "in_flight" if is_open else "never_started"
            fates = account.waiting if is_open else account.dropped
            fates[account.status] += account.num_sampled
        else:
            self._add_ended(account, rollout_id, ended)
            _add_unlisted(account, sampled, ended.ledger)
        account.dropped, account.waiting = +account.dropped, +account.waiting
        return account

    def _add_ended(self, account: Account, rollout_id: str, ended: _Ended) -> None:
        """What the trajectory's ledger says, and for its trainable tokens what was decided."""
        ledger, num_trainable = ended.ledger, ended.ledger.num_trained
        account.status = ended.status
        account.masked, account.dropped = ledger.masked, ledger.dropped
        assigned = self._assignments.of(ended.run_id, ended.group_id, rollout_id)
        if ended.is_eval:
            account.dropped["eval_split"] += num_trainable
        elif assigned.is_trained or not self._assignments.has_decided(ended.run_id):
            account.trained = num_trainable
        elif assigned.reason:
            account.dropped[assigned.reason] += num_trainable
        else:
            waits_for = "no_batch_yet" if assigned.batch is None else "not_trained_yet"
            account.waiting[waits_for] += num_trainable


class _Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of a trajectory."""

    run_id: str
    group_id: str
    revision: int
    status: str
    is_eval: bool
    ledger: Ledger


def _add_unlisted(account: Account, sampled: dict[str, int], ledger: Ledger) -> None:
    """Turns of the log that the ledger lacks came after the end; other counts are an error."""
    listed = {turn.turn_id: turn.num_sampled for turn in ledger.turns}
    account.dropped["after_the_end"] += sum(
        num for turn_id, num in sampled.items() if turn_id not in listed
    )
    account.unaccounted = sum(abs(num - sampled.get(turn_id, 0)) for turn_id, num in listed.items())


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
        waiting=left.waiting + right.waiting,
        unaccounted=left.unaccounted + right.unaccounted,
    )

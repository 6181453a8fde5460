"""Where clients' histories drifted from what was sampled, and what it cost. Pure.

A turn whose history drifted either continued its parent all the same (healed: nothing was lost) or
began a new training row, in which everything before the new text is read a second time:

    t0  40 tokens
    t1  drifted, healed           saved a row and the 40 tokens of t0
    t2  drifted, prompt of 90     broke off t1: costs a row and at most the 70 tokens of t1

Tokens are counted on the turn's nearest stored sequence, so `repeated` is what the new row reads
again, at most; what was edited away is not read at all, so a prompt shorter than that counts whole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from turnfold.healer.recorded import decode_event
from turnfold.history.divergence import EDITS
from turnfold.log.records import Record
from turnfold.schemas import codec
from turnfold.schemas.events import (
    RolloutAborted,
    RolloutFinished,
    RolloutStarted,
    TurnCompleted,
)

UNEXPLAINED = "unexplained"
"""A reset or passthrough turn whose publisher named no cause."""


class Cost(msgspec.Struct, kw_only=True):
    """What drifting turns of one kind saved and cost."""

    num_healed: int = 0
    saved_tokens: int = 0
    """Tokens that healed turns did not read again."""
    num_broken: int = 0
    """Turns that began a new row; each cost one."""
    repeated_tokens: int = 0
    """Tokens that those rows read again, at most."""

    def add(self, other: Cost) -> None:
        self.num_healed += other.num_healed
        self.saved_tokens += other.saved_tokens
        self.num_broken += other.num_broken
        self.repeated_tokens += other.repeated_tokens


class Client(msgspec.Struct, frozen=True, order=True):
    """How an agent speaks, and to which model."""

    protocol: str
    model: str
    harness: str = ""


class ClientDrift(msgspec.Struct, kw_only=True):
    """All turns of one kind of client."""

    client: Client
    num_turns: int = 0
    continuities: Counter[str] = msgspec.field(default_factory=Counter)
    cost: Cost = msgspec.field(default_factory=Cost)


class Offender(msgspec.Struct, kw_only=True):
    """A session, and what its breaks cost."""

    rollout_id: str
    session_id: str
    cost: Cost = msgspec.field(default_factory=Cost)
    causes: Counter[str] = msgspec.field(default_factory=Counter)
    """Of its broken turns."""
    first_turn_id: str = ""
    """The first broken turn."""
    first_message_index: int = -1
    """The message of its request at which the history broke; -1 where none differs."""


class _Rollout(msgspec.Struct, kw_only=True):
    """What must be known of an open rollout to price its turns."""

    model: str = ""
    lengths: dict[str, int] = msgspec.field(default_factory=dict)
    """turn_id → tokens of prompt and output."""
    latest: dict[str, int] = msgspec.field(default_factory=dict)
    """session_id → tokens of its latest turn."""


class Drift:
    """Collects the turns of a log.

    drift = Drift()
    for record in log: drift.add(record)
    drift.clients(); drift.causes(); drift.offenders(10)

    Memory grows with open rollouts and with sessions that broke. Turns after the end of a rollout,
    or without its start, are counted too: they are what a client did, whatever became of them.
    """

    def __init__(self) -> None:
        self.num_turns = 0
        self._clients: dict[Client, ClientDrift] = {}
        self._causes: defaultdict[str, Cost] = defaultdict(Cost)
        self._offenders: dict[tuple[str, str], Offender] = {}
        self._open: defaultdict[str, _Rollout] = defaultdict(_Rollout)

    def add(self, record: Record) -> None:
        """Count one record; what is no event is left to `turnfold replay`, which lists it."""
        try:
            event = decode_event(record)
        except codec.CodecError:
            return
        match event:
            case RolloutStarted():
                self._open[event.rollout_id].model = event.model
            case TurnCompleted() if event.turn_id not in self._open[event.rollout_id].lengths:
                self._add_turn(event, self._open[event.rollout_id])
            case RolloutFinished() | RolloutAborted():
                self._open.pop(event.rollout_id, None)

    def clients(self) -> list[ClientDrift]:
        """By protocol, model and harness."""
        return [self._clients[client] for client in sorted(self._clients)]

    def causes(self) -> list[tuple[str, Cost]]:
        """The dearest first."""
        return sorted(
            self._causes.items(),
            key=lambda item: (-item[1].repeated_tokens, -item[1].saved_tokens, item[0]),
        )

    def offenders(self, limit: int) -> list[Offender]:
        """The sessions whose breaks cost most tokens, the dearest first."""
        found = sorted(
            self._offenders.values(),
            key=lambda o: (-o.cost.repeated_tokens, o.rollout_id, o.session_id),
        )
        return found[:limit]

    def _add_turn(self, turn: TurnCompleted, rollout: _Rollout) -> None:
        self.num_turns += 1
        model = turn.model or rollout.model or "?"
        client = Client(turn.protocol or "?", model, turn.harness)
        entry = self._clients.setdefault(client, ClientDrift(client=client))
        entry.num_turns += 1
        entry.continuities[turn.continuity] += 1
        cost = _cost(turn, rollout)
        if cost is not None:
            cause = turn.divergence.cause if turn.divergence else UNEXPLAINED
            entry.cost.add(cost)
            self._causes[cause].add(cost)
            if cost.num_broken:
                self._add_offence(turn, cause, cost)
        length = turn.num_prompt_tokens + len(turn.output_ids)
        rollout.lengths[turn.turn_id] = rollout.latest[turn.session_id] = length

    def _add_offence(self, turn: TurnCompleted, cause: str, cost: Cost) -> None:
        session = (turn.rollout_id, turn.session_id)
        if session not in self._offenders:
            self._offenders[session] = Offender(
                rollout_id=turn.rollout_id,
                session_id=turn.session_id,
                first_turn_id=turn.turn_id,
                first_message_index=turn.divergence.message_index if turn.divergence else -1,
            )
        offender = self._offenders[session]
        offender.cost.add(cost)
        offender.causes[cause] += 1


def _cost(turn: TurnCompleted, rollout: _Rollout) -> Cost | None:
    """What the drift of a turn saved or cost; None where nothing drifted.

    A fork without a cause is a retry or a branch: the client asked for another row. One that was
    edited continues an earlier turn and left the latest one.
    """
    parent_length = rollout.lengths.get(turn.parent_turn_id or "")
    is_extension = parent_length is not None and turn.shared_len == parent_length
    is_edit = turn.divergence is not None and turn.divergence.cause in EDITS
    match turn.continuity:
        case "first" | "extended":
            return None
        case "forked" if turn.divergence is None:
            return None
        case "healed" | "forked" if is_extension and not is_edit:
            return Cost(num_healed=1, saved_tokens=turn.shared_len)
        case "passthrough" if is_extension:
            return None
    latest_length = rollout.latest.get(turn.session_id, 0)
    left = latest_length if is_edit or parent_length is None else parent_length
    return Cost(num_broken=1, repeated_tokens=min(left, turn.num_prompt_tokens))


def total_cost(costs: Iterable[Cost]) -> Cost:
    """All costs added up."""
    found = Cost()
    for cost in costs:
        found.add(cost)
    return found

"""The rollouts that a gateway holds in memory, read back from the log when they are not there."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Literal

from turnfold.gateway import metrics
from turnfold.gateway.calls import Answer, AnswerHead, AnswerPiece
from turnfold.gateway.client import EventLog, UnknownRollout
from turnfold.gateway.rollouts.state import RolloutState
from turnfold.schemas.events import Event, RolloutStarted, TurnCompleted


class Flight:
    """A turn being made, how many clients wait for it, and what can be read of it so far.

    Each client reads `pieces` from the beginning, at its own pace.
    """

    def __init__(
        self, session_id: str, request_digest: str, idempotency_key: str, harness: str = ""
    ) -> None:
        self.session_id = session_id
        self.request_digest = request_digest
        self.idempotency_key = idempotency_key
        self.harness = harness
        self.task: asyncio.Task[Answer] | None = None
        self.num_waiting = 0
        self.stage: Literal["planning", "sampling", "recording", "recorded"] = "planning"
        self.is_abandoned = False
        self.head: AnswerHead | None = None
        """Known once the prompt is planned; None in a turn that is not told while it is made."""
        self.pieces: list[AnswerPiece] = []
        """Of the reply, in order, as far as it was told."""
        self._news = asyncio.Event()

    @property
    def is_landed(self) -> bool:
        """Whether the turn is made, or has failed."""
        return self.task is not None and self.task.done()

    def begin(self, head: AnswerHead) -> None:
        """The reply is about to be told piece by piece."""
        self.head = head

    def tell(self, pieces: Sequence[AnswerPiece]) -> None:
        """More of the reply."""
        if pieces:
            self.pieces += pieces
            self.wake()

    def wake(self) -> None:
        """Have those look who wait for news."""
        self._news.set()
        self._news = asyncio.Event()

    async def news(self, num_known: int) -> None:
        """Return when there are more pieces than these, or the turn is landed."""
        while len(self.pieces) <= num_known and not self.is_landed:
            await self._news.wait()

    def abandon(self) -> None:
        """Nobody wants the answer: stop, unless the sample is there already."""
        if self.stage in ("recording", "recorded"):
            return
        self.is_abandoned = True
        if self.stage == "sampling" and self.task is not None:
            self.task.cancel()


class Entry:
    """One rollout in memory."""

    def __init__(self, state: RolloutState, partition: int, offset: int) -> None:
        self.state = state
        self.partition = partition
        self.offset = offset
        """Of its RolloutStarted."""
        self.flights: set[Flight] = set()
        self.control_lock = asyncio.Lock()
        self._session_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._unfolded: defaultdict[str, list[TurnCompleted]] = defaultdict(list)

    def lock(self, session_id: str) -> asyncio.Lock:
        """Held while a turn of the session is planned and while one is folded, not in between."""
        return self._session_locks[session_id]

    def add_foreign(self, event: Event) -> None:
        """An event that another process appended; its turns wait for the session's lock."""
        if isinstance(event, TurnCompleted):
            self._unfolded[event.session_id].append(event)
        else:
            self.state.apply(event)

    def has_foreign(self, session_id: str) -> bool:
        """Whether turns of the session wait to be folded."""
        return bool(self._unfolded.get(session_id))

    def fold_foreign(self, session_id: str) -> None:
        """Fold the waiting turns; the caller holds the session's lock."""
        for event in self._unfolded.pop(session_id, []):
            self.state.apply(event)

    async def fold_all_foreign(self) -> None:
        """Fold what waits in all sessions."""
        for session_id in list(self._unfolded):
            async with self.lock(session_id):
                self.fold_foreign(session_id)

    def find_flight(
        self, session_id: str, request_digest: str, *, idempotency_key: str = ""
    ) -> Flight | None:
        """The turn in the making that a repeated request means."""
        for flight in self.flights:
            is_same = (flight.session_id, flight.request_digest) == (session_id, request_digest)
            if is_same and flight.idempotency_key == idempotency_key and not flight.is_abandoned:
                return flight
        return None

    @property
    def is_busy(self) -> bool:
        locks = self._session_locks.values()
        return bool(self.flights) or self.control_lock.locked() or any(x.locked() for x in locks)


class RolloutStore:
    """At most `max_rollouts` idle rollouts, the least recently used given up first.

    store.events = EventLog(…, on_event=store.on_event)
    entry = await store.get("r1", partition=0, offset=17)
    """

    events: EventLog

    def __init__(self, max_rollouts: int) -> None:
        self._max_rollouts = max_rollouts
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._loading: dict[str, asyncio.Task[Entry]] = {}
        self._arrived: dict[str, list[Event]] = {}
        """Events of rollouts that are being read back right now."""

    def add(self, started: RolloutStarted, partition: int, offset: int) -> Entry:
        """A rollout that this gateway has just started."""
        return self._keep(Entry(RolloutState(started), partition, offset))

    def peek(self, rollout_id: str) -> Entry | None:
        """The rollout if it is in memory."""
        return self._entries.get(rollout_id)

    async def get(self, rollout_id: str, partition: int, offset: int) -> Entry:
        """The rollout that begins there. Raises UnknownRollout and LogUnavailable."""
        entry = self._entries.get(rollout_id)
        if entry is not None:
            self._entries.move_to_end(rollout_id)
            if entry.partition != partition:
                raise UnknownRollout(f"rollout {rollout_id} is not in partition {partition}")
            return entry
        if rollout_id not in self._loading:
            task = asyncio.create_task(self._load(rollout_id, partition, offset))
            self._loading[rollout_id] = task
            task.add_done_callback(lambda _: self._loading.pop(rollout_id, None))
        return await asyncio.shield(self._loading[rollout_id])

    async def find(self, rollout_id: str) -> Entry:
        """The rollout of that id, wherever it begins. Raises UnknownRollout and LogUnavailable."""
        entry = self._entries.get(rollout_id)
        if entry is not None:
            return entry
        return await self.get(rollout_id, *await self.events.find_rollout(rollout_id))

    async def catch_up(self, entry: Entry) -> None:
        """Have all that other processes appended about this rollout. Raises LogUnavailable."""
        await self.events.catch_up(entry.partition)

    def on_event(self, partition: int, event: Event) -> None:
        """Called with what others append, in log order."""
        entry = self._entries.get(event.rollout_id)
        if entry is not None:
            entry.add_foreign(event)
        elif event.rollout_id in self._arrived:
            self._arrived[event.rollout_id].append(event)

    async def _load(self, rollout_id: str, partition: int, offset: int) -> Entry:
        # What is appended while we read arrives through on_event; what comes twice is known by id.
        arrived = self._arrived[rollout_id] = []
        try:
            state: RolloutState | None = None
            async with aclosing(self.events.read_rollout(rollout_id, partition, offset)) as found:
                async for _, event in found:
                    if state is None:
                        assert isinstance(event, RolloutStarted)
                        state = RolloutState(event)
                    state.apply(event)
            assert state is not None
            entry = Entry(state, partition, offset)
            for event in arrived:
                entry.add_foreign(event)
        finally:
            del self._arrived[rollout_id]
        metrics.READ_BACKS.inc()
        return self._keep(entry)

    def _keep(self, entry: Entry) -> Entry:
        self._entries[entry.state.rollout_id] = entry
        for rollout_id in list(self._surplus()):
            del self._entries[rollout_id]
        metrics.ROLLOUTS.set(len(self._entries))
        return entry

    def _surplus(self) -> Iterator[str]:
        num_surplus = len(self._entries) - self._max_rollouts
        for rollout_id, entry in list(self._entries.items())[:-1]:
            if num_surplus <= 0:
                return
            if not entry.is_busy:
                num_surplus -= 1
                yield rollout_id

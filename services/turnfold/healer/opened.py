"""The open rollouts of a partition, of which those that have been idle longest may rest on disk.

    max_bytes 100        r1 90 bytes                       memory: r1
    an event of r2       r1 90, r2 30 = 120 > 100          memory: r2        idle: r1
    an event of r1       r1 comes back, r2 goes            memory: r1        idle: r2

A rollout that comes back is the one that went: its state is written out whole. Pure but for `idle`,
which the caller provides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping

import msgspec

from turnfold.healer.fold import RolloutState, RunningFold
from turnfold.schemas.wire import decode_packed, encode_packed

NO_LIMIT = 2**62

_EVENT_BYTES = 500
"""What an event takes besides its tokens, roughly: names, spans, objects."""

_encoder = msgspec.msgpack.Encoder(enc_hook=encode_packed)
_decoder = msgspec.msgpack.Decoder(RolloutState, dec_hook=decode_packed)


class OpenRollouts:
    """Rollouts by id, in memory as far as they fit.

    opened = OpenRollouts(idle=TemporaryStore(), max_bytes=2**30)
    opened.add(running, len(record.value))
    running = opened.get("r1")            # None when it is not open
    opened.grew("r1", len(record.value))
    opened.remove("r1")
    """

    def __init__(
        self, idle: MutableMapping[str, bytes] | None = None, max_bytes: int = NO_LIMIT
    ) -> None:
        self.num_bytes = 0
        """Of what is in memory, estimated from the sizes of the events."""
        self._max_bytes = max_bytes
        self._idle: MutableMapping[str, bytes] = {} if idle is None else idle
        self._sizes: dict[str, int] = {}
        """All open rollouts, the oldest first."""
        self._awake: OrderedDict[str, RunningFold] = OrderedDict()
        """Those in memory; the one that has been idle longest comes first."""

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __contains__(self, rollout_id: object) -> bool:
        return rollout_id in self._sizes

    @property
    def num_idle(self) -> int:
        """Rollouts that are not in memory."""
        return len(self._sizes) - len(self._awake)

    def add(self, running: RunningFold, num_bytes: int) -> None:
        """A rollout began, with an event of this size."""
        rollout_id = running.rollout_id
        self._sizes[rollout_id] = 0
        self._awake[rollout_id] = running
        self.grew(rollout_id, num_bytes)

    def get(self, rollout_id: str) -> RunningFold | None:
        """The rollout, from where it rests if need be; None when it is not open."""
        running = self._awake.get(rollout_id)
        if running is None and rollout_id in self._sizes:
            running = RunningFold(_decoder.decode(self._idle.pop(rollout_id)))
            self._awake[rollout_id] = running
            self.num_bytes += self._sizes[rollout_id]
        return running

    def grew(self, rollout_id: str, num_bytes: int) -> None:
        """An event of this size was folded into a rollout, which is in memory."""
        num_bytes += _EVENT_BYTES
        self._sizes[rollout_id] += num_bytes
        self.num_bytes += num_bytes
        self._awake.move_to_end(rollout_id)
        # The one at hand stays, however large it is.
        while self.num_bytes > self._max_bytes and len(self._awake) > 1:
            self._lay_down()

    def remove(self, rollout_id: str) -> None:
        """A rollout has ended."""
        del self._awake[rollout_id]
        self.num_bytes -= self._sizes.pop(rollout_id)

    def _lay_down(self) -> None:
        rollout_id, running = self._awake.popitem(last=False)
        self._idle[rollout_id] = _encoder.encode(running.state())
        self.num_bytes -= self._sizes[rollout_id]

"""How far a restarted assembler need not read again. Pure.

Below `positions` lie only records of groups that had been decided on by the first `num_decided`
decisions of the batches topic, so a state that has taken in these decisions loses nothing when it
begins to read there. It is kept as the metadata of a committed offset; when it is lost, or does not
fit to the log, everything is read.
"""

from __future__ import annotations

import msgspec

from turnfold.assembler.groups import GroupsState
from turnfold.schemas.batches import Positions
from turnfold.schemas.wire import Wire

MAX_CHARS = 4000
"""Of the metadata of a committed offset; Kafka's own limit is 4096."""


class Checkpoint(Wire, frozen=True, kw_only=True):
    offset: int
    """Next offset of the batches topic when it was made."""
    num_decided: int
    """Groups decided on below `offset`."""
    positions: Positions


def checkpoint_text(state: GroupsState, offset: int) -> str:
    """The checkpoint of a state; empty when there are too many partitions for it."""
    made = Checkpoint(
        offset=offset,
        num_decided=len(state.decisions.decided),
        positions=state.low_positions(),
    )
    text = msgspec.json.encode(made).decode()
    return text if len(text) <= MAX_CHARS else ""


def read_checkpoint(text: str) -> Checkpoint | None:
    """None when the text is no checkpoint, as of an older version."""
    try:
        return msgspec.json.decode(text, type=Checkpoint)
    except msgspec.DecodeError:
        return None

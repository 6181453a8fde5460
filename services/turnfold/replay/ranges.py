"""Which part of a log is meant: offsets of its partitions, or a time from when to when. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import datetime

from turnfold.schemas.errors import UserError

OffsetRanges = Mapping[int, range]
"""Offsets by partition; other partitions are not meant at all."""

_OFFSETS = re.compile(r"(\d+):(\d*)-(\d*)")

END = 2**63 - 1
"""Stands for the end of a partition, wherever that is."""


def offset_ranges(texts: Iterable[str]) -> OffsetRanges:
    """The ranges that `--offsets` names; both ends are included, as in the source of a trajectory.

        ["0:100-200", "1:50-"]      {0: range(100, 201), 1: range(50, END)}

    Raises UserError for other texts, for an empty range and for a partition that is named twice.
    """
    found: dict[int, range] = {}
    for text in texts:
        matched = _OFFSETS.fullmatch(text.strip())
        if matched is None:
            raise UserError(
                f"offsets {text!r}: expected PARTITION:FIRST-LAST, such as 0:100-200, 0:100- or 0:-200"
            )
        partition, first, last = matched.groups()
        offsets = range(int(first or 0), int(last) + 1 if last else END)
        if not offsets:
            raise UserError(f"offsets {text!r}: the first is after the last")
        if int(partition) in found:
            raise UserError(f"offsets {text!r}: partition {partition} is named twice")
        found[int(partition)] = offsets
    return found


def moment(text: str) -> float:
    """A time in Unix seconds, given as such or in ISO 8601.

        "1790000000", "2026-09-21T14:13:20Z", "2026-09-21 16:13:20+02:00", "2026-09-21"

    A time without a zone is UTC, so that a command means the same wherever it is given.
    """
    try:
        return float(text)
    except ValueError:
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(
            f"time {text!r}: expected Unix seconds or ISO 8601, such as 2026-09-21T14:13:20Z"
        ) from None
    if found.tzinfo is None:
        found = datetime.fromisoformat(f"{found.isoformat()}+00:00")
    return found.timestamp()


def between(starts: Mapping[int, int], ends: Mapping[int, int] | None) -> OffsetRanges:
    """The offsets from `starts` up to before `ends`, by partition; to the end of the log without."""
    return {
        partition: range(start, END if ends is None else max(start, ends[partition]))
        for partition, start in starts.items()
    }


def intersection(one: OffsetRanges, other: OffsetRanges) -> OffsetRanges:
    """What lies in both."""
    return {
        partition: range(
            max(one[partition].start, other[partition].start),
            min(one[partition].stop, other[partition].stop),
        )
        for partition in sorted(one.keys() & other.keys())
    }

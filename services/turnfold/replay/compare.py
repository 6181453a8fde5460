"""Rebuilt trajectories against those that the healer wrote, and what differs, for people."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from turnfold.healer.rows import FOLD_VERSION
from turnfold.schemas.trajectories import Row, Source, Trajectory

Key = tuple[str, int]
"""rollout_id and revision."""


class Difference(msgspec.Struct, frozen=True):
    """One thing that is not as the log says."""

    subject: str
    """`rollout r7`, `batch 3`, …"""
    what: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.what}"


class Leftover(msgspec.Struct, frozen=True):
    """A trajectory that no events gave, and the place of the event that is said to have completed it."""

    key: Key
    partition: int
    offset: int

    def is_unfounded(self, reached: Mapping[int, int], ends: Mapping[int, int]) -> bool:
        """Whether the log does not hold its events.

        It was folded up to `reached` (next offsets) and has grown to `ends` since: what lies between
        is of events that came too late to be folded.
        """
        is_folded = self.offset < reached.get(self.partition, 0)
        return is_folded or self.offset >= ends.get(self.partition, 0)

    @property
    def difference(self) -> Difference:
        return Difference(named(self.key), "was written, but its events are not in the log")


class Written:
    """The digests of the trajectories in the log."""

    def __init__(self) -> None:
        self._digests: dict[Key, str] = {}
        self._doubled: list[Key] = []
        self.of_other_versions: dict[Key, int] = {}
        """Fold versions of those that another version wrote: their bytes say nothing about ours."""
        self._matched: set[Key] = set()
        self._places: dict[Key, tuple[int, int]] = {}
        """Partition and offset of the event that completed it."""

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, key: Key, digest: str, source: Source, fold_version: int = FOLD_VERSION) -> None:
        """`digest` is that of the record, `source` says of which events the trajectory was made."""
        if fold_version != FOLD_VERSION:
            self.of_other_versions[key] = fold_version
        if key in self._digests:
            self._doubled.append(key)
        else:
            self._digests[key] = digest
            self._places[key] = (source.partition, source.last_offset)

    def difference_to(self, key: Key, digest: str) -> Difference | None:
        """None when the log holds the very bytes of the trajectory with this digest, or those that
        another version of the fold made of its events."""
        self._matched.add(key)
        if key not in self._digests:
            return Difference(named(key), "finished in the log, but no trajectory was written")
        if self._digests[key] != digest and key not in self.of_other_versions:
            return Difference(named(key), "the trajectory in the log has other bytes")
        return None

    def leftovers(self) -> list[Leftover]:
        """Trajectories that were not asked for, in their order: what became of their events?"""
        return [
            Leftover(key, *self._places[key])
            for key in sorted(self._digests.keys() - self._matched)
        ]

    def doubled(self) -> list[Difference]:
        """Trajectories written twice."""
        return [Difference(named(key), "was written more than once") for key in self._doubled]


def named(key: Key) -> str:
    rollout_id, revision = key
    return f"rollout {rollout_id}" + (f" revision {revision}" if revision else "")


def combined_digest(digests: Mapping[Key, str]) -> str:
    """One digest for a set of trajectories, whatever order they came in."""
    lines = [f"{rollout} {revision} {digest}\n" for (rollout, revision), digest in digests.items()]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def explain(written: Trajectory, rebuilt: Trajectory) -> list[str]:
    """What differs between two trajectories of one rollout, field by field and row by row.

    reward: written 1.0, rebuilt 0.5
    row 0: token 7: written 13, rebuilt 198
    """
    lines = []
    for field in Trajectory.__struct_fields__:
        if field == "rows":
            lines += _explain_rows(written.rows, rebuilt.rows)
            continue
        left, right = getattr(written, field), getattr(rebuilt, field)
        if left != right:
            lines.append(f"{field}: written {_short(left)}, rebuilt {_short(right)}")
    return lines


def _explain_rows(written: Iterable[Row], rebuilt: Iterable[Row]) -> list[str]:
    left, right = list(written), list(rebuilt)
    lines = []
    if len(left) != len(right):
        lines.append(f"rows: written {len(left)}, rebuilt {len(right)}")
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        for field, what in (("token_ids", "token"), ("loss_mask", "mask"), ("logprobs", "logprob")):
            difference = _first_difference(getattr(one, field), getattr(other, field))
            if difference:
                lines.append(f"row {index}: {what} {difference}")
        if (one.turns, one.policy_versions) != (other.turns, other.policy_versions):
            lines.append(f"row {index}: turn or version spans differ")
    return lines


def _first_difference(written: Iterable[float], rebuilt: Iterable[float]) -> str:
    left, right = list(written), list(rebuilt)
    for place, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return f"{place}: written {one}, rebuilt {other}"
    return "" if len(left) == len(right) else f"count: written {len(left)}, rebuilt {len(right)}"


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"

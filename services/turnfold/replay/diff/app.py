"""Reads two sets of trajectories, from files or from topics, and compares them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from turnfold.log.records import Record
from turnfold.log.settings import Kafka
from turnfold.replay.client import FileLog, KafkaLog, LogSource
from turnfold.replay.diff.comparison import Change, Comparison, Results, compare
from turnfold.replay.diff.tokens import token_lines
from turnfold.replay.rebuild import Selection
from turnfold.schemas import codec
from turnfold.schemas.errors import UserError
from turnfold.schemas.trajectories import Trajectory


class Side:
    """Trajectories of a file or of a namespace; may be read more than once.

    Side("rows.jsonl", kafka)     written by `replay --out` or `refold --out`; also .msgpack
    Side("bug.tflog", kafka)      the trajectories in an exported log
    Side("turnfold", kafka)       those on the topic of a namespace
    """

    def __init__(self, name: str, kafka: Kafka) -> None:
        self.name, self._kafka = name, kafka
        self._path = Path(name)
        if not self._path.suffix or self._path.is_file():
            return
        if self._path.suffix in (".jsonl", ".msgpack", ".tflog", ".parquet"):
            raise UserError(f"{name} is not a file")

    def trajectories(self) -> AsyncIterator[Trajectory]:
        """Raises UserError for a file that holds no trajectories."""
        if not self._path.is_file():
            return _of_log(KafkaLog(self._kafka, self.name))
        match self._path.suffix:
            case ".tflog":
                return _of_log(FileLog(self._path))
            case ".jsonl":
                return _of_lines(self._path)
            case ".msgpack":
                return _of_array(self.name, self._path.read_bytes())
        raise UserError(
            f"{self.name}: expected a .jsonl, .msgpack or .tflog file or a namespace; parquet files "
            "hold rows without their ledger"
        )


async def _of_log(source: LogSource) -> AsyncIterator[Trajectory]:
    async for record in source.read(source.topics.trajectories):
        yield _decoded(record)


def _decoded(record: Record) -> Trajectory:
    try:
        return codec.decode(Trajectory, record.value or b"", record.content_type)
    except codec.CodecError as error:
        raise UserError(f"{record}: {error}") from error


async def _of_lines(path: Path) -> AsyncIterator[Trajectory]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield codec.decode(Trajectory, line, codec.JSON)
            except codec.CodecError as error:
                raise UserError(f"{path}, line {number}: {error}") from error


async def _of_array(name: str, data: bytes) -> AsyncIterator[Trajectory]:
    try:
        found: list[Trajectory] = codec.decode(list[Trajectory], data)
    except codec.CodecError as error:
        raise UserError(f"{name}: {error}") from error
    for trajectory in found:
        yield trajectory


async def diff(left: Side, right: Side, selection: Selection) -> Comparison:
    """Compare the newest revision of each rollout; nothing is kept of a trajectory's tokens."""
    sides = []
    for side in (left, right):
        results = Results()
        async for trajectory in side.trajectories():
            if selection.holds_rollout(trajectory.rollout_id, trajectory.group_id):
                results.add(trajectory)
        sides.append(results)
    return compare(*sides)


async def tokens(left: Side, right: Side, changes: list[Change]) -> dict[str, list[str]]:
    """The tokens that differ, by rollout: a second look at the trajectories of these changes."""
    one, other = await _newest(left, changes), await _newest(right, changes)
    return {
        change.rollout_id: token_lines(one[change.rollout_id], other[change.rollout_id])
        for change in changes
    }


async def _newest(side: Side, changes: list[Change]) -> dict[str, Trajectory]:
    wanted = {change.rollout_id for change in changes}
    found: dict[str, Trajectory] = {}
    async for trajectory in side.trajectories():
        known = found.get(trajectory.rollout_id)
        if trajectory.rollout_id in wanted and (
            known is None or known.revision <= trajectory.revision
        ):
            found[trajectory.rollout_id] = trajectory
    return found

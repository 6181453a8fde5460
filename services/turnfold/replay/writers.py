"""Trajectories for other tools: msgpack, JSON lines, or parquet with one line per row.

msgpack   one array of trajectories; turnfold.schemas.codec.decode(list[Trajectory], data)
jsonl     one trajectory a line, token ids as plain integers
parquet   one line per training row: ids, mask and logprobs as lists, with reward and names
"""

from __future__ import annotations

from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from turnfold.schemas import codec
from turnfold.schemas.errors import UserError
from turnfold.schemas.trajectories import Row, Trajectory


class Writer(Protocol):
    """Takes trajectories; `close` completes the file but leaves it open."""

    def add(self, trajectory: Trajectory) -> None: ...
    def close(self) -> None: ...


def writer_for(suffix: str, file: BinaryIO) -> Writer:
    """The writer of a file name's ending, such as ".parquet". Raises UserError for others."""
    match suffix:
        case ".msgpack":
            return MsgpackWriter(file)
        case ".jsonl":
            return JsonLinesWriter(file)
        case ".parquet":
            return ParquetWriter(file)
    raise UserError(f"expected a file ending in .msgpack, .jsonl or .parquet, got {suffix!r}")


class MsgpackWriter:
    """One msgpack array. Its length is filled in at the end, so nothing is kept in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._num = file, 0
        self._start = file.tell()
        file.write(_array_header(0))

    def add(self, trajectory: Trajectory) -> None:
        self._num += 1
        self._file.write(codec.encode(trajectory))

    def close(self) -> None:
        end = self._file.tell()
        self._file.seek(self._start)
        self._file.write(_array_header(self._num))
        self._file.seek(end)


def _array_header(length: int) -> bytes:
    return b"\xdd" + length.to_bytes(4, "big")


class JsonLinesWriter:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def add(self, trajectory: Trajectory) -> None:
        self._file.write(codec.encode_json(trajectory) + b"\n")

    def close(self) -> None:
        pass


SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("rollout_id", pa.string()),
        ("revision", pa.int32()),
        ("index", pa.int32()),
        ("attempt", pa.int32()),
        ("split", pa.string()),
        ("status", pa.string()),
        ("reward", pa.float64()),
        ("row", pa.int32()),
        ("session_id", pa.string()),
        ("turn_ids", pa.list_(pa.string())),
        ("token_ids", pa.list_(pa.uint32())),
        ("loss_mask", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("min_policy_version", pa.int64()),
        ("max_policy_version", pa.int64()),
    ]
)


class ParquetWriter:
    """One line per training row; a trajectory without rows leaves none."""

    def __init__(self, file: BinaryIO, rows_per_group: int = 500) -> None:
        self._parquet = pq.ParquetWriter(file, SCHEMA, compression="zstd")
        self._rows_per_group = rows_per_group
        self._lines: list[dict[str, Any]] = []

    def add(self, trajectory: Trajectory) -> None:
        for index, row in enumerate(trajectory.rows):
            self._lines.append(_line(trajectory, index, row))
        if len(self._lines) >= self._rows_per_group:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._parquet.close()

    def _flush(self) -> None:
        if self._lines:
            self._parquet.write_table(pa.Table.from_pylist(self._lines, schema=SCHEMA))
        self._lines = []


def _line(trajectory: Trajectory, index: int, row: Row) -> dict[str, Any]:
    return {
        "run_id": trajectory.run_id,
        "group_id": trajectory.group_id,
        "task_id": trajectory.task_id,
        "rollout_id": trajectory.rollout_id,
        "revision": trajectory.revision,
        "index": trajectory.index,
        "attempt": trajectory.attempt,
        "split": trajectory.split,
        "status": trajectory.status,
        "reward": trajectory.reward,
        "row": index,
        "session_id": row.session_id,
        "turn_ids": [span.turn_id for span in row.turns],
        "token_ids": row.token_ids.array,
        "loss_mask": row.loss_mask.array,
        "logprobs": row.logprobs.array,
        "min_policy_version": trajectory.min_policy_version,
        "max_policy_version": trajectory.max_policy_version,
    }

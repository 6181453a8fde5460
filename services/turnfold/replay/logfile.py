"""A slice of the log in one compressed file, so that a bug report can carry it.

    magic line | frame | frame | … | last frame

A frame is its length (4 bytes, big-endian) and one zstd-compressed msgpack message: first a header,
then records, at the end a count and a sha256 of all that came before. A file that was cut off or
changed is noticed. Records keep their topic, partition, offset, time, key and headers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import cramjam
import msgspec

from turnfold.log.records import Record
from turnfold.schemas.errors import UserError
from turnfold.schemas.wire import Wire

MAGIC = b"turnfold log file 1\n"

_FRAME_BYTES = 4 * 1024 * 1024
_LENGTH_BYTES = 4


class LogFileError(UserError):
    """A file that is no log file, or that is not whole."""


class Header(Wire, frozen=True, kw_only=True, tag="header"):
    """What is in the file."""

    namespace: str
    """Prefix of the topics of the records."""
    topics: dict[str, int]
    """Number of partitions of each topic."""


class Records(Wire, frozen=True, kw_only=True, tag="records"):
    records: tuple[Record, ...]


class End(Wire, frozen=True, kw_only=True, tag="end"):
    num_records: int
    sha256: str
    """Of the bytes of the file before this frame."""


Frame = Header | Records | End

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def write_log(file: BinaryIO, header: Header, records: Iterable[Record]) -> int:
    """Write a whole log file and return the number of records."""
    writer = LogWriter(file, header)
    for record in records:
        writer.add(record)
    return writer.close()


class LogWriter:
    """Writes a log file record by record; without `close` the file is not whole."""

    def __init__(self, file: BinaryIO, header: Header) -> None:
        self.num_records = 0
        self._file = file
        self._sha256 = hashlib.sha256()
        self._waiting: list[Record] = []
        self._waiting_bytes = 0
        self._put(MAGIC)
        self._put_frame(header)

    def add(self, record: Record) -> None:
        self.num_records += 1
        self._waiting.append(record)
        self._waiting_bytes += len(record.value or b"") + 100
        if self._waiting_bytes >= _FRAME_BYTES:
            self._flush()

    def close(self) -> int:
        """Write the end; the file itself stays open. Returns the number of records."""
        self._flush()
        self._put_frame(End(num_records=self.num_records, sha256=self._sha256.hexdigest()))
        return self.num_records

    def _flush(self) -> None:
        if self._waiting:
            self._put_frame(Records(records=tuple(self._waiting)))
        self._waiting, self._waiting_bytes = [], 0

    def _put_frame(self, frame: Frame) -> None:
        packed = bytes(cramjam.zstd.compress(_encoder.encode(frame)))
        self._put(len(packed).to_bytes(_LENGTH_BYTES, "big") + packed)

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._sha256.update(data)


class LogReader:
    """Reads a log file; iterating raises LogFileError at the end when the file is not whole.

    reader = LogReader(file, "bug.tflog")
    reader.header.namespace
    for record in reader: ...
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.name = name
        self._file = file
        self._sha256 = hashlib.sha256()
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            raise LogFileError(f"{name} is no turnfold log file: it begins with {magic!r}")
        self._sha256.update(magic)
        header = self._frame()
        if not isinstance(header, Header):
            raise LogFileError(f"{name}: expected a header first, got {type(header).__name__}")
        self.header = header

    def __iter__(self) -> Iterator[Record]:
        for records in self.batches():
            yield from records

    def batches(self) -> Iterator[tuple[Record, ...]]:
        """The records frame by frame."""
        num_records = 0
        while True:
            before = self._sha256.hexdigest()
            frame = self._frame()
            if isinstance(frame, Records):
                num_records += len(frame.records)
                yield frame.records
            elif isinstance(frame, End):
                if (frame.num_records, frame.sha256) != (num_records, before):
                    raise self._torn(
                        f"its end names {frame.num_records} records, {num_records} came"
                    )
                return

    def _frame(self) -> Frame:
        length = self._read(_LENGTH_BYTES)
        packed = self._read(int.from_bytes(length, "big"))
        try:
            frame: Frame = _decoder.decode(bytes(cramjam.zstd.decompress(packed)))
        except (cramjam.DecompressionError, msgspec.MsgspecError) as error:
            raise self._torn(str(error)) from error
        return frame

    def _read(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        if len(data) < num_bytes:
            raise self._torn(f"{num_bytes} more bytes expected, {len(data)} left")
        self._sha256.update(data)
        return data

    def _torn(self, why: str) -> LogFileError:
        return LogFileError(f"{self.name} is cut off or damaged ({why}): export it again")

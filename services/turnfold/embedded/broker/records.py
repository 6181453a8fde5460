"""Record batches (message format v2): their headers, and the markers that end transactions.

A batch is a 61-byte header and its records, compressed or not. The broker stores batches as the producer
sent them and reads only the header, except where it must look inside (search by time, compaction).

    base_offset i64 | length i32 | leader_epoch i32 | magic i8 | crc u32 | attributes i16
    | last_offset_delta i32 | first_timestamp i64 | max_timestamp i64 | producer_id i64
    | producer_epoch i16 | base_sequence i32 | num_records i32 | records ...

`length` counts what follows it; the CRC covers `attributes` to the end, so that the broker may assign
`base_offset` without computing it anew.
"""

import struct
from typing import Any, NamedTuple

from turnfold.embedded.broker.aiokafka_private import build_batch, crc32c, iterate_records
from turnfold.embedded.broker.errors import ErrorCode, Refused

HEADER = struct.Struct(">qiibIhiqqqhii")
HEADER_SIZE = HEADER.size
MAGIC = 2
MAX_SEQUENCE = 0x7FFF_FFFF
"""Sequence numbers count up to this and start again at 0."""

_AFTER_LENGTH = 12
_CRC_AT = 17
_CRC_COVERS_FROM = 21
_LAST_OFFSET_DELTA_AT = 23
_COMPRESSION_BITS = 0x07
_TRANSACTIONAL_BIT = 0x10
_CONTROL_BIT = 0x20


class BatchHeader(NamedTuple):
    """The header of a batch, field by field."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    first_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    num_records: int

    @property
    def size(self) -> int:
        """Bytes of the whole batch, header included."""
        return self.length + _AFTER_LENGTH

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def last_sequence(self) -> int:
        return (self.base_sequence + self.last_offset_delta) & MAX_SEQUENCE

    @property
    def compression(self) -> int:
        """0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd."""
        return self.attributes & _COMPRESSION_BITS

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & _TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        """Whether this is the marker of a transaction's end, and no data."""
        return bool(self.attributes & _CONTROL_BIT)

    @property
    def is_idempotent(self) -> bool:
        """Whether the producer numbered this batch, so that a resent copy can be told."""
        return self.producer_id >= 0 and self.base_sequence >= 0 and not self.is_control


def read_header(buffer: bytes | bytearray | memoryview, position: int = 0) -> BatchHeader:
    """The header at `position`; nothing in it is checked."""
    return BatchHeader._make(HEADER.unpack_from(buffer, position))


def has_valid_checksum(batch: bytes | bytearray | memoryview, header: BatchHeader) -> bool:
    """Whether the bytes of a whole batch are those that its header's CRC was computed from."""
    with memoryview(batch)[_CRC_COVERS_FROM:] as covered:
        return crc32c(covered) == header.crc


def check_produced_batch(batch: bytes, max_bytes: int) -> BatchHeader:
    """The header of a batch that a client sent, after checking that it is exactly one sound batch.

    Raises Refused: CORRUPT_MESSAGE for a wrong length, format or checksum, INVALID_RECORD for several
    batches or a marker (only the broker writes those), MESSAGE_TOO_LARGE above `max_bytes`.
    """
    if len(batch) < HEADER_SIZE:
        raise Refused(ErrorCode.CORRUPT_MESSAGE, f"batch of {len(batch)} bytes has no full header")
    header = read_header(batch)
    if header.magic != MAGIC or header.size < HEADER_SIZE or header.size > len(batch):
        raise Refused(
            ErrorCode.CORRUPT_MESSAGE,
            f"expected a format {MAGIC} batch of at most {len(batch)} bytes, "
            f"got format {header.magic} with {header.size} bytes",
        )
    if header.size != len(batch):
        raise Refused(ErrorCode.INVALID_RECORD, "expected one batch a partition, got several")
    if header.is_control:
        raise Refused(ErrorCode.INVALID_RECORD, "clients may not write transaction markers")
    if header.last_offset_delta != header.num_records - 1:
        raise Refused(
            ErrorCode.INVALID_RECORD,
            f"{header.num_records} records cannot span {header.last_offset_delta + 1} offsets",
        )
    if header.size > max_bytes:
        raise Refused(
            ErrorCode.MESSAGE_TOO_LARGE,
            f"batch of {header.size} bytes is over max.message.bytes = {max_bytes}",
        )
    if not has_valid_checksum(batch, header):
        raise Refused(ErrorCode.CORRUPT_MESSAGE, "the batch's checksum does not match its bytes")
    return header


def with_base_offset(batch: bytes | bytearray, base_offset: int) -> bytearray:
    """A copy of `batch` at its place in the log, leader epoch 0."""
    placed = bytearray(batch)
    struct.pack_into(">q", placed, 0, base_offset)
    struct.pack_into(">i", placed, _AFTER_LENGTH, 0)
    return placed


def read_records(batch: bytes) -> list[Any]:
    """The records of one data batch, with their real offsets."""
    return list(iterate_records(batch))


def rebuild_batch(header: BatchHeader, records: list[Any]) -> bytearray:
    """The batch of `header` with only `records` left of its records.

    It keeps its offsets, as far as the last one that it spanned before, so that a consumer's position moves
    over the holes. It forgets its producer: a rebuilt batch is never compared with a resent one.
    """
    batch = with_base_offset(
        build_batch(records, header.base_offset, header.compression), header.base_offset
    )
    struct.pack_into(">i", batch, _LAST_OFFSET_DELTA_AT, header.last_offset_delta)
    struct.pack_into(">I", batch, _CRC_AT, crc32c(memoryview(batch)[_CRC_COVERS_FROM:]))
    return batch


def transaction_marker(
    producer_id: int, producer_epoch: int, *, is_commit: bool, now_ms: int
) -> bytes:
    """A control batch that commits or aborts what the producer wrote in its open transaction.

    Its one record has the key (version i16 = 0, type i16: 0 abort, 1 commit) and the value (version i16 = 0,
    coordinator epoch i32 = 0).
    """
    key = struct.pack(">hh", 0, 1 if is_commit else 0)
    value = struct.pack(">hi", 0, 0)
    # Lengths are zigzag varints: n is written as 2n while it fits in one byte.
    fields = bytes([0, 0, 0, 2 * len(key)]) + key + bytes([2 * len(value)]) + value + bytes([0])
    record = bytes([2 * len(fields)]) + fields
    attributes = _TRANSACTIONAL_BIT | _CONTROL_BIT
    covered = (
        struct.pack(">hiqqqhii", attributes, 0, now_ms, now_ms, producer_id, producer_epoch, -1, 1)
        + record
    )
    length = len(covered) + _CRC_COVERS_FROM - _AFTER_LENGTH
    return struct.pack(">qiibI", 0, length, 0, MAGIC, crc32c(covered)) + covered


def marker_is_commit(marker: bytes) -> bool:
    """Whether a control batch commits (else it aborts)."""
    key = next(iter(iterate_records(marker))).key
    (marker_type,) = struct.unpack_from(">h", key, 2)
    return bool(marker_type == 1)

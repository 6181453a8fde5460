"""All that the broker borrows from aiokafka: request layouts, the record codec and the checksum.

aiokafka has the layout of every request it can send and of every answer it can read, so the broker needs
none of its own. They are no public interface of aiokafka: its version is pinned, and no other module of
the broker imports it.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from aiokafka.protocol import (
    admin,
    commit,
    coordination,
    fetch,
    group,
    metadata,
    offset,
    produce,
    transaction,
)
from aiokafka.protocol.types import Array, Schema
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c

__all__ = ["Array", "Schema", "build_batch", "crc32c", "iterate_records", "request_structs"]

_MODULES: tuple[ModuleType, ...] = (
    admin,
    commit,
    coordination,
    fetch,
    group,
    metadata,
    offset,
    produce,
    transaction,
)

# The builder refuses records beyond this size; the broker checks sizes elsewhere.
_NO_SIZE_LIMIT = 1 << 30


def request_structs(name: str) -> dict[int, Any]:
    """The request classes called `name`, by API version: `Fetch` gives FetchRequest_v0, _v1, ...

    Each has `decode(bytes_io)`, `SCHEMA`, and the class of its answer as `RESPONSE_TYPE`.
    """
    prefix = f"{name}Request_v"
    return {
        int(attribute.removeprefix(prefix)): struct_class
        for module in _MODULES
        for attribute, struct_class in vars(module).items()
        if attribute.startswith(prefix)
    }


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """The Castagnoli checksum of a batch."""
    checksum: int = calc_crc32c(data)
    return checksum


def iterate_records(batch: bytes) -> Iterator[Any]:
    """The records of one batch, decompressed, with `offset`, `timestamp`, `key`, `value`, `headers`."""
    yield from MemoryRecords(batch).next_batch()


def build_batch(records: list[Any], base_offset: int, compression: int) -> bytearray:
    """One batch of `records`, which keep their offsets; its header still says base offset 0, no producer."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=compression,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=_NO_SIZE_LIMIT,
    )
    for record in records:
        builder.append(
            record.offset - base_offset,
            timestamp=record.timestamp,
            key=record.key,
            value=record.value,
            headers=list(record.headers),
        )
    return bytearray(builder.build())

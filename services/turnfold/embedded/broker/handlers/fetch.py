"""Fetch and ListOffsets: reading, waiting for what is not there yet, and finding offsets."""

import asyncio
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from turnfold.embedded.broker.broker import Broker
from turnfold.embedded.broker.errors import ErrorCode, Refused
from turnfold.embedded.broker.partition_log import PartitionLog, ReadResult
from turnfold.embedded.broker.protocol import Request

READ_COMMITTED = 1
LATEST = -1
EARLIEST = -2


class Wanted(NamedTuple):
    """One partition of a fetch request. `log` is None if there is no such partition."""

    topic: str
    number: int
    offset: int
    max_bytes: int
    log: PartitionLog | None

    @property
    def error(self) -> ErrorCode:
        if self.log is None or self.log.is_closed:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if not self.log.start_offset <= self.offset <= self.log.end_offset:
            return ErrorCode.OFFSET_OUT_OF_RANGE
        return ErrorCode.NONE


async def fetch(broker: Broker, request: Request) -> list[bytes]:
    """Wait until there is enough to read or time is up, then read.

    The answer is the whole frame in pieces, so that record batches are never copied.
    """
    body = request.body
    wanted = list(_wanted(broker, request))
    read_committed = body["isolation_level"] == READ_COMMITTED
    await _wait_for_bytes(
        wanted, max(body["min_bytes"], 1), body["max_wait_time"] / 1000, read_committed
    )
    return _frame(request, wanted, read_committed)


async def list_offsets(broker: Broker, request: Request) -> dict[str, Any]:
    """The first or last offset of partitions, or the first one at or after a time."""
    read_committed = request.body.get("isolation_level") == READ_COMMITTED
    topics = []
    for topic in request.body["topics"]:
        partitions = [
            _find_offset(broker, topic["topic"], part, read_committed)
            for part in topic["partitions"]
        ]
        topics.append({"topic": topic["topic"], "partitions": partitions})
    return {"topics": topics}


def _find_offset(
    broker: Broker, topic: str, part: dict[str, Any], read_committed: bool
) -> dict[str, Any]:
    answer = {
        "partition": part["partition"],
        "error_code": ErrorCode.NONE,
        "timestamp": -1,
        "offset": -1,
    }
    try:
        log = broker.topics.partition(topic, part["partition"])
    except Refused as refused:
        return {**answer, "error_code": refused.code}
    if part["timestamp"] == LATEST:
        answer["offset"] = log.last_stable_offset if read_committed else log.end_offset
    elif part["timestamp"] == EARLIEST:
        answer["offset"] = log.start_offset
    else:
        found = log.find_timestamp(part["timestamp"])
        if found is not None:
            answer["offset"], answer["timestamp"] = found
    return answer


def _wanted(broker: Broker, request: Request) -> Iterator[Wanted]:
    for topic in request.body["topics"] or []:
        for part in topic["partitions"]:
            # The field's name differs between the versions' layouts.
            offset = part["offset"] if "offset" in part else part["fetch_offset"]
            log = broker.topics.find_partition(topic["topic"], part["partition"])
            yield Wanted(topic["topic"], part["partition"], offset, part["max_bytes"], log)


async def _wait_for_bytes(
    wanted: list[Wanted], min_bytes: int, timeout_s: float, read_committed: bool
) -> None:
    """Return when `min_bytes` can be read in all, a partition is in error, or time is up."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    news = asyncio.Event()
    logs = [want.log for want in wanted if want.log is not None]
    for log in logs:
        log.add_waiter(news)
    try:
        async with asyncio.timeout_at(deadline):
            while not _is_due(wanted, min_bytes, read_committed):
                news.clear()
                await news.wait()
    except TimeoutError:
        pass
    finally:
        for log in logs:
            log.remove_waiter(news)


def _is_due(wanted: list[Wanted], min_bytes: int, read_committed: bool) -> bool:
    size = 0
    for want in wanted:
        if want.log is None or want.error is not ErrorCode.NONE:
            return True
        size += want.log.available_bytes(
            want.offset, min_bytes - size, read_committed=read_committed
        )
        if size >= min_bytes:
            return True
    return False


def _frame(request: Request, wanted: list[Wanted], read_committed: bool) -> list[bytes]:
    """The answer, laid out by hand for versions 4 to 11:

    size i32 | correlation id i32 | throttle i32 | (v7: error i16, session i32)
    | topics [ name string | partitions [ partition ... ] ]
    """
    version = request.version
    by_topic: dict[str, list[Wanted]] = {}
    for want in wanted:
        by_topic.setdefault(want.topic, []).append(want)
    pieces = [struct.pack(">i", 0) + (struct.pack(">hi", 0, 0) if version >= 7 else b"")]
    pieces.append(struct.pack(">i", len(by_topic)))
    budget = request.body["max_bytes"]
    is_first = True
    for topic, parts in by_topic.items():
        name = topic.encode()
        pieces.append(struct.pack(">h", len(name)) + name + struct.pack(">i", len(parts)))
        for want in parts:
            result = _read(want, budget, is_first=is_first, read_committed=read_committed)
            size = sum(len(chunk) for chunk in result.chunks)
            budget -= size
            is_first = is_first and not size
            pieces.append(_partition_header(version, want, result, size))
            pieces.extend(result.chunks)
    size = sum(len(piece) for piece in pieces)
    return [struct.pack(">ii", size + 4, request.correlation_id), *pieces]


def _read(want: Wanted, budget: int, *, is_first: bool, read_committed: bool) -> ReadResult:
    """At most `budget` bytes, except that the first batch of an answer may have any size."""
    nothing = ReadResult([], [] if read_committed else None)
    if want.log is None or want.error is not ErrorCode.NONE:
        return nothing
    limit = min(want.max_bytes, max(budget, 0))
    result = want.log.read(want.offset, limit, read_committed=read_committed)
    is_over = sum(len(chunk) for chunk in result.chunks) > limit
    return nothing if is_over and not is_first else result


def _partition_header(version: int, want: Wanted, result: ReadResult, size: int) -> bytes:
    """partition i32 | error i16 | end offset i64 | last stable offset i64 | (v5: start offset i64)
    | aborted [ producer i64, first offset i64 ] | (v11: preferred replica i32) | size of the records i32"""
    log = want.log if want.error is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION else None
    end_offset = log.end_offset if log else -1
    stable_offset = log.last_stable_offset if log else -1
    header = struct.pack(">ihqq", want.number, want.error, end_offset, stable_offset)
    if version >= 5:
        header += struct.pack(">q", log.start_offset if log else -1)
    header += struct.pack(">i", -1 if result.aborted is None else len(result.aborted))
    for aborted in result.aborted or []:
        header += struct.pack(">qq", aborted.producer_id, aborted.first_offset)
    if version >= 11:
        header += struct.pack(">i", -1)
    return header + struct.pack(">i", size)

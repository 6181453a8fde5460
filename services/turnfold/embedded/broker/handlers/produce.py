"""Produce: append batches to partitions."""

from typing import Any

from turnfold.embedded.broker.broker import Broker
from turnfold.embedded.broker.errors import ErrorCode, Refused
from turnfold.embedded.broker.protocol import Request
from turnfold.embedded.broker.records import HEADER_SIZE, read_header


async def produce(broker: Broker, request: Request) -> dict[str, Any] | None:
    """Each partition succeeds or fails by itself. With `acks=0` the client wants no answer."""
    topics = [
        {
            "topic": topic["topic"],
            "partitions": [
                _append(broker, topic["topic"], part["partition"], part["messages"])
                for part in topic["partitions"]
            ],
        }
        for topic in request.body["topics"]
    ]
    return None if request.body["required_acks"] == 0 else {"topics": topics}


def _append(broker: Broker, topic: str, number: int, batch: bytes | None) -> dict[str, Any]:
    answer = {
        "partition": number,
        "error_code": ErrorCode.NONE,
        "offset": -1,
        "timestamp": -1,
        "log_start_offset": -1,
    }
    try:
        partition = broker.topics.partition(topic, number)
        answer["log_start_offset"] = partition.start_offset
        if not batch:
            raise Refused(ErrorCode.INVALID_RECORD, "expected a batch, got none")
        _check_producer(broker, topic, number, batch)
        max_bytes = broker.topics.get(topic).config.number("max.message.bytes")
        answer["offset"] = partition.append(batch, max_bytes=max_bytes)
    except Refused as refused:
        answer["error_code"] = refused.code
    return answer


def _check_producer(broker: Broker, topic: str, number: int, batch: bytes) -> None:
    """Raises Refused if the batch's producer was fenced off, or has not announced the partition."""
    if len(batch) < HEADER_SIZE:
        return
    header = read_header(batch)
    if header.producer_id >= 0:
        broker.transactions.check_write(
            header.producer_id,
            header.producer_epoch,
            topic,
            number,
            is_transactional=header.is_transactional,
        )

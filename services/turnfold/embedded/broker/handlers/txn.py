"""The requests of idempotent and transactional producers."""

from typing import Any

from turnfold.embedded.broker.broker import Broker
from turnfold.embedded.broker.errors import ErrorCode, Refused
from turnfold.embedded.broker.handlers.offsets import requested_offsets
from turnfold.embedded.broker.protocol import Request


async def init_producer_id(broker: Broker, request: Request) -> dict[str, Any]:
    try:
        producer_id, epoch = broker.transactions.init_producer(
            request.body["transactional_id"], request.body["transaction_timeout_ms"]
        )
    except Refused as refused:
        return {"error_code": refused.code, "producer_id": -1, "producer_epoch": -1}
    return {"error_code": ErrorCode.NONE, "producer_id": producer_id, "producer_epoch": epoch}


async def add_partitions_to_txn(broker: Broker, request: Request) -> dict[str, Any]:
    """All partitions are added, or none."""
    body = request.body
    partitions = [
        (topic["topic"], number) for topic in body["topics"] for number in topic["partitions"]
    ]
    unknown = {p for p in partitions if broker.topics.find_partition(*p) is None}
    error = ErrorCode.OPERATION_NOT_ATTEMPTED
    if not unknown:
        error = ErrorCode.NONE
        try:
            broker.transactions.add_partitions(*_producer(body), partitions)
        except Refused as refused:
            error = refused.code
    unknown_error = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return {
        "errors": [
            {
                "topic": topic["topic"],
                "partition_errors": [
                    {
                        "partition": number,
                        "error_code": unknown_error
                        if (topic["topic"], number) in unknown
                        else error,
                    }
                    for number in topic["partitions"]
                ],
            }
            for topic in body["topics"]
        ]
    }


async def add_offsets_to_txn(broker: Broker, request: Request) -> dict[str, Any]:
    error = ErrorCode.NONE
    try:
        broker.transactions.add_group(*_producer(request.body))
    except Refused as refused:
        error = refused.code
    return {"error_code": error}


async def txn_offset_commit(broker: Broker, request: Request) -> dict[str, Any]:
    """Offsets that count once the transaction commits."""
    body = request.body
    error = ErrorCode.NONE
    try:
        broker.transactions.add_offsets(
            *_producer(body), requested_offsets(body["group_id"], body["topics"])
        )
    except Refused as refused:
        error = refused.code
    return {
        "errors": [
            {
                "topic": topic["topic"],
                "partition_errors": [
                    {"partition": part["partition"], "error_code": error}
                    for part in topic["partitions"]
                ],
            }
            for topic in body["topics"]
        ]
    }


async def end_txn(broker: Broker, request: Request) -> dict[str, Any]:
    error = ErrorCode.NONE
    try:
        broker.transactions.end(
            *_producer(request.body), is_commit=request.body["transaction_result"]
        )
    except Refused as refused:
        error = refused.code
    return {"error_code": error}


def _producer(body: dict[str, Any]) -> tuple[str, int, int]:
    return body["transactional_id"], body["producer_id"], body["producer_epoch"]

"""OffsetCommit and OffsetFetch: how far a group has read."""

from typing import Any

from turnfold.embedded.broker.broker import Broker
from turnfold.embedded.broker.errors import ErrorCode
from turnfold.embedded.broker.protocol import Request
from turnfold.embedded.broker.store import CommittedOffset

NOT_COMMITTED = -1


async def offset_commit(broker: Broker, request: Request) -> dict[str, Any]:
    """Store the offsets of existing partitions, if the client is of the group's current generation."""
    body = request.body
    error = broker.groups.check_commit(
        body["consumer_group"], body["consumer_group_generation_id"], body["consumer_id"]
    )
    errors = {
        (offset.topic, offset.partition): _partition_error(broker, offset, error)
        for offset in requested_offsets(body["consumer_group"], body["topics"])
    }
    broker.store.commit_offsets(
        offset
        for offset in requested_offsets(body["consumer_group"], body["topics"])
        if errors[offset.topic, offset.partition] is ErrorCode.NONE
    )
    return {
        "topics": [
            {
                "topic": topic["topic"],
                "partitions": [
                    {
                        "partition": part["partition"],
                        "error_code": errors[topic["topic"], part["partition"]],
                    }
                    for part in topic["partitions"]
                ],
            }
            for topic in body["topics"]
        ]
    }


async def offset_fetch(broker: Broker, request: Request) -> dict[str, Any]:
    """The committed offsets of the partitions asked for, or of all that have one."""
    stored = {
        (offset.topic, offset.partition): offset
        for offset in broker.store.committed_offsets(request.body["consumer_group"])
    }
    wanted = request.body["topics"]
    if wanted is None:
        names = sorted({topic for topic, _ in stored})
        wanted = [
            {"topic": name, "partitions": [number for topic, number in stored if topic == name]}
            for name in names
        ]
    topics = [
        {
            "topic": topic["topic"],
            "partitions": [
                _describe(number, stored.get((topic["topic"], number)))
                for number in topic["partitions"]
            ],
        }
        for topic in wanted
    ]
    return {"topics": topics, "error_code": ErrorCode.NONE}


def requested_offsets(group_id: str, topics: list[dict[str, Any]]) -> list[CommittedOffset]:
    """The offsets in the body of an OffsetCommit or TxnOffsetCommit request."""
    return [
        CommittedOffset(
            group_id, topic["topic"], part["partition"], part["offset"], part["metadata"] or ""
        )
        for topic in topics
        for part in topic["partitions"]
    ]


def _partition_error(broker: Broker, offset: CommittedOffset, group_error: ErrorCode) -> ErrorCode:
    if group_error is not ErrorCode.NONE:
        return group_error
    is_known = broker.topics.find_partition(offset.topic, offset.partition) is not None
    return ErrorCode.NONE if is_known else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def _describe(number: int, offset: CommittedOffset | None) -> dict[str, Any]:
    return {
        "partition": number,
        "offset": offset.committed if offset else NOT_COMMITTED,
        "metadata": offset.metadata if offset else "",
        "error_code": ErrorCode.NONE,
    }

"""Metadata and FindCoordinator: who serves what. Here, one node serves everything."""

from typing import Any

from turnfold.embedded.broker.broker import NODE_ID, Broker
from turnfold.embedded.broker.errors import ErrorCode, Refused
from turnfold.embedded.broker.protocol import Request
from turnfold.embedded.broker.topics import DEFAULT_NUM_PARTITIONS


async def metadata(broker: Broker, request: Request) -> dict[str, Any]:
    """The topics asked for, or all. One that does not exist is created, unless broker or client mind."""
    names = request.body["topics"]
    if names is None:
        names = broker.topics.names()
    may_create = broker.auto_create_topics and request.body.get("allow_auto_topic_creation", True)
    node = {
        "node_id": NODE_ID,
        "host": request.broker_host,
        "port": broker.port,
        "rack": None,
    }
    return {
        "brokers": [node],
        "cluster_id": broker.cluster_id,
        "controller_id": NODE_ID,
        "topics": [_describe(broker, name, may_create=may_create) for name in names],
    }


async def find_coordinator(broker: Broker, request: Request) -> dict[str, Any]:
    return {
        "error_code": ErrorCode.NONE,
        "error_message": None,
        "coordinator_id": NODE_ID,
        "host": request.broker_host,
        "port": broker.port,
    }


def _describe(broker: Broker, name: str, *, may_create: bool) -> dict[str, Any]:
    error = ErrorCode.NONE
    num_partitions = 0
    try:
        if may_create and not broker.topics.has(name):
            broker.topics.create(name, DEFAULT_NUM_PARTITIONS, {})
        num_partitions = len(broker.topics.get(name).partitions)
    except Refused as refused:
        error = refused.code
    return {
        "error_code": error,
        "topic": name,
        "is_internal": False,
        "partitions": [
            {
                "error_code": ErrorCode.NONE,
                "partition": number,
                "leader": NODE_ID,
                "replicas": [NODE_ID],
                "isr": [NODE_ID],
                "offline_replicas": [],
            }
            for number in range(num_partitions)
        ],
    }

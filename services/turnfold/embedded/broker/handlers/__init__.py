"""One function for each kind of request: it takes the broker and the request, and returns the answer."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from turnfold.embedded.broker.broker import Broker
from turnfold.embedded.broker.handlers import admin, fetch, groups, metadata, offsets, produce, txn
from turnfold.embedded.broker.protocol import ApiKey, Request, versions_answer

Answer = dict[str, Any] | list[bytes] | None
"""Fields to encode, or a frame ready to send in pieces, or None where the client wants no answer."""
Handler = Callable[[Broker, Request], Awaitable[Answer]]


async def api_versions(broker: Broker, request: Request) -> dict[str, Any]:
    return versions_answer(request)


HANDLERS: Mapping[ApiKey, Handler] = {
    ApiKey.API_VERSIONS: api_versions,
    ApiKey.PRODUCE: produce.produce,
    ApiKey.FETCH: fetch.fetch,
    ApiKey.LIST_OFFSETS: fetch.list_offsets,
    ApiKey.METADATA: metadata.metadata,
    ApiKey.FIND_COORDINATOR: metadata.find_coordinator,
    ApiKey.OFFSET_COMMIT: offsets.offset_commit,
    ApiKey.OFFSET_FETCH: offsets.offset_fetch,
    ApiKey.JOIN_GROUP: groups.join_group,
    ApiKey.SYNC_GROUP: groups.sync_group,
    ApiKey.HEARTBEAT: groups.heartbeat,
    ApiKey.LEAVE_GROUP: groups.leave_group,
    ApiKey.LIST_GROUPS: groups.list_groups,
    ApiKey.DESCRIBE_GROUPS: groups.describe_groups,
    ApiKey.DELETE_GROUPS: groups.delete_groups,
    ApiKey.INIT_PRODUCER_ID: txn.init_producer_id,
    ApiKey.ADD_PARTITIONS_TO_TXN: txn.add_partitions_to_txn,
    ApiKey.ADD_OFFSETS_TO_TXN: txn.add_offsets_to_txn,
    ApiKey.TXN_OFFSET_COMMIT: txn.txn_offset_commit,
    ApiKey.END_TXN: txn.end_txn,
    ApiKey.CREATE_TOPICS: admin.create_topics,
    ApiKey.DELETE_TOPICS: admin.delete_topics,
    ApiKey.DELETE_RECORDS: admin.delete_records,
    ApiKey.CREATE_PARTITIONS: admin.create_partitions,
    ApiKey.DESCRIBE_CONFIGS: admin.describe_configs,
    ApiKey.ALTER_CONFIGS: admin.alter_configs,
}

WAITING = frozenset({ApiKey.FETCH, ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP})
"""Kinds of request that may wait for something to happen before they are answered."""

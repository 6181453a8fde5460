"""Which requests the broker understands, and how their bytes become dicts and dicts become answers.

A body is a plain dict: `{"group": "g", "topics": [{"topic": "t", "partitions": [0, 1]}]}`. An answer is a
dict too, written once with the fields of every version; an older version leaves out those it has no room for.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from io import BytesIO
from typing import Any

from turnfold.embedded.broker.aiokafka_private import Array, Schema, request_structs
from turnfold.embedded.broker.errors import ErrorCode

REQUEST_HEADER = struct.Struct(">hhih")
"""API key, API version, correlation id, length of the client id (-1: none)."""


class ApiKey(IntEnum):
    """The kinds of request that the broker answers, numbered as in the Kafka protocol guide."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42


@dataclass(frozen=True)
class Api:
    """One kind of request: the versions that are answered, and the layout of each."""

    min_version: int
    max_version: int
    structs: Mapping[int, Any]


def _api(
    name: str, min_version: int, max_version: int, same_layout: dict[int, int] | None = None
) -> Api:
    """`same_layout` names versions that aiokafka skips, and the version whose layout they share."""
    structs = request_structs(name)
    for version, twin in (same_layout or {}).items():
        structs.setdefault(version, structs[twin])
    missing = [v for v in range(min_version, max_version + 1) if v not in structs]
    assert not missing, f"{name}: aiokafka has no layout for versions {missing}"
    return Api(min_version, max_version, structs)


# Ranges start no lower than those of Apache Kafka 4 (KIP-896), so that what asks for less is found here,
# and end at the newest version whose layout aiokafka has right.
APIS: Mapping[ApiKey, Api] = {
    ApiKey.PRODUCE: _api("Produce", 3, 7),
    ApiKey.FETCH: _api("Fetch", 4, 11),
    ApiKey.LIST_OFFSETS: _api("Offset", 1, 3),
    ApiKey.METADATA: _api("Metadata", 1, 5),
    ApiKey.OFFSET_COMMIT: _api("OffsetCommit", 2, 3),
    ApiKey.OFFSET_FETCH: _api("OffsetFetch", 1, 3),
    ApiKey.FIND_COORDINATOR: _api("FindCoordinator", 0, 1),
    ApiKey.JOIN_GROUP: _api("JoinGroup", 2, 5, same_layout={3: 2, 4: 2}),
    ApiKey.HEARTBEAT: _api("Heartbeat", 0, 1),
    ApiKey.LEAVE_GROUP: _api("LeaveGroup", 0, 1),
    ApiKey.SYNC_GROUP: _api("SyncGroup", 0, 3, same_layout={2: 1}),
    ApiKey.DESCRIBE_GROUPS: _api("DescribeGroups", 0, 2),
    ApiKey.LIST_GROUPS: _api("ListGroups", 0, 1),
    # Version 0 would be followed by tokens that are no requests.
    ApiKey.SASL_HANDSHAKE: _api("SaslHandShake", 1, 1),
    ApiKey.API_VERSIONS: _api("ApiVersion", 0, 2),
    ApiKey.CREATE_TOPICS: _api("CreateTopics", 2, 3),
    ApiKey.DELETE_TOPICS: _api("DeleteTopics", 1, 3),
    ApiKey.DELETE_RECORDS: _api("DeleteRecords", 0, 1),
    ApiKey.INIT_PRODUCER_ID: _api("InitProducerId", 0, 0),
    ApiKey.ADD_PARTITIONS_TO_TXN: _api("AddPartitionsToTxn", 0, 0),
    ApiKey.ADD_OFFSETS_TO_TXN: _api("AddOffsetsToTxn", 0, 0),
    ApiKey.END_TXN: _api("EndTxn", 0, 0),
    ApiKey.TXN_OFFSET_COMMIT: _api("TxnOffsetCommit", 0, 0),
    ApiKey.DESCRIBE_CONFIGS: _api("DescribeConfigs", 1, 2),
    ApiKey.ALTER_CONFIGS: _api("AlterConfigs", 0, 1),
    ApiKey.SASL_AUTHENTICATE: _api("SaslAuthenticate", 0, 1),
    ApiKey.CREATE_PARTITIONS: _api("CreatePartitions", 0, 1),
    ApiKey.DELETE_GROUPS: _api("DeleteGroups", 0, 1),
}


class ProtocolError(Exception):
    """Bytes that are no request this broker understands: the connection is closed."""


@dataclass(frozen=True)
class Request:
    """One decoded request, and where it came from."""

    api_key: ApiKey
    version: int
    correlation_id: int
    client_id: str
    body: dict[str, Any]
    client_host: str
    """Address of the client, for descriptions of group members."""
    broker_host: str
    """What the broker tells this client to connect to: the address at which it was reached, unless told."""


def parse_request(frame: bytes, client_host: str, broker_host: str) -> Request:
    """The request in one frame (without its length prefix).

    A version query of a newer kind than we know is understood as version 0, as the protocol asks; its answer
    carries UNSUPPORTED_VERSION. Raises ProtocolError for anything else that is not in `APIS`.
    """
    try:
        number, version, correlation_id, client_id_length = REQUEST_HEADER.unpack_from(frame)
        body_at = REQUEST_HEADER.size + max(client_id_length, 0)
        client_id = frame[REQUEST_HEADER.size : body_at].decode()
        api_key = ApiKey(number)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ProtocolError(f"not a Kafka request, or one of an unknown kind: {error}") from error
    api = APIS[api_key]
    body: dict[str, Any] = {}
    if api.min_version <= version <= api.max_version:
        body = _decode_body(api.structs[version], frame, body_at)
    elif api_key is not ApiKey.API_VERSIONS:
        raise ProtocolError(
            f"expected {api_key.name} version {api.min_version} to {api.max_version}, got {version}"
        )
    return Request(api_key, version, correlation_id, client_id, body, client_host, broker_host)


def encode_answer(request: Request, answer: Mapping[str, Any]) -> bytes:
    """The whole frame of an answer, length prefix included; `throttle_time_ms` is filled in."""
    api = APIS[request.api_key]
    version = request.version if request.version <= api.max_version else 0
    schema = api.structs[version].RESPONSE_TYPE.SCHEMA
    body: bytes = schema.encode(_positional(schema, {"throttle_time_ms": 0, **answer}))
    return struct.pack(">ii", len(body) + 4, request.correlation_id) + body


def versions_answer(request: Request) -> dict[str, Any]:
    """What `ApiVersions` is answered: every kind of request with its oldest and newest version."""
    is_known = request.version <= APIS[ApiKey.API_VERSIONS].max_version
    return {
        "error_code": ErrorCode.NONE if is_known else ErrorCode.UNSUPPORTED_VERSION,
        "api_versions": [
            {"api_key": key, "min_version": api.min_version, "max_version": api.max_version}
            for key, api in APIS.items()
        ],
    }


def _decode_body(struct_class: Any, frame: bytes, body_at: int) -> dict[str, Any]:
    stream = BytesIO(frame)
    stream.seek(body_at)
    try:
        fields = struct_class.SCHEMA.decode(stream)
    except (ValueError, struct.error) as error:
        raise ProtocolError(f"damaged {struct_class.__name__}: {error}") from error
    named: dict[str, Any] = _named(struct_class.SCHEMA, fields)
    return named


def _named(layout: Any, value: Any) -> Any:
    """Tuples in the order of `layout` to dicts by field name, all the way down."""
    if isinstance(layout, Schema):
        return {
            name: _named(field, item)
            for name, field, item in zip(layout.names, layout.fields, value, strict=True)
        }
    if isinstance(layout, Array) and value is not None:
        return [_named(layout.array_of, item) for item in value]
    return value


def _positional(layout: Any, value: Any) -> Any:
    """Dicts by field name to tuples in the order of `layout`, without the fields it lacks."""
    if isinstance(layout, Schema):
        return tuple(
            _positional(field, value[name])
            for name, field in zip(layout.names, layout.fields, strict=True)
        )
    if isinstance(layout, Array) and value is not None:
        return [_positional(layout.array_of, item) for item in value]
    return value

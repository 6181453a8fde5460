"""The requests of administrators: topics, partitions, configurations, deleting records."""

from typing import Any

from turnfold.embedded.broker.broker import NODE_ID, Broker
from turnfold.embedded.broker.errors import ErrorCode, Refused
from turnfold.embedded.broker.protocol import Request
from turnfold.embedded.broker.topic_config import DEFAULTS, TopicConfig
from turnfold.embedded.broker.topics import DEFAULT_NUM_PARTITIONS

TOPIC_RESOURCE = 2
BROKER_RESOURCE = 4
SOURCE_TOPIC = 1
SOURCE_DEFAULT = 5
TO_THE_END = -1


async def create_topics(broker: Broker, request: Request) -> dict[str, Any]:
    is_dry_run = request.body.get("validate_only", False)
    return {
        "topic_errors": [
            _create(broker, topic, is_dry_run=is_dry_run)
            for topic in request.body["create_topic_requests"]
        ]
    }


async def delete_topics(broker: Broker, request: Request) -> dict[str, Any]:
    errors = []
    for name in request.body["topics"]:
        error = ErrorCode.NONE
        try:
            broker.topics.delete(name)
        except Refused as refused:
            error = refused.code
        errors.append({"topic": name, "error_code": error})
    return {"topic_error_codes": errors}


async def delete_records(broker: Broker, request: Request) -> dict[str, Any]:
    """Delete below an offset; -1 means everything that is there now."""
    return {
        "topics": [
            {
                "name": topic["name"],
                "partitions": [
                    _delete_before(broker, topic["name"], part["partition_index"], part["offset"])
                    for part in topic["partitions"]
                ],
            }
            for topic in request.body["topics"]
        ]
    }


async def create_partitions(broker: Broker, request: Request) -> dict[str, Any]:
    errors = []
    for topic in request.body["topic_partitions"]:
        name, num_partitions = topic["topic"], topic["new_partitions"]["count"]
        error, message = ErrorCode.NONE, None
        try:
            broker.topics.check_growth(name, num_partitions)
            if not request.body["validate_only"]:
                broker.topics.grow(name, num_partitions)
        except Refused as refused:
            error, message = refused.code, refused.message
        errors.append({"topic": name, "error_code": error, "error_message": message})
    return {"topic_errors": errors}


async def describe_configs(broker: Broker, request: Request) -> dict[str, Any]:
    return {"resources": [_describe(broker, resource) for resource in request.body["resources"]]}


async def alter_configs(broker: Broker, request: Request) -> dict[str, Any]:
    is_dry_run = request.body["validate_only"]
    return {
        "resources": [
            _alter(broker, resource, is_dry_run=is_dry_run)
            for resource in request.body["resources"]
        ]
    }


def _create(broker: Broker, topic: dict[str, Any], *, is_dry_run: bool) -> dict[str, Any]:
    name = topic["topic"]
    error, message = ErrorCode.NONE, None
    config = {entry["config_key"]: entry["config_value"] for entry in topic["configs"] or []}
    try:
        num_partitions = _requested_partitions(topic)
        if is_dry_run:
            broker.topics.check_new(name, num_partitions, config)
        else:
            broker.topics.create(name, num_partitions, config)
    except Refused as refused:
        error, message = refused.code, refused.message
    return {"topic": name, "error_code": error, "error_message": message}


def _requested_partitions(topic: dict[str, Any]) -> int:
    """The number of partitions, also where the client assigned replicas itself or left it to us."""
    assignment = topic["replica_assignment"]
    if assignment:
        return len(assignment)
    if topic["replication_factor"] not in (-1, 1):
        raise Refused(
            ErrorCode.INVALID_REPLICATION_FACTOR,
            f"expected replication factor 1 (there is one broker), got "
            f"{topic['replication_factor']}",
        )
    num_partitions: int = topic["num_partitions"]
    return DEFAULT_NUM_PARTITIONS if num_partitions == -1 else num_partitions


def _delete_before(broker: Broker, topic: str, number: int, offset: int) -> dict[str, Any]:
    low_watermark, error = -1, ErrorCode.NONE
    try:
        log = broker.topics.partition(topic, number)
        if offset == TO_THE_END:
            offset = log.end_offset
        if not 0 <= offset <= log.end_offset:
            raise Refused(ErrorCode.OFFSET_OUT_OF_RANGE)
        low_watermark = log.delete_before(offset)
    except Refused as refused:
        error = refused.code
    return {"partition_index": number, "low_watermark": low_watermark, "error_code": error}


def _describe(broker: Broker, resource: dict[str, Any]) -> dict[str, Any]:
    answer = {
        "error_code": ErrorCode.NONE,
        "error_message": None,
        "resource_type": resource["resource_type"],
        "resource_name": resource["resource_name"],
        "config_entries": [],
    }
    try:
        config = _config_of(broker, resource)
    except Refused as refused:
        return {**answer, "error_code": refused.code, "error_message": refused.message}
    names = resource["config_names"] or list(DEFAULTS)
    entries = [_entry(config, name) for name in names if name in DEFAULTS]
    return {**answer, "config_entries": entries}


def _config_of(broker: Broker, resource: dict[str, Any]) -> TopicConfig:
    """A topic's configuration; of the broker, the defaults that it gives to topics."""
    kind, name = resource["resource_type"], resource["resource_name"]
    if kind == TOPIC_RESOURCE:
        return broker.topics.get(name).config
    if kind == BROKER_RESOURCE and name == str(NODE_ID):
        return TopicConfig({})
    raise Refused(
        ErrorCode.INVALID_REQUEST,
        f"expected a topic, or broker {NODE_ID}; got {name!r} of resource type {kind}",
    )


def _entry(config: TopicConfig, name: str) -> dict[str, Any]:
    is_own = name in config.own
    return {
        "config_names": name,
        "config_value": config[name],
        "read_only": False,
        "is_default": not is_own,
        "config_source": SOURCE_TOPIC if is_own else SOURCE_DEFAULT,
        "is_sensitive": False,
        "config_synonyms": [],
    }


def _alter(broker: Broker, resource: dict[str, Any], *, is_dry_run: bool) -> dict[str, Any]:
    name = resource["resource_name"]
    config = {e["config_name"]: e["config_value"] for e in resource["config_entries"] or []}
    error, message = ErrorCode.NONE, None
    try:
        if resource["resource_type"] != TOPIC_RESOURCE:
            raise Refused(
                ErrorCode.INVALID_REQUEST, "the development broker has settings of topics only"
            )
        broker.topics.get(name)
        TopicConfig(config)
        if not is_dry_run:
            broker.topics.configure(name, config)
    except Refused as refused:
        error, message = refused.code, refused.message
    return {
        "error_code": error,
        "error_message": message,
        "resource_type": resource["resource_type"],
        "resource_name": name,
    }

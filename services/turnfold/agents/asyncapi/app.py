"""Writes the AsyncAPI document: every topic, who writes it, and what is in it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import msgspec
import yaml
from faststream.specification import AsyncAPI

from turnfold.log.faststream import message_broker
from turnfold.schemas import codec
from turnfold.schemas.batches import Decision
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.events import Event
from turnfold.schemas.policies import PolicyEvent
from turnfold.schemas.tasks import Task
from turnfold.schemas.topics import Topics
from turnfold.schemas.trajectories import Trajectory

_DESCRIPTION = """\
Messages are msgpack (content-type application/x-msgpack); the same messages are accepted as JSON
(application/json). Token ids, logprobs and masks are lists of numbers in JSON, and in msgpack their
little-endian bytes: uint32, float32 and uint8.
"""


def specification(topics: Topics, bootstrap: str) -> dict[str, Any]:
    """The document of these topics as plain data."""
    broker = message_broker(bootstrap, Event, topics.dead_letters)
    kinds = {
        topics.events: Event,
        topics.tasks: Task,
        topics.trajectories: Trajectory,
        topics.batches: Decision,
        topics.policies: PolicyEvent,
        topics.dead_letters: DeadLetter,
    }
    for spec in topics.specs():
        broker.publisher(
            spec.name, title=spec.name, description=spec.purpose, schema=kinds[spec.name]
        )
    api = AsyncAPI(broker, title="turnfold", version=_installed_version(), description=_DESCRIPTION)
    made: dict[str, Any] = api.to_specification().to_jsonable()
    made["defaultContentType"] = codec.MSGPACK
    # FastStream keeps its publishers in a set; the document should not change by chance.
    for part in (made["channels"], made["operations"], *made["components"].values()):
        ordered = sorted(part.items())
        part.clear()
        part.update(ordered)
    return made


def document(topics: Topics, bootstrap: str, kind: Literal["yaml", "json"]) -> str:
    """The document as text."""
    made = specification(topics, bootstrap)
    if kind == "json":
        return msgspec.json.format(msgspec.json.encode(made)).decode()
    return str(yaml.safe_dump(made, sort_keys=False, allow_unicode=True, width=100))


def _installed_version() -> str:
    try:
        return version("turnfold")
    except PackageNotFoundError:
        return "0"

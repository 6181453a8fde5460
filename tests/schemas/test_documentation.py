"""docs/events.md shows messages that decode, and names every field."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from turnfold.schemas import batches, codec, events, messages, policies, trajectories
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.events import Event
from turnfold.schemas.tasks import Task
from turnfold.schemas.testing import finished
from turnfold.schemas.trajectories import Trajectory

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
EXAMPLES = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
Message = Event | Task | Trajectory | batches.Decision | policies.PolicyEvent | DeadLetter


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_a_message(example: str) -> None:
    codec.decode(Message, example.encode(), codec.JSON)


def test_every_kind_of_message_has_an_example() -> None:
    shown = {type(codec.decode(Message, text.encode(), codec.JSON)) for text in EXAMPLES}
    assert shown == set(Message.__args__)


def test_the_msgpack_example_is_the_json_example() -> None:
    (text,) = re.findall(r"```msgpack-hex\n(.*?)```", PAGE, flags=re.DOTALL)
    assert bytes.fromhex(text) == codec.encode(finished("r1", reward=0.5))


def wire_structs() -> list[Any]:
    modules = (events, messages, trajectories, batches, policies)
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    }
    return sorted({*found, Task, DeadLetter}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", wire_structs(), ids=lambda kind: kind.__name__)
def test_every_field_is_named(kind: Any) -> None:
    missing = [
        field.name
        for field in msgspec.structs.fields(kind)
        if f"`{field.name}`" not in PAGE and f'"{field.name}"' not in PAGE
    ]
    assert not missing, f"docs/events.md does not mention {missing} of {kind.__name__}"

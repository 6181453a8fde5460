"""Fixtures that the tests of the whole repository share.

With TURNFOLD_TEST_BOOTSTRAP=host:port the tests that can do with any broker use that one, such as one of
Apache Kafka. Each test has a namespace of its own there, whose topics are deleted at the end.
"""

import asyncio
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from turnfold.embedded.broker.testing import (
    BOOTSTRAP_VARIABLE,
    BrokerProcess,
    ExternalBroker,
    RunningBroker,
)

# One thread for each process: two cores run several of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).parent.parent
EXTERNAL = os.environ.get(BOOTSTRAP_VARIABLE, "")
NOT_OURS = f"does to the broker what only its owner may, and {BOOTSTRAP_VARIABLE} names another's"


@pytest.fixture(scope="session")
def broker_of(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Path], RunningBroker]]:
    """The broker of a folder of tests, started for its first test."""
    with ExitStack() as running:

        @cache
        def find(folder: Path) -> RunningBroker:
            if EXTERNAL:
                return ExternalBroker(EXTERNAL)
            return running.enter_context(BrokerProcess(tmp_path_factory.mktemp("broker")))

        yield find


@pytest.fixture(scope="module")
def broker(
    request: pytest.FixtureRequest, broker_of: Callable[[Path], RunningBroker]
) -> RunningBroker:
    """A real broker, for tests that keep to topics of their own; see `new_namespace`."""
    return broker_of(request.path.parent)


@pytest.fixture
def killable_broker(broker: RunningBroker) -> BrokerProcess:
    """The same broker, for a test that kills it and starts it again."""
    if isinstance(broker, ExternalBroker):
        pytest.skip(NOT_OURS)
    return broker


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker of this test alone, with no topics at all."""
    if EXTERNAL:
        pytest.skip(NOT_OURS)
    with BrokerProcess(tmp_path / "broker") as running:
        yield running


@pytest.fixture(scope="session")
def new_namespace() -> Iterator[Callable[..., str]]:
    """Makes namespaces that no other test and no other run has, beginning with a word of the test's."""
    made: list[str] = []

    def make(word: str = "test") -> str:
        made.append(f"{word[:40]}-{uuid4().hex[:8]}")
        return made[-1]

    yield make
    if EXTERNAL and made:
        asyncio.run(_delete_topics(EXTERNAL, tuple(made)))


async def _delete_topics(bootstrap: str, namespaces: tuple[str, ...]) -> None:
    """As far as the broker allows it. What was derived from a namespace begins with its name."""
    from aiokafka.admin import AIOKafkaAdminClient
    from aiokafka.errors import KafkaError

    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        ours = [name for name in await admin.list_topics() if name.startswith(namespaces)]
        await admin.delete_topics(ours)
    except KafkaError as error:
        print(f"the topics of the tests stay on {bootstrap}: {error!r}")
    finally:
        await admin.close()


def _settings_structs() -> list[type[msgspec.Struct]]:
    """Every settings Struct: `Settings` of each settings.py, and the RunConfig."""
    from turnfold.schemas.run import RunConfig

    structs: list[type[msgspec.Struct]] = [RunConfig]
    for source in (ROOT / "services" / "turnfold", ROOT / "trainer" / "turnfold"):
        for path in sorted(source.rglob("settings.py")):
            if path.parent.name == "log":
                continue  # the base of the others
            module = ".".join(path.relative_to(source.parent).with_suffix("").parts)
            structs.append(importlib.import_module(module).Settings)
    return structs


@pytest.fixture(scope="session")
def settings_fields() -> set[str]:
    """Names of all settings that any process reads."""
    return {field for struct in _settings_structs() for field in struct.__struct_fields__}


@pytest.fixture(scope="session")
def settings_defaults() -> dict[str, str]:
    """TURNFOLD_* variable -> its default as the README writes it; empty when there is none."""
    from turnfold.schemas.settings import variable

    return {
        variable(field.name): _shown(field)
        for struct in _settings_structs()
        for field in msgspec.structs.fields(struct)
    }


def _shown(field: Any) -> str:
    default = field.default
    if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default is msgspec.NODEFAULT or default is None or default == "":
        return ""
    if isinstance(default, tuple | list | dict):
        return msgspec.json.encode(default).decode()
    return str(default).lower() if isinstance(default, bool) else str(default)

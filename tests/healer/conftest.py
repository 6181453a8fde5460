"""A real broker for the healer."""

from collections.abc import Iterator

import pytest

from turnfold.embedded.broker.testing import BrokerProcess


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker")) as process:
        yield process

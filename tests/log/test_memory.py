import gc
from collections.abc import Iterator

import pytest

from turnfold.log.memory import seldom_look_for_cycles


@pytest.fixture
def collector() -> Iterator[None]:
    """Python's collector, put back as it was."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("collector")
def test_the_collector_spares_what_is_there_and_still_finds_cycles() -> None:
    class Node:
        num_alive = 0

        def __init__(self) -> None:
            self.itself = self
            Node.num_alive += 1

        def __del__(self) -> None:
            Node.num_alive -= 1

    seldom_look_for_cycles()
    assert gc.get_freeze_count() > 1000
    for _ in range(2 * gc.get_threshold()[0]):
        Node()
    assert Node.num_alive < 2 * gc.get_threshold()[0]

"""Where work is done: on the event loop when it is small, else on another thread."""

import threading

import pytest

from turnfold.gateway.threads.app import off_loop


@pytest.mark.parametrize(("num_bytes", "is_on_loop"), [(0, True), (1000, True), (10**7, False)])
async def test_only_large_work_leaves_the_event_loop(num_bytes: int, is_on_loop: bool) -> None:
    thread = await off_loop(num_bytes, threading.get_ident)
    assert (thread == threading.get_ident()) is is_on_loop


@pytest.mark.parametrize("num_bytes", [0, 10**7])
async def test_arguments_results_and_errors_pass(num_bytes: int) -> None:
    assert await off_loop(num_bytes, int, "ff", base=16) == 255
    with pytest.raises(ValueError, match="base 10"):
        await off_loop(num_bytes, int, "ff")

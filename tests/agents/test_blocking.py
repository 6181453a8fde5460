"""An agent that blocks the event loop is named."""

from __future__ import annotations

import asyncio
import time

import pytest

from turnfold.agents.blocking.app import warning_when_blocked


async def test_the_line_that_blocks_the_loop_is_in_the_log_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with warning_when_blocked(0.2):
        await asyncio.sleep(0)
        deadline = time.monotonic() + 20
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.05)  # noqa: ASYNC251  # the mistake in question
        time.sleep(0.5)  # noqa: ASYNC251
    (record,) = caplog.records
    assert "has blocked all rollouts of this worker" in record.message
    assert "test_blocking.py" in record.message
    assert "the mistake in question" in record.message


async def test_a_loop_that_goes_on_is_not_complained_of(caplog: pytest.LogCaptureFixture) -> None:
    async with warning_when_blocked(30.0):
        await asyncio.sleep(0.05)
    assert caplog.records == []

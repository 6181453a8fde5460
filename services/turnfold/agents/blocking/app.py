"""Watches the event loop from a thread of its own.

An agent that sleeps or calls a synchronous client stops every rollout of its worker, and the
worker's place in its Kafka group with them. Nothing raises; somebody has to look.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

log = logging.getLogger("turnfold.worker")

_LIMIT_S = 5.0
_NUM_SHOWN_FRAMES = 4


@asynccontextmanager
async def warning_when_blocked(limit_s: float = _LIMIT_S) -> AsyncIterator[None]:
    """Meanwhile, log where the event loop is stuck whenever it has been for `limit_s` seconds."""
    pulse = _Pulse()
    watching = threading.Thread(
        target=_watch, args=(pulse, threading.get_ident(), limit_s), daemon=True
    )
    watching.start()
    beating = asyncio.create_task(_beat(pulse, limit_s / 4))
    try:
        yield
    finally:
        beating.cancel()
        pulse.is_over.set()


class _Pulse:
    def __init__(self) -> None:
        self.at = time.monotonic()
        self.is_over = threading.Event()


async def _beat(pulse: _Pulse, every_s: float) -> None:
    while True:
        pulse.at = time.monotonic()
        await asyncio.sleep(every_s)


def _watch(pulse: _Pulse, thread_id: int, limit_s: float) -> None:
    told_of = -1.0
    while not pulse.is_over.wait(limit_s / 4):
        last = pulse.at
        blocked_s = time.monotonic() - last
        if blocked_s > limit_s and last != told_of:
            told_of = last
            log.warning(
                "an agent has blocked all rollouts of this worker for %.1f s: await something "
                "asynchronous, use asyncio.to_thread, or run it as a --command. It is here:\n%s",
                blocked_s,
                _where(thread_id),
            )


def _where(thread_id: int) -> str:
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "(unknown)"
    return "".join(traceback.format_stack(frame)[-_NUM_SHOWN_FRAMES:]).rstrip()

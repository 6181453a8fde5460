"""The same job on different partitions, in as many processes as there are cores to run them.

    process 0: partitions 0, 2, 4 …
    process 1: partitions 1, 3, 5 …

What a job does to one partition must not depend on the others: then its results do not depend on
the number of processes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

import msgspec

from turnfold.replay.client import LogSource, OnProgress

T = TypeVar("T")

_LOOK_EVERY_S = 0.2
_WORTHWHILE_RECORDS = 20_000
"""From here on several processes save more than the half second that it takes to start them."""


class Share(msgspec.Struct, frozen=True):
    """Every `of`-th partition of a topic, from `index` on; all of them unless told otherwise."""

    index: int = 0
    of: int = 1

    def of_partitions(self, partitions: Collection[int]) -> list[int]:
        return [partition for partition in partitions if partition % self.of == self.index]


Job = Callable[[Share, OnProgress], Coroutine[Any, Any, T]]


async def divided(job: Job[T], num_processes: int, on_progress: OnProgress) -> list[T]:
    """What the job returns for each share. With several processes it must be one that pickles."""
    if num_processes == 1:
        return [await job(Share(), on_progress)]
    # A forked child would share our sockets and threads.
    context = multiprocessing.get_context("spawn")
    num_read = context.Value("q", 0)
    with ProcessPoolExecutor(num_processes, context, _share_count, (num_read,)) as pool:
        shares = [Share(index, num_processes) for index in range(num_processes)]
        parts = [pool.submit(_run, job, share) for share in shares]
        await _watch(parts, num_read, on_progress)
    return [part.result() for part in parts]


async def suitable_number(source: LogSource, topic: str) -> int:
    """How many processes to read a topic with: one for each core, when it is long enough."""
    if await source.num_records(topic) < _WORTHWHILE_RECORDS:
        return 1
    num_partitions = (await source.num_partitions([topic])).get(topic, 1)
    return min(_num_cores(), num_partitions)


def _num_cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


async def _watch(parts: Sequence[Future[Any]], num_read: Any, on_progress: OnProgress) -> None:
    """Tell how many records the processes have read, until all are done or one has failed."""
    pending = {asyncio.wrap_future(part) for part in parts}
    num_told = 0
    while pending:
        done, pending = await asyncio.wait(pending, timeout=_LOOK_EVERY_S)
        for part in done:
            part.result()
        number = num_read.value
        on_progress(number - num_told)
        num_told = number


_num_read: Any = None
"""In a worker process: the count of records that all of them have read."""


def _share_count(num_read: Any) -> None:
    global _num_read
    _num_read = num_read


def _count(number: int) -> None:
    with _num_read.get_lock():
        _num_read.value += number


def _run(job: Job[T], share: Share) -> T:
    return asyncio.run(job(share, _count))

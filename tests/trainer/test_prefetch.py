from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from turnfold.schemas.batches import BatchCut, Positions
from turnfold.trainer.client import BatchSource, prefetched
from turnfold.trainer.source import Batch, SourceError


class Source:
    """Batches 1, 2, … up to `last`, then an error."""

    def __init__(self, last: int) -> None:
        self.last, self.num_read = last, 0
        self.has_read_four = asyncio.Event()

    async def next(self) -> Batch:
        if self.num_read == self.last:
            raise SourceError("the log ends here")
        self.num_read += 1
        if self.num_read == 4:
            self.has_read_four.set()
        cut = BatchCut(
            run_id="t",
            index=self.num_read,
            groups=(),
            positions=Positions(tasks={}, trajectories={}),
            at=0.0,
            config_digest="",
        )
        return Batch(cut=cut, trajectories=())


def read(source: Any, depth: int, stop: asyncio.Event) -> Any:
    return prefetched(cast(BatchSource, source), depth, stop)


async def test_batches_are_read_ahead_while_one_is_in_use() -> None:
    source = Source(9)
    batches = read(source, 2, asyncio.Event())
    assert (await anext(batches)).cut.index == 1
    # Two wait in the queue, one for a place in it.
    await asyncio.wait_for(source.has_read_four.wait(), 5)
    assert [(await anext(batches)).cut.index for _ in range(3)] == [2, 3, 4]
    await batches.aclose()


async def test_an_error_while_reading_ahead_comes_after_the_batches_before_it() -> None:
    batches = read(Source(2), 5, asyncio.Event())
    assert [(await anext(batches)).cut.index for _ in range(2)] == [1, 2]
    with pytest.raises(SourceError, match="the log ends here"):
        await anext(batches)


async def test_a_stop_ends_the_batches_also_while_none_is_there() -> None:
    class Silent:
        async def next(self) -> Batch:
            await asyncio.Event().wait()
            raise AssertionError

    stop = asyncio.Event()
    batches = read(Silent(), 1, stop)
    waiting = asyncio.ensure_future(anext(batches, None))
    await asyncio.sleep(0)
    stop.set()
    assert await asyncio.wait_for(waiting, 5) is None

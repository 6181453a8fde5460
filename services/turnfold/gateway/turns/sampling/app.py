"""Asking an engine for a sample, and reading it while it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Self

from turnfold.gateway import metrics
from turnfold.gateway.backends.engine import (
    EngineError,
    Engines,
    GenerateRequest,
    Generation,
    OnTokens,
    PartialOutput,
)
from turnfold.gateway.calls import AnswerPiece
from turnfold.gateway.turns.sampling.reply import LiveReply
from turnfold.gateway.turns.sampling.resuming import (
    continued,
    cut_at_stop,
    joined,
    resumed_request,
    used_up,
)
from turnfold.history.render import Renderer

MAX_RESUMPTIONS = 16
"""An engine that ends one reply more often is not at work on it."""

_MAX_TOKENS_ON_LOOP = 64
"""More than these are read on another thread."""


async def sample(
    engines: Engines,
    request: GenerateRequest,
    renderer: Renderer,
    on_tokens: OnTokens | None = None,
) -> Generation:
    """One sample, continued when an engine ends it unasked. Raises EngineError.

    Engines abort what is in flight for new weights, or when somebody tells them to. The turn goes
    on from the tokens that they gave back, a bounded number of times.
    """
    told = None if on_tokens is None else _Told(on_tokens)
    sofar: PartialOutput | None = None
    resumed_at: list[int] = []
    for attempt in range(MAX_RESUMPTIONS + 1):
        asked = request if sofar is None else resumed_request(request, sofar, attempt)
        try:
            generation = await engines.generate(asked, told)
        except EngineError as error:
            if error.partial is None or attempt == MAX_RESUMPTIONS:
                raise
            sofar = error.partial if sofar is None else joined(sofar, error.partial)
        else:
            if sofar is None:
                return generation
            whole = continued(sofar, generation)
            return cut_at_stop(whole, resumed_at, request.params.stop, renderer)
        if told is not None:
            told.catch_up(sofar)
        if len(sofar.output_ids) >= request.max_tokens:
            return cut_at_stop(used_up(sofar), resumed_at, request.params.stop, renderer)
        resumed_at.append(len(sofar.output_ids))
        metrics.RESUMED.inc()
    raise AssertionError("the last attempt returns or raises")


class _Told:
    """Passes tokens on, and those of an aborted call that the engine kept to itself."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens = on_tokens
        self._num_tokens = 0

    def __call__(self, ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        self._num_tokens += len(ids)
        self._on_tokens(ids, logprobs)

    def catch_up(self, sofar: PartialOutput) -> None:
        ids = sofar.output_ids.tolist()[self._num_tokens :]
        if ids:
            self(ids, sofar.logprobs.tolist()[self._num_tokens :])


class LiveReader:
    """Reads a reply while its tokens come; what it reads goes to `publish`.

        async with LiveReader(reply, publish) as reader:
            generation = await sample(…, reader.on_tokens)
            await reader.finish(generation)

    Few tokens are read on the event loop, many on another thread, always in order.
    """

    def __init__(self, reply: LiveReply, publish: Callable[[Sequence[AnswerPiece]], None]) -> None:
        self.reply = reply
        self._publish = publish
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._news = asyncio.Event()
        self._is_ended = False

    async def __aenter__(self) -> Self:
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._reading.cancel()
        await asyncio.wait({self._reading})

    def on_tokens(self, ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        """The engine's next tokens."""
        self._ids += ids
        self._logprobs += logprobs
        self._news.set()

    async def finish(self, generation: Generation) -> None:
        """Read the rest of the reply, which the engine has ended."""
        self._is_ended = True
        self._news.set()
        await self._reading
        self._publish(await asyncio.to_thread(self.reply.end, generation))

    async def _read(self) -> None:
        while self._ids or not self._is_ended:
            await self._news.wait()
            self._news.clear()
            ids, logprobs = self._ids, self._logprobs
            self._ids, self._logprobs = [], []
            if len(ids) <= _MAX_TOKENS_ON_LOOP:
                self._publish(self.reply.feed(ids, logprobs))
            else:
                self._publish(await asyncio.to_thread(self.reply.feed, ids, logprobs))

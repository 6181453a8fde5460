"""Replicas of one model behind any kind of server: where a call goes, and what follows a failure.

A session stays on one replica while that answers. A connection that breaks is tried once more on a
new one, then the next replica is asked. A stream is tried again until its first token has come, not
afterwards: what was passed on cannot be sampled again. Whoever stops waiting aborts the request at
the engine. What differs from one server to another is its `Dialect`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import aiohttp
import msgspec

from turnfold.gateway.backends.engine import (
    EngineError,
    GenerateRequest,
    Generation,
    OnTokens,
)
from turnfold.gateway.backends.event_stream import END, EventData
from turnfold.gateway.backends.placement import ranked
from turnfold.gateway.backends.samples import check_prompt
from turnfold.gateway.threads.app import off_loop
from turnfold.gateway.tracing import step_span, trace_headers

log = logging.getLogger(__name__)

# vLLM closes an idle connection after 5 s; ours must let go first.
_KEEPALIVE_S = 4.0
_CONNECT_S = 5.0
_READ_BUFFER_BYTES = 256 * 1024
"""What an engine may be ahead of us in one answer."""

_EVENTS_AT_ONCE = 100
"""Of a stream, read without a look at anything else: a millisecond."""

_TOKEN_BYTES = 32
"""Of the JSON of a sampled token, roughly."""

_JSON = {"content-type": "application/json"}
_DOWN_S = 2.0
"""A replica that refused a connection is asked again after this time."""


class SampleStream(Protocol):
    """A sample that comes in chunks, each checked before anybody sees its tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""

    def feed(self, data: bytes) -> tuple[list[int], list[float]]:
        """The tokens that a chunk adds and their logprobs. Raises EngineError."""

    def end(self) -> Generation:
        """The whole sample. Raises EngineError; `engine_unavailable` when the stream was cut."""


class Dialect(Protocol):
    """What one kind of server calls things; it does no I/O."""

    generate_path: str
    abort_path: str
    limits_path: str
    """Where the server says how long a sequence may be."""
    health_path: str
    """Answers 200 whenever the server can take requests, an update of its weights included."""
    absent_hint: str
    """What to do about a server without the generate route."""

    def request_body(self, request: GenerateRequest, attempt: int, *, is_streamed: bool) -> bytes:
        """The body of one try; the first is attempt 0."""

    def abort_bodies(self, request_id: str) -> Sequence[bytes]:
        """What ends the request at the engine, whichever try it was."""

    def read(self, body: bytes) -> Generation:
        """The checked sample of a plain answer. Raises EngineError."""

    def stream(self) -> SampleStream:
        """A reader for one streamed answer."""

    def max_context_tokens(self, body: bytes) -> int | None:
        """The limit that `limits_path` tells. Raises msgspec.MsgspecError."""


Attempt = Callable[[aiohttp.ClientSession, str, int], Awaitable[Generation]]
"""One try on a client at a URL.

Raises TimeoutError, and aiohttp.ClientError where another try does no harm.
"""


class ReplicatedEngines:
    """Replicas of one model, all served by the same kind of server.

    It is made inside the event loop that it is used in.
    """

    def __init__(
        self, urls: Sequence[str], dialect: Dialect, *, vocab_size: int, timeout_s: float
    ) -> None:
        self.urls: Sequence[str] = tuple(url.rstrip("/") for url in urls)
        self.dialect = dialect
        self.vocab_size = vocab_size
        self._timeout_s = timeout_s
        self._client = _client(timeout_s, keepalive_timeout=_KEEPALIVE_S)
        # A connection that the server closed while idle fails at the next use; the second try must
        # not pick another one of the same age.
        self._fresh = _client(timeout_s, force_close=True)
        self._down_until: dict[str, float] = {}
        self._max_context_tokens: int | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Wait for aborts under way, then let go of all connections."""
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await self._client.close()
        await self._fresh.close()

    async def generate(
        self, request: GenerateRequest, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Sample on the session's replica, or on the next one when it cannot be reached."""
        # Some servers end at an id that is none, and with it everybody's requests.
        check_prompt(request.prompt_ids, self.vocab_size)

        async def attempt(client: aiohttp.ClientSession, url: str, number: int) -> Generation:
            body = self.dialect.request_body(request, number, is_streamed=on_tokens is not None)
            with step_span("engine.generate", engine=url):
                async with client.post(
                    url + self.dialect.generate_path,
                    data=body,
                    headers={**_JSON, "x-request-id": request.request_id, **trace_headers()},
                    allow_redirects=False,
                ) as response:
                    if response.status != 200:
                        raise self._error_of(response.status, await response.read())
                    if on_tokens is None:
                        return await self._whole(response)
                    return await self._streamed(response, on_tokens)

        return await self._at_first_reachable(request, attempt)

    async def _at_first_reachable(self, request: GenerateRequest, attempt: Attempt) -> Generation:
        failure: Exception | None = None
        for url in self._candidates(request.session_id):
            try:
                return await self._tried_twice(url, request.request_id, attempt)
            except aiohttp.ConnectionTimeoutError as error:
                failure = error
            except TimeoutError as error:
                self._abort_later(url, request.request_id)
                raise EngineError(
                    "engine_unavailable",
                    f"the engine gave no answer within {self._timeout_s:g} seconds",
                ) from error
            except aiohttp.ClientError as error:
                failure = error
            self._down_until[url] = time.monotonic() + _DOWN_S
        raise EngineError(
            "engine_unavailable", f"no inference engine can be reached ({type(failure).__name__})"
        ) from failure

    def _candidates(self, session_id: str) -> list[str]:
        order = ranked(session_id, self.urls)
        now = time.monotonic()
        up = [url for url in order if self._down_until.get(url, 0.0) <= now]
        return up or order

    async def _tried_twice(self, url: str, request_id: str, attempt: Attempt) -> Generation:
        """One call, tried a second time on a new connection after a transport error."""
        try:
            try:
                return await attempt(self._client, url, 0)
            except (TimeoutError, aiohttp.ClientConnectorError):
                raise
            except aiohttp.ClientError:
                return await attempt(self._fresh, url, 1)
        except (asyncio.CancelledError, _StreamGivenUp):
            self._abort_later(url, request_id)
            raise

    async def _whole(self, response: aiohttp.ClientResponse) -> Generation:
        body = await response.read()
        return await off_loop(len(body), self.dialect.read, body)

    async def _streamed(self, response: aiohttp.ClientResponse, on_tokens: OnTokens) -> Generation:
        streamed = self.dialect.stream()
        try:
            await _read_stream(response, streamed, on_tokens)
        except TimeoutError as error:
            raise _StreamGivenUp(
                "engine_unavailable",
                f"the engine did not end its reply within {self._timeout_s:g} seconds",
            ) from error
        except aiohttp.ClientError as error:
            if streamed.num_tokens == 0:
                raise
            raise _StreamGivenUp(
                "engine_unavailable",
                f"the engine's stream broke after {streamed.num_tokens} tokens "
                f"({type(error).__name__})",
            ) from error
        return await off_loop(streamed.num_tokens * _TOKEN_BYTES, streamed.end)

    def _abort_later(self, url: str, request_id: str) -> None:
        task = asyncio.create_task(self._abort(url, request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, url: str, request_id: str) -> None:
        for body in self.dialect.abort_bodies(request_id):
            posting = self._fresh.post(
                url + self.dialect.abort_path, data=body, headers=_JSON, timeout=_within(5.0)
            )
            try:
                async with posting:
                    pass
            except (aiohttp.ClientError, TimeoutError) as error:
                log.warning("could not abort %s at %s: %s", request_id, url, type(error).__name__)

    async def max_context_tokens(self) -> int | None:
        """The smallest limit of the replicas that answer; asked until all have answered."""
        if self._max_context_tokens is not None:
            return self._max_context_tokens
        answers = await asyncio.gather(*(self._limit_of(url) for url in self.urls))
        known = [limit for limit in answers if limit is not None]
        if len(known) == len(self.urls):
            self._max_context_tokens = min(known)
        return min(known, default=None)

    async def _limit_of(self, url: str) -> int | None:
        path = self.dialect.limits_path
        try:
            async with self._client.get(url + path, timeout=_within(5.0)) as response:
                return self.dialect.max_context_tokens(await response.read())
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError):
            return None

    async def num_reachable(self) -> int:
        """Replicas that say now that they can take requests."""
        return sum(await asyncio.gather(*(self._is_healthy(url) for url in self.urls)))

    async def _is_healthy(self, url: str) -> bool:
        path = self.dialect.health_path
        try:
            async with self._client.get(url + path, timeout=_within(2.0)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _error_of(self, status: int, body: bytes) -> EngineError:
        message = _message(status, body)
        if status == 404:
            return EngineError(
                "engine_error",
                f"the engine has no {self.dialect.generate_path}: {self.dialect.absent_hint}",
            )
        if status in (429, 503):
            return EngineError("engine_unavailable", f"the engine is busy: {message}")
        if status < 500 and status != 408:
            return EngineError("engine_refused", f"the engine refused the request: {message}")
        return EngineError("engine_error", f"the engine failed with {status}: {message}")


class _StreamGivenUp(EngineError):
    """Nobody reads on, and the engine may still be at work."""


def _client(timeout_s: float, **connections: Any) -> aiohttp.ClientSession:
    """A client that knows no proxy, cookie or password from elsewhere."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **connections),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=_within(timeout_s),
        read_bufsize=_READ_BUFFER_BYTES,
        trust_env=False,
    )


def _within(seconds: float) -> aiohttp.ClientTimeout:
    """From the request to the last byte of the answer, connecting included."""
    return aiohttp.ClientTimeout(total=seconds, connect=_CONNECT_S)


async def _read_stream(
    response: aiohttp.ClientResponse, streamed: SampleStream, on_tokens: OnTokens
) -> None:
    events = EventData()
    async for received in response.content.iter_any():
        for number, data in enumerate(events.feed(received), 1):
            if data == END:
                continue  # a connection whose response was read to its end is used again
            ids, logprobs = streamed.feed(data)
            if ids:
                on_tokens(ids, logprobs)
            if number % _EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)  # an engine that is far ahead must not hold up the others


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None


def _message(status: int, body: bytes) -> str:
    try:
        told = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"status {status}"
    return told.error.message[:500] if told.error else f"status {status}"

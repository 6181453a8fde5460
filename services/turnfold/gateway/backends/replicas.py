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
from typing import Protocol

import httpx
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
from turnfold.gateway.tracing import step_span, trace_headers

log = logging.getLogger(__name__)

# vLLM closes an idle connection after 5 s; ours must let go first.
_KEEPALIVE_S = 4.0
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


Attempt = Callable[[httpx.AsyncClient, str, int], Awaitable[Generation]]
"""One try on a client at a URL. Raises httpx.TransportError where another try does no harm."""


class ReplicatedEngines:
    """Replicas of one model, all served by the same kind of server."""

    def __init__(
        self, urls: Sequence[str], dialect: Dialect, *, vocab_size: int, timeout_s: float
    ) -> None:
        self.urls: Sequence[str] = tuple(url.rstrip("/") for url in urls)
        self.dialect = dialect
        self.vocab_size = vocab_size
        self._timeout = httpx.Timeout(timeout_s, connect=5.0, pool=timeout_s)
        self._client = self._new_client(max_keepalive=1000)
        # A connection that the server closed while idle fails at the next use; the second try must
        # not pick another one of the same age.
        self._fresh = self._new_client(max_keepalive=0)
        self._down_until: dict[str, float] = {}
        self._max_context_tokens: int | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    def _new_client(self, max_keepalive: int) -> httpx.AsyncClient:
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=max_keepalive,
            keepalive_expiry=_KEEPALIVE_S,
        )
        return httpx.AsyncClient(timeout=self._timeout, limits=limits, trust_env=False)

    async def aclose(self) -> None:
        """Wait for aborts under way, then let go of all connections."""
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await self._client.aclose()
        await self._fresh.aclose()

    async def generate(
        self, request: GenerateRequest, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Sample on the session's replica, or on the next one when it cannot be reached."""
        # Some servers end at an id that is none, and with it everybody's requests.
        check_prompt(request.prompt_ids, self.vocab_size)

        async def attempt(client: httpx.AsyncClient, url: str, number: int) -> Generation:
            body = await asyncio.to_thread(
                self.dialect.request_body, request, number, is_streamed=on_tokens is not None
            )
            posted = client.build_request(
                "POST",
                url + self.dialect.generate_path,
                content=body,
                headers={"content-type": "application/json", "x-request-id": request.request_id},
            )
            with step_span("engine.generate", engine=url):
                posted.headers.update(trace_headers())
                if on_tokens is None:
                    return await self._whole(client, posted)
                return await self._streamed(client, posted, on_tokens)

        return await self._at_first_reachable(request, attempt)

    async def _at_first_reachable(self, request: GenerateRequest, attempt: Attempt) -> Generation:
        failure: httpx.TransportError | None = None
        for url in self._candidates(request.session_id):
            try:
                return await self._tried_twice(url, request.request_id, attempt)
            except httpx.TimeoutException as error:
                if not isinstance(error, httpx.ConnectTimeout):
                    self._abort_later(url, request.request_id)
                    raise EngineError(
                        "engine_unavailable",
                        f"the engine gave no answer within {self._timeout.read:g} seconds",
                    ) from error
                failure = error
            except httpx.TransportError as error:
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
            except (httpx.TimeoutException, httpx.ConnectError):
                raise
            except httpx.TransportError:
                return await attempt(self._fresh, url, 1)
        except (asyncio.CancelledError, _StreamGivenUp):
            self._abort_later(url, request_id)
            raise

    async def _whole(self, client: httpx.AsyncClient, posted: httpx.Request) -> Generation:
        response = await client.send(posted)
        if response.status_code != 200:
            raise self._error_of(response)
        return await asyncio.to_thread(self.dialect.read, response.content)

    async def _streamed(
        self, client: httpx.AsyncClient, posted: httpx.Request, on_tokens: OnTokens
    ) -> Generation:
        response = await client.send(posted, stream=True)
        try:
            if response.status_code != 200:
                await response.aread()
                raise self._error_of(response)
            streamed = self.dialect.stream()
            try:
                async with asyncio.timeout(self._timeout.read):
                    await _read_stream(response, streamed, on_tokens)
            except TimeoutError as error:
                raise _StreamGivenUp(
                    "engine_unavailable",
                    f"the engine did not end its reply within {self._timeout.read:g} seconds",
                ) from error
            except httpx.TransportError as error:
                if streamed.num_tokens == 0:
                    raise
                raise _StreamGivenUp(
                    "engine_unavailable",
                    f"the engine's stream broke after {streamed.num_tokens} tokens "
                    f"({type(error).__name__})",
                ) from error
        finally:
            await response.aclose()
        return await asyncio.to_thread(streamed.end)

    def _abort_later(self, url: str, request_id: str) -> None:
        task = asyncio.create_task(self._abort(url, request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, url: str, request_id: str) -> None:
        for body in self.dialect.abort_bodies(request_id):
            try:
                await self._fresh.post(
                    url + self.dialect.abort_path,
                    content=body,
                    headers={"content-type": "application/json"},
                    timeout=5.0,
                )
            except httpx.HTTPError as error:
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
        try:
            response = await self._client.get(url + self.dialect.limits_path, timeout=5.0)
            return self.dialect.max_context_tokens(response.content)
        except (httpx.HTTPError, msgspec.MsgspecError):
            return None

    async def num_reachable(self) -> int:
        """Replicas that say now that they can take requests."""
        return sum(await asyncio.gather(*(self._is_healthy(url) for url in self.urls)))

    async def _is_healthy(self, url: str) -> bool:
        try:
            response = await self._client.get(url + self.dialect.health_path, timeout=2.0)
        except httpx.HTTPError:
            return False
        return response.status_code == 200

    def _error_of(self, response: httpx.Response) -> EngineError:
        status, message = response.status_code, _message(response)
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


async def _read_stream(
    response: httpx.Response, streamed: SampleStream, on_tokens: OnTokens
) -> None:
    events = EventData()
    async for received in response.aiter_bytes():
        for data in events.feed(received):
            if data == END:
                continue  # a connection whose response was read to its end is used again
            ids, logprobs = streamed.feed(data)
            if ids:
                on_tokens(ids, logprobs)


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error | None = None


def _message(response: httpx.Response) -> str:
    try:
        body = msgspec.json.decode(response.content, type=_ErrorBody)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return f"status {response.status_code}"
    return body.error.message[:500] if body.error else f"status {response.status_code}"

"""vLLM over HTTP, token ids in and out; the embedded engine speaks the same.

The server needs `--enable-scale-out` (the generate route) and `--logprobs-mode processed_logprobs`
(logprobs of the distribution that was sampled from).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import httpx
import msgspec

from turnfold.gateway.backends import vllm_wire
from turnfold.gateway.backends.engine import EngineError, GenerateRequest, Generation
from turnfold.gateway.backends.placement import ranked

log = logging.getLogger(__name__)

# vLLM closes an idle connection after 5 s; ours must let go first.
_KEEPALIVE_S = 4.0
_DOWN_S = 2.0
"""A replica that refused a connection is asked again after this time."""


class _Model(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class VllmEngines:
    """Replicas of one model; a session stays on one replica while it answers.

    async with VllmEngines(["http://10.0.0.1:8000"], vocab_size=151936, timeout_s=600) as engines:
        generation = await engines.generate(request)
    """

    def __init__(self, urls: Sequence[str], *, vocab_size: int, timeout_s: float) -> None:
        self.urls: Sequence[str] = tuple(url.rstrip("/") for url in urls)
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
        await asyncio.gather(*self._aborts, return_exceptions=True)
        await self._client.aclose()
        await self._fresh.aclose()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample on the session's replica, or on the next one when it cannot be reached."""
        body = await asyncio.to_thread(vllm_wire.request_body, request)
        response = await self._post_to_first_reachable(request, body)
        if response.status_code != 200:
            raise _error_of(response)
        return await asyncio.to_thread(vllm_wire.read_generation, response.content, self.vocab_size)

    async def _post_to_first_reachable(
        self, request: GenerateRequest, body: bytes
    ) -> httpx.Response:
        failure: httpx.TransportError | None = None
        for url in self._candidates(request.session_id):
            try:
                return await self._post(url, request.request_id, body)
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

    async def _post(self, url: str, request_id: str, body: bytes) -> httpx.Response:
        """One call, tried a second time on a new connection after a transport error."""
        headers = {"content-type": "application/json", "x-request-id": request_id}
        target = f"{url}/inference/v1/generate"
        try:
            try:
                return await self._client.post(target, content=body, headers=headers)
            except (httpx.TimeoutException, httpx.ConnectError):
                raise
            except httpx.TransportError:
                return await self._fresh.post(target, content=body, headers=headers)
        except asyncio.CancelledError:
            self._abort_later(url, request_id)
            raise

    def _abort_later(self, url: str, request_id: str) -> None:
        task = asyncio.create_task(self._abort(url, request_id))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, url: str, request_id: str) -> None:
        # The id that aborts is the one of the response; the bare one is silently ignored.
        body = msgspec.json.encode({"request_ids": [f"generate-tokens-{request_id}"]})
        try:
            await self._fresh.post(
                f"{url}/inference/v1/abort_requests",
                content=body,
                headers={"content-type": "application/json"},
                timeout=5.0,
            )
        except httpx.HTTPError as error:
            log.warning("could not abort %s at %s: %s", request_id, url, type(error).__name__)

    async def max_context_tokens(self) -> int | None:
        """The smallest max_model_len of the replicas that answer; asked until all have answered."""
        if self._max_context_tokens is not None:
            return self._max_context_tokens
        answers = await asyncio.gather(*(self._max_model_len(url) for url in self.urls))
        known = [limit for limit in answers if limit is not None]
        if len(known) == len(self.urls):
            self._max_context_tokens = min(known)
        return min(known, default=None)

    async def _max_model_len(self, url: str) -> int | None:
        try:
            response = await self._client.get(f"{url}/v1/models", timeout=5.0)
            models = msgspec.json.decode(response.content, type=_Models)
        except (httpx.HTTPError, msgspec.MsgspecError):
            return None
        return models.data[0].max_model_len if models.data else None

    async def num_reachable(self) -> int:
        """Replicas whose /health answers 200 now."""
        return sum(await asyncio.gather(*(self._is_healthy(url) for url in self.urls)))

    async def _is_healthy(self, url: str) -> bool:
        try:
            return (await self._client.get(f"{url}/health", timeout=2.0)).status_code == 200
        except httpx.HTTPError:
            return False


def _error_of(response: httpx.Response) -> EngineError:
    message = _message(response)
    if response.status_code < 500 and response.status_code not in (408, 429):
        return EngineError("engine_refused", f"the engine refused the request: {message}")
    if response.status_code in (429, 503):
        return EngineError("engine_unavailable", f"the engine is busy: {message}")
    return EngineError("engine_error", f"the engine failed with {response.status_code}: {message}")


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

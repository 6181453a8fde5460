"""Loading new weights into a running vLLM, in the one order that leaves no stale state behind.

    check the directory → pause, running requests kept and caches cleared → reload → set the version
    → resume, whatever happened

Running requests go on under the new weights with their KV cache recomputed. Without the cleared
cache logprobs are off by whole nats, also those of later requests that hit the stale prefix.
"""

from __future__ import annotations

import logging
from typing import Any

import httpx
import msgspec

from turnfold.gateway.backends.weights_directory import check_weights_directory

log = logging.getLogger(__name__)


class UpdateFailed(Exception):
    """The engine does not serve the new weights; the text says at which step it failed."""


class _WeightInfo(msgspec.Struct):
    weight_version: str | int


class VllmWeights:
    """The weights of one engine.

    weights = VllmWeights("http://10.0.0.1:8000", timeout_s=720)
    await weights.update("/runs/a/weights/3", 3)
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.loaded_uri: str | None = None
        """What this process had the engine load last; it is what a failed reload goes back to."""
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            # Calls are minutes apart, and vLLM drops idle connections after 5 s.
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def version(self) -> str | None:
        """The version the engine says it serves; None when it does not answer."""
        try:
            response = await self._client.get("/weight_info", timeout=5.0)
            response.raise_for_status()
            info = msgspec.json.decode(response.content, type=_WeightInfo)
        except (httpx.HTTPError, msgspec.MsgspecError):
            return None
        return str(info.weight_version)

    async def update(self, uri: str, policy_version: int) -> None:
        """Serve these weights under this version. Raises UnusableWeights or UpdateFailed."""
        directory = str(check_weights_directory(uri))
        try:
            await self._post("/pause", params={"mode": "keep", "clear_cache": "true"})
            await self._reload(directory)
            await self._post("/update_weight_version", json={"new_version": str(policy_version)})
        finally:
            await self._resume()
        self.loaded_uri = uri

    async def _reload(self, directory: str) -> None:
        try:
            await self._post_reload(directory)
        except UpdateFailed:
            # The parameters may be half gone: put back what worked before the engine goes on.
            if self.loaded_uri is not None:
                await self._post_reload(str(check_weights_directory(self.loaded_uri)))
            raise

    async def _post_reload(self, directory: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        await self._post("/collective_rpc", json=body)

    async def _resume(self) -> None:
        try:
            await self._post("/resume")
        except UpdateFailed as error:
            log.error("%s may be paused: %s", self.url, error)

    async def _post(self, path: str, **arguments: Any) -> None:
        try:
            response = await self._client.post(path, **arguments)
        except httpx.HTTPError as error:
            raise UpdateFailed(f"{self.url}{path}: {type(error).__name__}") from error
        if response.status_code != 200:
            raise UpdateFailed(
                f"{self.url}{path} answered {response.status_code}: {response.text[:300]}"
            )

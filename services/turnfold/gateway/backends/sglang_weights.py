"""Loading new weights into a running SGLang, in the one order that leaves no stale state behind.

    check the directory → pause, running requests put back into the queue → load, with the version
    and the caches flushed → continue, whatever happened

Requests put back into the queue go on under the new weights with their KV cache recomputed. A pause
in place would keep the old one and, since a cache in use cannot be flushed, spoil the requests after
it. While it is paused the server fails its own /health; /model_info answers all the time.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from turnfold.gateway.backends.weights import EngineControl, UpdateFailed, fitting_directory

log = logging.getLogger(__name__)


class _ModelInfo(msgspec.Struct):
    weight_version: str | int
    model_path: str | None = None


class _Updated(msgspec.Struct):
    success: bool
    message: str = ""


class SglangWeights:
    """The weights of one engine.

    weights = SglangWeights("http://10.0.0.1:30000", timeout_s=720)
    await weights.update("/runs/a/weights/3", 3)
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._engine = EngineControl(url, timeout_s=timeout_s)
        self.url = self._engine.url
        self.loaded_uri: str | None = None
        """What the engine loaded last; None when that is not known."""

    async def aclose(self) -> None:
        await self._engine.aclose()

    async def version(self) -> str | None:
        """The version the engine says it serves; None when it does not answer."""
        info = await self._model_info()
        return None if info is None else str(info.weight_version)

    async def _model_info(self) -> _ModelInfo | None:
        body = await self._engine.get("/model_info")
        if body is None:
            return None
        try:
            return msgspec.json.decode(body, type=_ModelInfo)
        except msgspec.MsgspecError:
            return None

    async def update(self, uri: str, policy_version: int) -> None:
        """Serve these weights under this version. Raises UnusableWeights or UpdateFailed.

        A load that fails leaves the old weights in place: SGLang goes back to them by itself.
        """
        info = await self._model_info()
        served = Path(info.model_path) if info and info.model_path else None
        directory = await asyncio.to_thread(fitting_directory, uri, self.loaded_uri, served)
        try:
            await self._engine.post("/pause_generation", json={"mode": "retract"})
            await self._load(str(directory), str(policy_version))
        finally:
            await self._continue()
        self.loaded_uri = uri

    async def adopt(self, uri: str) -> None:
        """Take these weights for what the engine serves, and let it go on if it was left paused."""
        await self._continue()
        self.loaded_uri = uri

    async def _load(self, directory: str, version: str) -> None:
        body = {
            "model_path": directory,
            # Said here and not by a call of its own, which aborts whatever is running.
            "weight_version": version,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        answer = await self._engine.post("/update_weights_from_disk", json=body)
        try:
            updated = msgspec.json.decode(answer, type=_Updated)
        except msgspec.MsgspecError as error:
            raise UpdateFailed(f"{self.url} answered the update with {answer[:100]!r}") from error
        if not updated.success:
            raise UpdateFailed(f"{self.url} did not load {directory}: {updated.message[:300]}")

    async def _continue(self) -> None:
        try:
            await self._engine.post("/continue_generation", json={})
        except UpdateFailed as error:
            log.error("%s may be paused: %s", self.url, error)

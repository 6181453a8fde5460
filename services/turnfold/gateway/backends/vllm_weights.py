"""Loading new weights into a running vLLM, in the one order that leaves no stale state behind.

    check the directory → pause, running requests kept and caches cleared → reload → set the version
    → resume, whatever happened

Running requests go on under the new weights with their KV cache recomputed. Without the cleared
cache logprobs are off by whole nats, also those of later requests that hit the stale prefix.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from turnfold.gateway.backends.weights import EngineControl, UpdateFailed, fitting_directory
from turnfold.gateway.backends.weights_directory import UnusableWeights, check_weights_directory

log = logging.getLogger(__name__)


class _WeightInfo(msgspec.Struct):
    weight_version: str | int


class _Model(msgspec.Struct):
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _WeightsLost(UpdateFailed):
    """A load failed, and so did the way back."""


class VllmWeights:
    """The weights of one engine.

    weights = VllmWeights("http://10.0.0.1:8000", timeout_s=720)
    await weights.update("/runs/a/weights/3", 3)
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._engine = EngineControl(url, timeout_s=timeout_s)
        self.url = self._engine.url
        self.loaded_uri: str | None = None
        """What the engine loaded last, if that is known; a failed load goes back to it."""

    async def aclose(self) -> None:
        await self._engine.aclose()

    async def version(self) -> str | None:
        """The version the engine says it serves; None when it does not answer."""
        body = await self._engine.get("/weight_info")
        if body is None:
            return None
        try:
            return str(msgspec.json.decode(body, type=_WeightInfo).weight_version)
        except msgspec.MsgspecError:
            return None

    async def update(self, uri: str, policy_version: int) -> None:
        """Serve these weights under this version. Raises UnusableWeights or UpdateFailed.

        A load that fails is undone. Where that fails too the engine stays paused: nobody knows what
        it would sample from.
        """
        served = await self._served_directory()
        directory = await asyncio.to_thread(fitting_directory, uri, self.loaded_uri, served)
        try:
            await self._engine.post("/pause", params={"mode": "keep", "clear_cache": "true"})
            await self._load(str(directory))
            new_version = {"new_version": str(policy_version)}
            await self._engine.post("/update_weight_version", json=new_version)
        except _WeightsLost:
            log.error("%s stays paused, nobody knows its weights: restart it", self.url)
            raise
        except BaseException:
            await self._resume()
            raise
        await self._resume()
        self.loaded_uri = uri

    async def adopt(self, uri: str) -> None:
        """Take these weights for what the engine serves, and let it go on if it was left paused."""
        await self._resume()
        self.loaded_uri = uri

    async def _load(self, directory: str) -> None:
        try:
            await self._post_reload(directory)
        except UpdateFailed as failure:
            if not failure.is_refused:
                await self._go_back(failure)
            raise

    async def _go_back(self, failure: UpdateFailed) -> None:
        """The parameters may be half gone: load what worked before the engine goes on."""
        if self.loaded_uri is None:
            raise _WeightsLost(f"{failure}; what it served before is not known") from failure
        try:
            await self._post_reload(str(check_weights_directory(self.loaded_uri)))
        except (UpdateFailed, UnusableWeights) as error:
            raise _WeightsLost(f"{failure}; then {error}") from failure

    async def _served_directory(self) -> Path | None:
        body = await self._engine.get("/v1/models")
        if body is None:
            return None
        try:
            models = msgspec.json.decode(body, type=_Models).data
        except msgspec.MsgspecError:
            return None
        return Path(models[0].root) if models and models[0].root else None

    async def _post_reload(self, directory: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        await self._engine.post("/collective_rpc", json=body)

    async def _resume(self) -> None:
        try:
            await self._engine.post("/resume")
        except UpdateFailed as error:
            log.error("%s may be paused: %s", self.url, error)

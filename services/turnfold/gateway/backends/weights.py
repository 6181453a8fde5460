"""The weights of a running engine, whichever kind it is: which version it serves, and a new one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import httpx

from turnfold.gateway.backends.weights_directory import (
    UnusableWeights,
    check_fits,
    check_weights_directory,
)


class UpdateFailed(Exception):
    """The engine does not serve the new weights; the text says at which step it failed."""

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused
        """The engine said no before it touched anything."""


class EngineWeights(Protocol):
    """The weights of one engine."""

    url: str
    loaded_uri: str | None
    """What the engine loaded last; None when that is not known."""

    async def version(self) -> str | None:
        """The version the engine says it serves; None when it does not answer."""

    async def update(self, uri: str, policy_version: int) -> None:
        """Serve these weights under this version. Raises UnusableWeights or UpdateFailed."""

    async def adopt(self, uri: str) -> None:
        """Take these weights for what the engine serves, and let it go on if it was left paused.

        Somebody else loaded them, and may have been killed before the engine went on.
        """

    async def aclose(self) -> None:
        """Let go of all connections."""


class EngineControl:
    """HTTP to the routes of one engine that change what it serves."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            # Calls are minutes apart, and vLLM drops idle connections after 5 s.
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> bytes | None:
        """The body of a 200; None when the engine does not answer with one in 5 seconds."""
        try:
            response = await self._client.get(path, timeout=5.0)
        except httpx.HTTPError:
            return None
        return response.content if response.status_code == 200 else None

    async def post(self, path: str, **arguments: Any) -> bytes:
        """The body of a 200. Raises UpdateFailed naming the route and what it answered."""
        try:
            response = await self._client.post(path, **arguments)
        except httpx.HTTPError as error:
            raise UpdateFailed(f"{self.url}{path}: {type(error).__name__}") from error
        if response.status_code != 200:
            raise UpdateFailed(
                f"{self.url}{path} answered {response.status_code}: {response.text[:300]}",
                is_refused=response.status_code < 500,
            )
        return response.content


def fitting_directory(uri: str, loaded_uri: str | None, served: Path | None) -> Path:
    """The directory of whole weights that fit what the engine has. Raises UnusableWeights.

    They are held against what was loaded last, else against the model that the engine was started
    with, where that lies on this machine.
    """
    directory = check_weights_directory(uri)
    if loaded_uri is not None:
        reference = Path(loaded_uri.removeprefix("file://"))
        if reference.is_dir():  # a trainer deletes old ones
            check_fits(directory, reference, is_complete=True)
            return directory
    if served is not None and _is_whole(served):
        check_fits(directory, served, is_complete=False)
    return directory


def _is_whole(directory: Path) -> bool:
    try:
        check_weights_directory(str(directory))
    except UnusableWeights:
        return False
    return True

"""Starts processes, watches them, starts them again when they die, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from turnfold.schemas.errors import UserError
from turnfold.schemas.wire import Wire


class ServiceSpec(Wire, frozen=True, kw_only=True):
    """One process of the pipeline."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    ready_url: str = ""
    """Answers 200 when the service can work; empty when there is nothing to wait for."""
    ready_timeout_s: float = 120.0
    stop_timeout_s: float = 15.0


class ServiceFailed(UserError):
    """A process that would not start or keep running; the text shows the end of its log."""


class Service:
    """One running process. Its output goes to `<log_dir>/<name>.log`."""

    def __init__(self, spec: ServiceSpec, log_dir: Path, env: Mapping[str, str]) -> None:
        self.spec = spec
        self.log_path = log_dir / f"{spec.name}.log"
        self.num_starts = 0
        self._env = {**env, **spec.env}
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def returncode(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                env=self._env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                # Ctrl-C is for the supervisor, which then stops the services in order.
                start_new_session=True,
            )
        self.num_starts += 1

    async def wait_until_ready(self) -> None:
        """Raises ServiceFailed when the process ends, or is not ready in time."""
        if not self.spec.ready_url:
            return
        deadline = time.monotonic() + self.spec.ready_timeout_s
        async with httpx.AsyncClient(timeout=2.0) as client:
            while time.monotonic() < deadline:
                if not self.is_running:
                    raise self.failed(f"ended with code {self.returncode} before it was ready")
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(self.spec.ready_url)).status_code == 200:
                        return
                await asyncio.sleep(0.1)
        raise self.failed(f"was not ready within {self.spec.ready_timeout_s:.0f} s")

    async def wait(self) -> int:
        assert self._process is not None, f"{self.spec.name} was never started"
        return await self._process.wait()

    def kill9(self) -> None:
        """End the process and its children at once, as a crash would."""
        if self.is_running:
            assert self._process is not None
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def pid(self) -> int:
        """Of the process that runs now, or ran last."""
        assert self._process is not None, f"{self.spec.name} was never started"
        return self._process.pid

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL when it does not end in time."""
        if not self.is_running:
            return
        assert self._process is not None
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), self.spec.stop_timeout_s)
        except TimeoutError:
            self.kill9()
            await self._process.wait()

    def failed(self, what: str) -> ServiceFailed:
        lines = self.log_path.read_text(errors="replace").splitlines()[-15:]
        tail = "\n".join(f"  | {line}" for line in lines)
        return ServiceFailed(f"{self.spec.name} {what}; the end of {self.log_path}:\n{tail}")


class Supervisor:
    """Keeps a set of services running.

    async with Supervisor(specs, log_dir, env) as supervisor:   # started, in the order given
        supervisor["gateway"].kill9()                           # comes back by itself

    A service that ends by itself is started again, at most `max_restarts` times; then
    `failure` is set and `wait_failed` returns. On leaving, services stop in reverse order.
    """

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        log_dir: Path,
        env: Mapping[str, str],
        *,
        max_restarts: int = 5,
        restart_delay_s: float = 0.5,
    ) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.services = {spec.name: Service(spec, log_dir, env) for spec in specs}
        self.max_restarts = max_restarts
        self.restart_delay_s = restart_delay_s
        self.failure: ServiceFailed | None = None
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._failed = asyncio.Event()

    def __getitem__(self, name: str) -> Service:
        return self.services[name]

    async def __aenter__(self) -> Supervisor:
        try:
            for name in self.services:
                await self.start(name)
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self, name: str) -> None:
        """Start one service and watch it from now on."""
        service = self.services[name]
        await service.start()
        self._watchers[name] = asyncio.create_task(self._watch(service))

    async def wait_until_ready(self, *names: str) -> None:
        """Wait for these services, or for all. Raises ServiceFailed."""
        waiting = [self.services[name].wait_until_ready() for name in names or self.services]
        await asyncio.gather(*waiting)

    async def wait_failed(self) -> None:
        """Return when a service could not be kept running; see `failure`."""
        await self._failed.wait()

    async def stop(self, *names: str) -> None:
        """Stop these services, or all, the last started first."""
        for name in reversed(list(names or self.services)):
            watcher = self._watchers.pop(name, None)
            if watcher is not None:
                watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watcher
            await self.services[name].stop()

    async def _watch(self, service: Service) -> None:
        while True:
            code = await service.wait()
            if code == 0:
                return  # it was done
            if service.num_starts > self.max_restarts:
                self.failure = service.failed(
                    f"ended {service.num_starts} times, last with code {code}"
                )
                self._failed.set()
                return
            await asyncio.sleep(self.restart_delay_s)
            await service.start()

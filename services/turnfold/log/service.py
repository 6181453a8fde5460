"""Runs one service as a process: health endpoints, metrics, logging, clean shutdown."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import uvicorn
from aiokafka.errors import ProducerFenced
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pythonjsonlogger.json import JsonFormatter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from turnfold.log.settings import ServiceSettings
from turnfold.schemas.errors import UserError

log = logging.getLogger("turnfold")


_FORMATTERS = {
    "text": logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"),
    "json": JsonFormatter(
        "{created}{levelname}{name}{message}",
        style="{",
        rename_fields={"created": "at", "levelname": "level", "name": "logger"},
    ),
}


class Health:
    """What a service says about itself: not ready until it has said so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_ready = False
        self.detail = "starting"

    def ready(self, detail: str = "ready") -> None:
        self.is_ready, self.detail = True, detail

    def not_ready(self, detail: str) -> None:
        self.is_ready, self.detail = False, detail


Body = Callable[[Health, asyncio.Event], Awaitable[None]]
"""The work of a service: runs until the event is set, then finishes what it holds and returns."""


def run_service(name: str, body: Body, settings: ServiceSettings) -> None:
    """Run `body` until it returns, SIGTERM or SIGINT. Exits 1 with one line on a known error.

    A second signal ends the process at once. A broken invariant (any other exception) keeps its
    traceback and exits 1: the supervisor starts the process again and the log replays.
    """
    configure_logging(settings.log_level, settings.log_format)
    try:
        asyncio.run(_run(name, body, settings.health_port))
    except UserError as error:
        sys.exit(f"turnfold {name}: {error}")


def configure_logging(level: str, form: Literal["text", "json"] = "text") -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_FORMATTERS[form])
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpx2", "httpcore", "openai", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


async def _run(name: str, body: Body, health_port: int | None) -> None:
    health, stop = Health(name), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_report_unless_fenced)

    def on_signal() -> None:
        if stop.is_set():
            log.warning("%s: second signal, leaving at once", name)
            sys.exit(130)
        log.info("%s: stopping", name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if health_port is None:
        await body(health, stop)
        return
    config = uvicorn.Config(
        health_app(health), host="0.0.0.0", port=health_port, log_level="warning", lifespan="off"
    )
    server = InnerServer(config)
    serving = asyncio.create_task(server.serve())
    try:
        await body(health, stop)
    finally:
        server.should_exit = True
        await serving


def _report_unless_fenced(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # A fenced producer leaves futures behind that nobody awaits; the service itself says it in one
    # line.
    if not isinstance(context.get("exception"), ProducerFenced):
        loop.default_exception_handler(context)


def health_app(health: Health) -> Starlette:
    """/healthz: alive; /readyz: 200 when ready, else 503 with the reason; /metrics: Prometheus."""

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        body = msgspec.json.encode({"service": health.name, "detail": health.detail})
        status = 200 if health.is_ready else 503
        return Response(body, status_code=status, media_type="application/json")

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]
    )


class InnerServer(uvicorn.Server):
    """uvicorn inside our own loop; signals stay ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

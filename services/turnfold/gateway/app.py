"""The gateway as a process: settings checked, parts connected, HTTP served until told to stop."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio.lowlevel
import msgspec
import uvicorn

from turnfold.gateway.backends.model_directory import ModelDirectory, load_model_directory
from turnfold.gateway.http.app import create_app, open_gateway
from turnfold.gateway.parsing.detection import UnknownFormat, reply_format_of
from turnfold.gateway.parsing.replies import ReplyFormat
from turnfold.gateway.settings import DEV_SECRET, Settings
from turnfold.gateway.tracing import exported_spans
from turnfold.gateway.turns.pinning import compile_pins
from turnfold.history.errors import RenderError
from turnfold.log.memory import give_back_freed_memory, seldom_look_for_cycles
from turnfold.log.service import Health, InnerServer, run_service
from turnfold.schemas.errors import UserError
from turnfold.schemas.messages import ChatMessage
from turnfold.schemas.settings import SettingsError, load

_SWITCH_S = 0.001
"""Longest that a thread which plans or parses holds up the event loop, a fifth of Python's own."""


def serve_gateway(
    environment: Mapping[str, str], *, ready_file: Path | None, is_dev: bool, **options: Any
) -> None:
    """Run until SIGTERM or SIGINT; exits 1 with one line when it cannot start."""
    give_back_freed_memory()
    sys.setswitchinterval(_SWITCH_S)
    try:
        settings = gateway_settings(environment, is_dev=is_dev, **options)
        model, reply_format = model_and_format(settings)
        listening = listen(settings.host, settings.port)
    except UserError as error:
        sys.exit(f"turnfold gateway: {error}")
    seldom_look_for_cycles()

    async def body(health: Health, stop: asyncio.Event) -> None:
        with exported_spans(environment):
            await serve(
                settings,
                model,
                reply_format,
                listening,
                health=health,
                stop=stop,
                ready_file=ready_file,
            )

    run_service("gateway", body, settings)


def gateway_settings(
    environment: Mapping[str, str], *, is_dev: bool = False, **options: Any
) -> Settings:
    """Settings with keys that are set. Raises SettingsError naming the variable that is not."""
    settings = load(Settings, environment, **options)
    for name in ("control_key", "key_secret"):
        if getattr(settings, name):
            continue
        if not is_dev:
            raise SettingsError(
                f"TURNFOLD_{name.upper()} is not set: choose a secret, or use --dev on one machine"
            )
        sys.stderr.write(f"turnfold gateway: --dev: {name} is {DEV_SECRET!r}, known to everybody\n")
        settings = msgspec.structs.replace(settings, **{name: DEV_SECRET})
    if not settings.engines:
        raise SettingsError("TURNFOLD_ENGINES is empty: name at least one engine")
    check_tls(settings)
    return settings


def check_tls(settings: Settings) -> None:
    """Raises SettingsError when the certificate and key do not serve."""
    if settings.tls_key and not settings.tls_certificate:
        raise SettingsError("TURNFOLD_TLS_KEY is set and TURNFOLD_TLS_CERTIFICATE is not")
    if not settings.tls_certificate:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_certificate, settings.tls_key or None, "")
    except OSError as error:  # ssl.SSLError is one
        raise SettingsError(
            f"TURNFOLD_TLS_CERTIFICATE={settings.tls_certificate!r}: expected a PEM certificate "
            f"and its key: {error}"
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises SettingsError when the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named TCP, or asyncio leaves Nagle's algorithm on: 40 ms before the second part of an answer.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(2048)
    except OSError as error:
        bound.close()
        raise SettingsError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --port"
        ) from error
    return bound


def model_and_format(settings: Settings) -> tuple[ModelDirectory, ReplyFormat]:
    """The model and how it writes its replies. Raises SettingsError saying what to set."""
    compile_pins(settings.pinned_patterns)  # said now rather than at the first call
    model = load_model_directory(settings.model)
    with suppress(RenderError):
        # Imports and compiles what the first turn would otherwise wait for.
        model.renderer.render([ChatMessage(role="user", content="hello")], None, True)
    try:
        return model, reply_format_of(model.template, settings.reply_format)
    except UnknownFormat as error:
        raise SettingsError(f"model {model.name}: {error}") from error


async def serve(
    settings: Settings,
    model: ModelDirectory,
    reply_format: ReplyFormat,
    listening: socket.socket,
    *,
    health: Health,
    stop: asyncio.Event,
    ready_file: Path | None = None,
) -> None:
    """Serve on the socket until `stop` is set. Raises BrokerUnavailable and MissingTopic."""
    await anyio.lowlevel.checkpoint()  # imports what the first stream would otherwise wait for
    async with open_gateway(settings, model, reply_format) as gateway:
        server = InnerServer(
            uvicorn.Config(
                create_app(gateway),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ssl_certfile=settings.tls_certificate or None,
                ssl_keyfile=settings.tls_key or None,
                timeout_keep_alive=60,
                timeout_graceful_shutdown=int(settings.drain_s),
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        stopping = asyncio.create_task(stop.wait())
        scheme = "https" if settings.tls_certificate else "http"
        base_url = f"{scheme}://{settings.host}:{listening.getsockname()[1]}"
        _write_ready_file(ready_file, base_url)
        health.ready(f"serving at {base_url}")
        following = gateway.store.events.following
        await asyncio.wait({serving, stopping, following}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.should_exit = True
        await serving
        if following.done():
            # A gateway that no longer sees what others append must not go on.
            following.result()


def _write_ready_file(path: Path | None, base_url: str) -> None:
    if path is None:
        return
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"base_url": base_url, "pid": os.getpid()}))
    partial.replace(path)

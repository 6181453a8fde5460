"""Take the port, load the model, say that it is ready, serve until told to stop."""

import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnfold.embedded.inference.engine import Engine
from turnfold.embedded.inference.model import SlotModel
from turnfold.embedded.inference.sequences import StopRules
from turnfold.embedded.inference.server.app import ServedModel, create_app
from turnfold.embedded.inference.weights import marked_version
from turnfold.schemas.errors import UserError

if TYPE_CHECKING:
    from starlette.applications import Starlette

GRACEFUL_SHUTDOWN_S = 3
SWITCH_INTERVAL_S = 0.001
"""How long the engine's thread may hold the interpreter; a fifth of Python's default."""


class StartupError(UserError):
    """The server cannot start; the message is one line that says what to do."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What `turnfold inference` was asked for."""

    model_dir: Path
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    num_slots: int = 32
    max_len: int = 2048
    device: str = "cpu"
    dtype: str = "float32"
    num_threads: int = 1
    ready_file: Path | None = None


def serve(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        StartupError: no model in the directory, no such device, or the port is taken.
    """
    with _listen(settings.host, settings.port) as listener:
        engine, has_tokenizer = _load_engine(settings)
        model = ServedModel(
            name=settings.served_model_name or str(settings.model_dir),
            directory=settings.model_dir,
            started_at=int(time.time()),
            has_tokenizer=has_tokenizer,
        )
        _serve_on(listener, engine, model, settings)
    if engine.failure is not None:
        raise StartupError(f"the engine failed: {engine.failure!r}")


def _serve_on(
    listener: socket.socket, engine: Engine, model: ServedModel, settings: ServerSettings
) -> None:
    import torch
    import uvicorn

    torch.set_num_threads(settings.num_threads)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    base_url = f"http://{settings.host}:{listener.getsockname()[1]}"
    app = create_app(engine, model, server_version=metadata.version("turnfold"))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
    )
    server = uvicorn.Server(config)

    def on_ready() -> None:
        line = f"serving {model.name}, version {engine.version}, at {base_url}"
        print(line, flush=True)  # noqa: T201
        if settings.ready_file is not None:
            _announce(settings.ready_file, base_url)

    def stop(*signal_arguments: object) -> None:
        server.should_exit = True

    # uvicorn shuts down on these signals and then hands them on to the handlers set here; without
    # them a stop that was asked for would end the process as if it had been killed.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    app.router.lifespan_context = _lifespan(engine, on_ready, stop)
    server.run(sockets=[listener])


def _lifespan(
    engine: Engine, on_ready: Callable[[], None], on_failure: Callable[[], None]
) -> Callable[["Starlette"], Any]:
    @asynccontextmanager
    async def lifespan(app: "Starlette") -> AsyncIterator[None]:
        engine.start(on_failure)
        on_ready()
        yield
        engine.close()

    return lifespan


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that a client may connect from the moment the port is known."""
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} on {host} is taken; choose another with --port"
            ) from error
        raise StartupError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def _load_engine(settings: ServerSettings) -> tuple[Engine, bool]:
    """The engine, not started yet, and whether the directory has a tokenizer for stop strings."""
    import torch
    from transformers.utils import logging

    directory = settings.model_dir
    if not (directory / "config.json").is_file():
        raise StartupError(
            f"{directory} holds no model (no config.json);"
            f" `turnfold tiny-model --out {directory}` makes a small one"
        )
    if settings.device.startswith("cuda") and not torch.cuda.is_available():
        raise StartupError(f"device {settings.device} is not available; use --device cpu")
    logging.disable_progress_bar()
    try:
        model = SlotModel(
            directory,
            num_slots=settings.num_slots,
            max_len=settings.max_len,
            device=settings.device,
            dtype=getattr(torch, settings.dtype),
        )
        version = marked_version(directory)
    except Exception as error:  # whatever the library raises for a model that it can't load
        reason = " ".join(str(error).split())
        raise StartupError(f"cannot load the model in {directory}: {reason}") from error
    rules = stop_rules(model, directory)
    return Engine(model, rules, version=version), rules.decode is not None


def stop_rules(model: SlotModel, directory: Path) -> StopRules:
    """End-of-sequence ids, the tokenizer's first, and its decoder if the directory has one."""
    if not (directory / "tokenizer.json").is_file():
        return StopRules(eos_token_ids=tuple(model.eos_token_ids))
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    primary = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    special = [t for t, added in tokenizer.added_tokens_decoder.items() if added.special]

    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))

    return StopRules(
        eos_token_ids=tuple(dict.fromkeys([*primary, *model.eos_token_ids])),
        special_token_ids=frozenset(special),
        decode=decode,
    )


def _announce(ready_file: Path, base_url: str) -> None:
    """Write the ready file in one piece, so that whoever waits for it never reads half."""
    part = ready_file.with_name(ready_file.name + ".part")
    part.write_text(json.dumps({"base_url": base_url, "pid": os.getpid()}))
    part.replace(ready_file)

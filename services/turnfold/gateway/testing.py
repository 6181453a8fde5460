"""For tests and benchmarks: an engine that answers what it is told, and gateways to put before it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from turnfold.gateway.app import listen, model_and_format, serve
from turnfold.gateway.settings import Settings
from turnfold.log.service import Health

_START_TIMEOUT_S = 60.0


class TokenGate:
    """Lets the tokens of a streamed reply through as a test allows.

    gate.allow(3)   the first three may be sent
    gate.open()     so may all others, and the end
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_allowed = 0
        self._waiting: list[tuple[int, Future[None]]] = []

    def allow(self, num_tokens: int) -> None:
        """Let this many tokens through, counted from the first."""
        with self._lock:
            self._num_allowed = max(num_tokens, self._num_allowed)
            for position, passed in self._waiting:
                if position < self._num_allowed and not passed.done():
                    passed.set_result(None)

    def open(self) -> None:
        """Let everything through."""
        self.allow(sys.maxsize)

    async def wait(self, position: int) -> None:
        """Until the token at the position may pass; the end stands behind the last token."""
        passed: Future[None] = Future()
        with self._lock:
            if position < self._num_allowed:
                return
            self._waiting.append((position, passed))
        await asyncio.wrap_future(passed)


class Reply(msgspec.Struct, kw_only=True):
    """One answer of the scripted engine; the defaults are what a healthy engine says."""

    ids: list[int]
    logprobs: Sequence[float | None] | None = None
    """-0.5 for each id when None."""
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    weight_versions: list[dict[str, Any]] | None = None
    num_cached_tokens: int | None = None
    """Said in the usage; None says nothing."""
    status: int = 200
    body: bytes | None = None
    """Sent as it is instead of all the above."""
    is_connection_dropped: bool = False
    release: threading.Event | None = None
    """When given, the answer waits for it."""
    gate: TokenGate | None = None
    """When given, each token of a streamed answer waits for it, and so does the end."""
    breaks_after: int | None = None
    """Tokens of a streamed answer after which the connection is dropped."""


class ScriptedEngine:
    """A server with vLLM's generate route that answers from a list, on a thread of its own.

    with ScriptedEngine() as engine:
        engine.script(Reply(ids=[7, 8]))
        ...
        assert engine.requests[0]["token_ids"] == [1, 2, 3]

    With an empty list it answers `default`.
    """

    def __init__(self, *, max_model_len: int = 100_000, port: int = 0) -> None:
        self.max_model_len = max_model_len
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.default = Reply(ids=[5])
        self._replies: deque[Reply] = deque()
        self._port = port

    def script(self, *replies: Reply) -> None:
        """Answers of the next calls, in order."""
        self._replies.extend(replies)

    def __enter__(self) -> Self:
        listening = listen("127.0.0.1", self._port)
        self._port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        config = uvicorn.Config(self._app(), log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._server.serve([listening])), daemon=True
        )
        self._thread.start()
        _wait_until(lambda: self._server.started, "the scripted engine does not start")
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close the port and all connections."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/inference/v1/generate", self._generate, methods=["POST"]),
                Route("/inference/v1/abort_requests", self._abort, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
            ]
        )

    async def reply_to(self, body: dict[str, Any]) -> Reply:
        """The answer to a request; the next of the list unless a subclass knows better."""
        return self._replies.popleft() if self._replies else self.default

    async def _generate(self, request: Request) -> Response:
        self.requests.append(msgspec.json.decode(await request.body()))
        reply = await self.reply_to(self.requests[-1])
        if reply.release is not None:
            await asyncio.to_thread(reply.release.wait, 30)
        if reply.is_connection_dropped:
            _drop_connection(request)
        if self.requests[-1].get("stream") and reply.status == 200 and reply.body is None:
            return StreamingResponse(_chunks(request, reply), media_type="text/event-stream")
        body = reply.body if reply.body is not None else _generate_body(reply)
        return Response(body, reply.status, media_type="application/json")

    async def _abort(self, request: Request) -> Response:
        self.aborted += msgspec.json.decode(await request.body())["request_ids"]
        return Response()

    async def _models(self, request: Request) -> Response:
        body = {"data": [{"id": "scripted", "max_model_len": self.max_model_len}]}
        return Response(msgspec.json.encode(body), media_type="application/json")

    async def _health(self, request: Request) -> Response:
        return Response()


def _generate_body(reply: Reply) -> bytes:
    if reply.status != 200:
        return msgspec.json.encode({"error": {"message": "scripted failure"}})
    return _response(_choice(reply, 0, len(reply.ids)) | _ending(reply), usage=_usage(reply))


async def _chunks(request: Request, reply: Reply) -> AsyncIterator[bytes]:
    """One event for each token; the last has the finish reason too, as vLLM's has."""
    last = len(reply.ids) - 1
    for position in range(len(reply.ids)):
        if reply.gate is not None:
            await reply.gate.wait(position)
        if position == reply.breaks_after:
            _drop_connection(request)
        if position < last:
            yield _event(_response(_choice(reply, position, position + 1)))
    if reply.gate is not None:
        await reply.gate.wait(len(reply.ids))
    yield _event(_response(_choice(reply, max(last, 0), len(reply.ids)) | _ending(reply)))
    yield _event(_response(usage=_usage(reply)))
    yield _event(b"[DONE]")


def _choice(reply: Reply, start: int, end: int) -> dict[str, Any]:
    """The tokens from `start` to `end`; a logprob that no token has comes with the last."""
    logprobs = reply.logprobs if reply.logprobs is not None else [-0.5] * len(reply.ids)
    logprobs_end = end if end < len(reply.ids) else len(logprobs)
    return {
        "index": 0,
        "token_ids": reply.ids[start:end],
        "logprobs": {"content": [{"logprob": value} for value in logprobs[start:logprobs_end]]},
    }


def _ending(reply: Reply) -> dict[str, Any]:
    return {
        "finish_reason": reply.finish_reason,
        "stop_reason": reply.stop_reason,
        "weight_versions": reply.weight_versions,
    }


def _usage(reply: Reply) -> dict[str, Any]:
    known = reply.num_cached_tokens is not None
    return {"prompt_tokens_details": {"cached_tokens": reply.num_cached_tokens} if known else None}


def _response(*choices: dict[str, Any], usage: dict[str, Any] | None = None) -> bytes:
    return msgspec.json.encode(
        {"request_id": "generate-tokens-x", "choices": choices, "usage": usage}
    )


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _drop_connection(request: Request) -> None:
    """Close the client's connection without an answer, as a server that crashed would."""
    cycle = request.receive.__self__  # type: ignore[attr-defined]  # uvicorn's, whose method it is
    cycle.transport.abort()


@asynccontextmanager
async def running_gateway(settings: Settings) -> AsyncIterator[str]:
    """A gateway in this process and event loop; yields its base URL, without /v1."""
    model, reply_format = model_and_format(settings)
    listening = listen(settings.host, settings.port)
    stop, health = asyncio.Event(), Health("gateway")
    serving = asyncio.create_task(
        serve(settings, model, reply_format, listening, health=health, stop=stop)
    )
    try:
        while not health.is_ready:
            if serving.done():
                await serving
            await asyncio.sleep(0.005)
        scheme = "https" if settings.tls_certificate else "http"
        yield f"{scheme}://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        stop.set()
        await serving


class GatewayProcess:
    """A gateway as a process of its own, which can be killed."""

    def __init__(self, base_url: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.base_url = base_url
        self.process = process
        self.log_path = log_path

    def kill9(self) -> None:
        """End it without a warning."""
        self.process.kill()
        self.process.wait(20)

    def stop(self) -> int:
        """Ask it to end, wait, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextmanager
def gateway_process(*options: str) -> Iterator[GatewayProcess]:
    """A gateway under `--dev` on a free port; `options` are further ones of `turnfold gateway`."""
    with tempfile.TemporaryDirectory(prefix="turnfold-gateway-") as scratch:
        ready_file, log_path = Path(scratch) / "ready.json", Path(scratch) / "gateway.log"
        command = [sys.executable, "-m", "turnfold.gateway", "--dev", "--port", "0", *options]
        command += ["--ready-file", str(ready_file)]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        try:
            _wait_until(
                lambda: ready_file.exists() or process.poll() is not None,
                "the gateway does not start",
            )
            if not ready_file.exists():
                raise RuntimeError(f"the gateway ended: {log_path.read_text()}")
            base_url = json.loads(ready_file.read_text())["base_url"]
            yield GatewayProcess(base_url, process, log_path)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(20)


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids that an engine would sample for the text."""
    ids: Sequence[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return list(ids)


def _wait_until(condition: Any, failure: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(failure)
        time.sleep(0.02)

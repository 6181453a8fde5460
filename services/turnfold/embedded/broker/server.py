"""Connections, timers, start and stop."""

import asyncio
import logging
import signal
import ssl
import struct
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from turnfold.embedded.broker.broker import Broker
from turnfold.embedded.broker.handlers import HANDLERS, WAITING
from turnfold.embedded.broker.login import ANSWERED_HERE, Login, Users
from turnfold.embedded.broker.protocol import (
    ProtocolError,
    Request,
    encode_answer,
    parse_request,
)

MAX_REQUEST_BYTES = 100 << 20
"""A longer frame closes the connection (Kafka's `socket.request.max.bytes`)."""
MAX_PIPELINED = 64
"""Requests of one connection that may wait for their answer before no more are read."""
READ_BUFFER_BYTES = 1 << 20
TICK_S = 0.05
CLEAN_EVERY_S = 1.0

logger = logging.getLogger(__name__)

Frames = list[bytes]


@dataclass(frozen=True)
class Listener:
    """Where the broker listens and whom it lets in."""

    host: str
    port: int
    """0 takes any free one."""
    advertised_host: str = ""
    """The name under which clients find the broker, where that is not the address they reached it at."""
    tls: ssl.SSLContext | None = None
    users: Users | None = None
    """Who may log in; without users nobody is asked."""


class Server:
    """Serves one open broker to the network."""

    def __init__(self, broker: Broker, listener: Listener) -> None:
        self._broker = broker
        self._listener = listener
        self._connections: set[asyncio.Task[None]] = set()
        self._chores: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen, and return the port (the system's choice if it may choose). Raises OSError if it is taken."""
        self._server = await asyncio.start_server(
            self._serve_connection,
            self._listener.host,
            self._listener.port,
            ssl=self._listener.tls,
            limit=READ_BUFFER_BYTES,
        )
        bound: int = self._server.sockets[0].getsockname()[1]
        self._broker.port = bound
        self._chores = [
            asyncio.create_task(_repeat(self._tick, TICK_S)),
            asyncio.create_task(_repeat(self._broker.clean, CLEAN_EVERY_S)),
        ]
        return bound

    async def stop(self) -> None:
        """Stop listening and drop all connections; what was acknowledged is in the files already."""
        if self._server is not None:
            self._server.close()
        tasks = [*self._chores, *self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _tick(self) -> None:
        self._broker.tick()

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await Connection(self._broker, self._listener, reader, writer).serve()
        except asyncio.CancelledError:
            # Only `stop` cancels; asyncio's own callback would report it as an error.
            pass
        finally:
            self._connections.discard(task)


class Connection:
    """One client. Answers leave in the order of their requests, as the protocol demands."""

    def __init__(
        self,
        broker: Broker,
        listener: Listener,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._broker = broker
        self._login = Login(listener.users)
        self._reader = reader
        self._writer = writer
        self._client_host = str(writer.get_extra_info("peername")[0])
        reached = str(writer.get_extra_info("sockname")[0])
        self._broker_host = listener.advertised_host or reached
        self._answers: asyncio.Queue[asyncio.Future[Frames]] = asyncio.Queue(MAX_PIPELINED)
        self._pending: set[asyncio.Future[Frames]] = set()

    async def serve(self) -> None:
        """Read and answer until the client goes away or sends something that is no request."""
        sending = asyncio.create_task(self._send_answers())
        receiving = asyncio.create_task(self._receive_requests())
        try:
            done, _ = await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                self._report(task)
        finally:
            await _cancel([sending, receiving, *self._pending])
            self._writer.close()

    async def _receive_requests(self) -> None:
        while True:
            (size,) = struct.unpack(">i", await self._reader.readexactly(4))
            if not 8 <= size <= MAX_REQUEST_BYTES:
                raise ProtocolError(
                    f"expected a request of 8 to {MAX_REQUEST_BYTES} bytes, got {size}"
                )
            frame = await self._reader.readexactly(size)
            request = parse_request(frame, self._client_host, self._broker_host)
            self._login.check(request)
            await self._answers.put(await self._start(request))

    async def _start(self, request: Request) -> "asyncio.Future[Frames]":
        """The answer to come. Requests that need not wait are done at once, so that they stay in order."""
        if request.api_key in WAITING:
            answer: asyncio.Future[Frames] = asyncio.create_task(self._answer(request))
        else:
            answer = asyncio.get_running_loop().create_future()
            answer.set_result(await self._answer(request))
        self._pending.add(answer)
        return answer

    async def _answer(self, request: Request) -> Frames:
        if request.api_key in ANSWERED_HERE:
            return [encode_answer(request, self._login.answer(request))]
        answer = await HANDLERS[request.api_key](self._broker, request)
        if answer is None:
            return []
        return answer if isinstance(answer, list) else [encode_answer(request, answer)]

    async def _send_answers(self) -> None:
        while True:
            answer = await self._answers.get()
            self._writer.writelines(await answer)
            self._pending.discard(answer)
            await self._writer.drain()

    def _report(self, task: "asyncio.Task[None]") -> None:
        """Say why the connection ends, unless the client just went away."""
        error = task.exception()
        if isinstance(error, ProtocolError):
            logger.warning("closed the connection from %s: %s", self._client_host, error)
        elif not isinstance(error, (asyncio.IncompleteReadError, ConnectionError)):
            logger.error("closed the connection from %s", self._client_host, exc_info=error)


async def serve_until_stopped(
    broker: Broker, listener: Listener, on_ready: Callable[[int], None], *, watch_stdin: bool
) -> None:
    """Serve until SIGTERM, SIGINT or, with `watch_stdin`, the end of standard input; then close the broker.

    `on_ready` is called with the port as soon as clients can connect. Raises OSError if it is taken.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = Server(broker, listener)
    try:
        on_ready(await server.start())
        if watch_stdin:
            await _set_at_end_of_stdin(stop)
        await stop.wait()
    finally:
        await server.stop()
        broker.close()


def write_ready_file(path: Path, host: str, port: int) -> None:
    """Tell another process where to connect; the file is there with all its content, or not at all."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(f"{host}:{port}\n", encoding="utf-8")
    temporary.replace(path)


async def _set_at_end_of_stdin(stop: asyncio.Event) -> None:
    """Set `stop` when whoever holds the other end of our standard input closes it, or dies."""

    class Watcher(asyncio.Protocol):
        def connection_lost(self, error: Exception | None) -> None:
            stop.set()

    await asyncio.get_running_loop().connect_read_pipe(Watcher, sys.stdin)


async def _repeat(chore: Callable[[], Awaitable[None]], every_s: float) -> None:
    """Do the chore again and again; an error in one round is logged and does not end it."""
    while True:
        await asyncio.sleep(every_s)
        try:
            await chore()
        except Exception:
            logger.exception("a chore of the broker failed")


async def _cancel(tasks: "list[asyncio.Future[Frames] | asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

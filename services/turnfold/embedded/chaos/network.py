"""TCP connections that go through us, so that they can be cut, held up and slowed down.

A Kafka client takes only its first connection to the address that it was given and asks there for
the others. So what goes through a Kafka link is read as far as that: the addresses of the brokers in
the answers are replaced by ports of ours.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.metadata import MetadataRequest

Address = tuple[str, int]
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_HEADER = struct.Struct(">hhi")
"""API key, version and correlation id: how every Kafka request begins."""

_ANSWERS: dict[tuple[int, int], Any] = {
    (request.API_KEY, request.API_VERSION): request.RESPONSE_TYPE
    for kind in (MetadataRequest, FindCoordinatorRequest)
    for request in kind._CLASSES
}
"""By API key and version, the answers that hold addresses."""


class Link:
    """All connections of one process to one server.

    async with Link("healer to broker", ("127.0.0.1", 9092), is_kafka=True) as link:
        link.address                  # to be given to the process
        await link.cut(0.5)           # connections end, and no new ones for half a second
    """

    def __init__(self, name: str, upstream: Address, *, is_kafka: bool = False) -> None:
        self.name, self.is_kafka = name, is_kafka
        self.delay_s = 0.0
        """Every piece of data waits so long."""
        self._upstream = upstream
        self._is_cut = False
        self._requests_pass, self._answers_pass = asyncio.Event(), asyncio.Event()
        self._requests_pass.set()
        self._answers_pass.set()
        self._servers: dict[Address, asyncio.Server] = {}
        self._open: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[Any]] = set()
        self._one_at_a_time = asyncio.Lock()

    async def __aenter__(self) -> Link:
        self.address = await self._listen_for(self._upstream)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for server in self._servers.values():
            server.close()
        self._drop()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def cut(self, seconds: float) -> None:
        """End all connections and refuse new ones for a time."""
        async with self._one_at_a_time:
            self._is_cut = True
            self._drop()
            await asyncio.sleep(seconds)
            self._is_cut = False

    async def hold(self, seconds: float) -> None:
        """Keep everything that is sent for a time, then deliver it."""
        async with self._one_at_a_time, self._held(self._requests_pass, self._answers_pass):
            await asyncio.sleep(seconds)

    async def lose_answers(self, seconds: float) -> None:
        """Deliver requests but not their answers for a time, then end all connections."""
        async with self._one_at_a_time, self._held(self._answers_pass):
            await asyncio.sleep(seconds)
            self._drop()

    @asynccontextmanager
    async def _held(self, *gates: asyncio.Event) -> AsyncIterator[None]:
        for gate in gates:
            gate.clear()
        try:
            yield
        finally:
            for gate in gates:
                gate.set()

    def _drop(self) -> None:
        for writer in self._open:
            _reset(writer)

    async def _listen_for(self, upstream: Address) -> Address:
        """Our address for a server; a Kafka cluster has several."""
        if upstream not in self._servers:
            self._servers[upstream] = await asyncio.start_server(
                partial(self._serve, upstream), _HOST, 0
            )
        return _HOST, int(self._servers[upstream].sockets[0].getsockname()[1])

    async def _serve(
        self, upstream: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            if not self._is_cut:
                # Nobody listens while the server is killed; the client sees its connection end.
                with suppress(OSError, asyncio.CancelledError):
                    await self._relay((reader, writer), await asyncio.open_connection(*upstream))
        finally:
            _reset(writer)
            self._serving.discard(task)

    async def _relay(self, client: _Streams, server: _Streams) -> None:
        (from_client, to_client), (from_server, to_server) = client, server
        self._open |= {to_client, to_server}
        expected: dict[int, Any] = {}
        pumps: list[Coroutine[Any, Any, None]]
        if self.is_kafka:
            pumps = [
                self._pump_frames(from_client, to_server, partial(_expect, expected)),
                self._pump_answers(from_server, to_client, expected),
            ]
        else:
            pumps = [
                self._pump(from_client, to_server, self._requests_pass),
                self._pump(from_server, to_client, self._answers_pass),
            ]
        tasks = [asyncio.create_task(pump) for pump in pumps]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                _expect_end_of_connection(outcome)
            self._open -= {to_client, to_server}
            to_server.close()
            # What was delivered may still lie in the buffer.
            with suppress(OSError):
                to_client.close()
                await to_client.wait_closed()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        while data := await source.read(_CHUNK_BYTES):
            await self._deliver(data, sink, gate)

    async def _pump_frames(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        on_frame: Callable[[bytes], None],
    ) -> None:
        while True:
            frame = await _frame(source)
            on_frame(frame)
            await self._deliver(_framed(frame), sink, self._requests_pass)

    async def _pump_answers(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        expected: dict[int, Any],
    ) -> None:
        while True:
            frame = await _frame(source)
            kind = expected.pop(int.from_bytes(frame[:4], "big"), None)
            if kind is not None:
                frame = frame[:4] + await self._readdressed(kind.decode(frame[4:]))
            await self._deliver(_framed(frame), sink, self._answers_pass)

    async def _deliver(self, data: bytes, sink: asyncio.StreamWriter, gate: asyncio.Event) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        await gate.wait()
        sink.write(data)
        await sink.drain()

    async def _readdressed(self, answer: Any) -> bytes:
        """The answer with our addresses in place of the brokers'."""
        if hasattr(answer, "brokers"):
            answer.brokers = [
                (node, *await self._listen_for((host, port)), *rest)
                for node, host, port, *rest in answer.brokers
            ]
        elif answer.port > 0:  # there is no address in an error
            answer.host, answer.port = await self._listen_for((answer.host, answer.port))
        encoded: bytes = answer.encode()
        return encoded


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection that is still open, and let the other side know that it did not end well."""
    if writer.is_closing():
        return
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _expect(expected: dict[int, Any], frame: bytes) -> None:
    """Note how the answer to a request is to be read, if it holds addresses."""
    key, version, correlation_id = _HEADER.unpack_from(frame)
    if (answer := _ANSWERS.get((key, version))) is not None:
        expected[correlation_id] = answer


def _expect_end_of_connection(outcome: BaseException | None) -> None:
    ends = (OSError, asyncio.IncompleteReadError, asyncio.CancelledError)
    if outcome is not None and not isinstance(outcome, ends):
        raise outcome


async def _frame(source: asyncio.StreamReader) -> bytes:
    return await source.readexactly(int.from_bytes(await source.readexactly(4), "big"))


def _framed(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "big") + frame


@asynccontextmanager
async def links(*made: Link) -> AsyncIterator[dict[str, Link]]:
    """Several links by name."""
    async with AsyncExitStack() as stack:
        yield {link.name: await stack.enter_async_context(link) for link in made}

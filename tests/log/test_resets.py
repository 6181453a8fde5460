"""A server that resets every connection at once, as a proxy before a dead engine does."""

import asyncio
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
import uvloop

from turnfold.log.resets import resets_are_transport_errors

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER that makes `close` reset the connection."""


@pytest.fixture
def url() -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))

    def reset_all() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return  # the test is over
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.close()

    serving = threading.Thread(target=reset_all, daemon=True)
    serving.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    serving.join(10)


async def failures(url: str) -> Counter[str]:
    """What 200 requests fail with, sent by a process that has more to do."""

    async def be_busy() -> None:
        while True:
            time.sleep(0.002)  # noqa: ASYNC251  # work that holds up the loop
            await asyncio.sleep(0)

    async def fail(client: httpx.AsyncClient) -> str:
        try:
            with resets_are_transport_errors():
                await client.post(url, content=b"x")
        except httpx.TransportError:
            return "TransportError"
        except AttributeError as error:
            return repr(error)
        return "none"

    busy = asyncio.create_task(be_busy())
    found: Counter[str] = Counter()
    async with httpx.AsyncClient() as client:
        for _ in range(10):
            found.update(await asyncio.gather(*(fail(client) for _ in range(20))))
    busy.cancel()
    return found


def test_a_connection_that_is_reset_at_once_is_a_transport_error(url: str) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(failures(url)) == {"TransportError": 200}


def test_any_other_missing_attribute_is_left_as_it_is() -> None:
    with pytest.raises(AttributeError, match="no attribute"), resets_are_transport_errors():
        "text".__getattribute__("nothing_like_it")

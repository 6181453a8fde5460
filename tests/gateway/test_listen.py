"""The socket that the gateway listens on."""

import asyncio
import socket

import pytest

from turnfold.gateway.app import listen
from turnfold.schemas.settings import SettingsError


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_parts_of_an_answer_do_not_wait_for_one_another(host: str) -> None:
    """Nagle's algorithm is off, which else holds the body back for 40 ms."""
    try:
        bound = listen(host, 0)
    except SettingsError:
        pytest.skip(f"this machine has no {host}")
    is_off: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        is_off.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(connected, sock=bound):
        _, writer = await asyncio.open_connection(*bound.getsockname()[:2])
        assert await is_off
        writer.close()


def test_an_address_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)

"""Bytes on the wire: version queries, damaged requests, the order of answers."""

import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from turnfold.embedded.broker.protocol import APIS, ApiKey
from turnfold.embedded.broker.testing import BrokerProcess

API_VERSIONS = 18
UNSUPPORTED_VERSION = 35


class Wire:
    """A connection to the broker without a Kafka client."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)

    def send(self, key: int, version: int, correlation_id: int, body: bytes = b"") -> None:
        header = struct.pack(">hhih", key, version, correlation_id, 4) + b"test"
        self.send_raw(struct.pack(">i", len(header + body)) + header + body)

    def send_raw(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> tuple[int, bytes]:
        """(correlation id, body) of the next answer."""
        (size,) = struct.unpack(">i", self._receive_exactly(4))
        frame = self._receive_exactly(size)
        return struct.unpack_from(">i", frame)[0], frame[4:]

    def is_closed_by_broker(self) -> bool:
        try:
            return self._socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self._socket.close()

    def _receive_exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self._socket.recv(size - len(data)) or pytest.fail("the broker hung up")
        return data


@pytest.fixture
def wire(shared_broker: BrokerProcess) -> Iterator[Wire]:
    connection = Wire(shared_broker.port)
    yield connection
    connection.close()


def announced_versions(body: bytes) -> tuple[int, dict[int, tuple[int, int]]]:
    error, count = struct.unpack_from(">hi", body)
    rows = [struct.unpack_from(">hhh", body, 6 + 6 * number) for number in range(count)]
    return error, {key: (oldest, newest) for key, oldest, newest in rows}


def test_the_broker_announces_all_it_understands(wire: Wire) -> None:
    wire.send(API_VERSIONS, 0, 7)

    correlation_id, body = wire.receive()

    assert correlation_id == 7
    expected = {int(key): (api.min_version, api.max_version) for key, api in APIS.items()}
    assert announced_versions(body) == (0, expected)


def test_a_version_query_of_a_newer_kind_is_answered_in_the_oldest(wire: Wire) -> None:
    # KIP-511: a client learns from this answer how to ask again.
    wire.send(API_VERSIONS, 4, 8, body=b"\x05name\x01\x00")

    _, body = wire.receive()

    error, versions = announced_versions(body)
    assert error == UNSUPPORTED_VERSION
    assert versions[API_VERSIONS] == (0, 2)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">i", 3) + b"abc",
        struct.pack(">i", -1),
        struct.pack(">i", 1 << 30),
        b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n",
        struct.pack(">ihhih", 10, 999, 0, 1, 0),
        struct.pack(">ihhih", 10, ApiKey.METADATA, 99, 1, 0),
        struct.pack(">ihhih", 14, ApiKey.METADATA, 5, 1, 0) + b"\x00\x00\x00\x09",
        struct.pack(">ihhih", 12, ApiKey.METADATA, 5, 1, 2) + b"\xff\xff",
    ],
    ids=[
        "too short",
        "negative size",
        "too large",
        "http",
        "unknown kind",
        "unknown version",
        "damaged body",
        "damaged name",
    ],
)
def test_bytes_that_are_no_request_close_the_connection_and_nothing_else(
    wire: Wire, shared_broker: BrokerProcess, frame: bytes
) -> None:
    wire.send_raw(frame)
    assert wire.is_closed_by_broker()

    other = Wire(shared_broker.port)
    other.send(API_VERSIONS, 0, 1)
    assert other.receive()[0] == 1
    other.close()
    assert "Traceback" not in shared_broker.output()


def test_answers_come_in_the_order_of_the_requests_even_if_one_has_to_wait(wire: Wire) -> None:
    half_a_second = 500
    fetch = struct.pack(">iiiibi", -1, half_a_second, 1, 1 << 20, 0, 0)
    wire.send(ApiKey.FETCH, 4, 1, fetch)
    wire.send(API_VERSIONS, 0, 2)

    assert [wire.receive()[0], wire.receive()[0]] == [1, 2]


async def test_the_metadata_names_the_address_that_the_client_used(
    shared_broker: BrokerProcess, connect: Any
) -> None:
    admin = await connect(f"localhost:{shared_broker.port}").admin()

    (node,) = (await admin.describe_cluster())["brokers"]

    assert (node["host"], node["port"]) in [
        ("127.0.0.1", shared_broker.port),
        ("::1", shared_broker.port),
    ]

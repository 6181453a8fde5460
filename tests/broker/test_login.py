"""Who may use a connection: the exchange by itself, then on the wire and from another client library."""

import base64
import contextlib
import socket
import ssl
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.conn import ScramAuthenticator

from turnfold.embedded.broker.errors import ErrorCode
from turnfold.embedded.broker.login import Login, read_users
from turnfold.embedded.broker.protocol import ApiKey, ProtocolError, Request
from turnfold.embedded.broker.testing import BrokerProcess

USERS = {"ann": "secret", "a=b,c": "ü{"}
SCRAM = "SCRAM-SHA-256"


def request(key: ApiKey, **body: Any) -> Request:
    return Request(key, 1, 0, "client", body, "127.0.0.1", "127.0.0.1")


def shake_hands(login: Login, mechanism: str) -> Any:
    return login.answer(request(ApiKey.SASL_HANDSHAKE, mechanism=mechanism))


def authenticate(login: Login, token: bytes) -> Any:
    return login.answer(request(ApiKey.SASL_AUTHENTICATE, sasl_auth_bytes=token))


def is_let_in(login: Login) -> bool:
    try:
        login.check(request(ApiKey.METADATA))
    except ProtocolError:
        return False
    return True


def test_without_users_everybody_is_let_in_and_a_password_is_not_expected() -> None:
    login = Login(None)
    assert is_let_in(login)
    assert shake_hands(login, "PLAIN")["error_code"] == ErrorCode.ILLEGAL_SASL_STATE


def test_only_the_versions_are_told_before_the_login() -> None:
    login = Login(USERS)
    login.check(request(ApiKey.API_VERSIONS))
    login.check(request(ApiKey.SASL_HANDSHAKE))
    with pytest.raises(ProtocolError, match=r"expected a login \(SASL\) before PRODUCE"):
        login.check(request(ApiKey.PRODUCE))


def test_an_unknown_mechanism_is_answered_with_those_that_there_are() -> None:
    answer = shake_hands(Login(USERS), "GSSAPI")
    assert answer["error_code"] == ErrorCode.UNSUPPORTED_SASL_MECHANISM
    assert answer["enabled_mechanisms"] == ["PLAIN", SCRAM]


@pytest.mark.parametrize(
    ("token", "error"),
    [
        (b"\0ann\0secret", ErrorCode.NONE),
        (b"ann\0ann\0secret", ErrorCode.NONE),
        (b"\0a=b,c\0" + "ü{".encode(), ErrorCode.NONE),
        (b"\0ann\0wrong", ErrorCode.SASL_AUTHENTICATION_FAILED),
        (b"\0ann\0", ErrorCode.SASL_AUTHENTICATION_FAILED),
        (b"\0bob\0secret", ErrorCode.SASL_AUTHENTICATION_FAILED),
        (b"", ErrorCode.SASL_AUTHENTICATION_FAILED),
        (b"\0\xff\0secret", ErrorCode.SASL_AUTHENTICATION_FAILED),
        (b"\0ann\0secret\0", ErrorCode.SASL_AUTHENTICATION_FAILED),
    ],
)
def test_plain_takes_the_right_password_of_a_user_and_nothing_else(
    token: bytes, error: ErrorCode
) -> None:
    login = Login(USERS)
    assert shake_hands(login, "PLAIN")["error_code"] == ErrorCode.NONE
    answer = authenticate(login, token)
    assert answer["error_code"] == error
    assert is_let_in(login) is (error is ErrorCode.NONE)


def scram(login: Login, user: str, password: str) -> Any:
    """Both sides of an exchange, the client's being aiokafka's; the broker's last answer."""
    shake_hands(login, SCRAM)
    client = ScramAuthenticator(
        loop=None, sasl_plain_username=user, sasl_plain_password=password, sasl_mechanism=SCRAM
    )
    answer = authenticate(login, client.first_message().encode())
    if answer["error_code"]:
        return answer
    client.process_server_first_message(answer["sasl_auth_bytes"].decode())
    answer = authenticate(login, client.final_message().encode())
    if not answer["error_code"]:
        client.process_server_final_message(answer["sasl_auth_bytes"].decode())
    return answer


@pytest.mark.parametrize(("user", "password"), USERS.items())
def test_scram_proves_the_password_on_both_sides(user: str, password: str) -> None:
    login = Login(USERS)
    assert scram(login, user, password)["error_code"] == ErrorCode.NONE
    assert is_let_in(login)


@pytest.mark.parametrize(("user", "password"), [("ann", "wrong"), ("bob", "secret"), ("ann", "")])
def test_scram_lets_nobody_else_in(user: str, password: str) -> None:
    login = Login(USERS)
    answer = scram(login, user, password)
    assert answer["error_code"] == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert not is_let_in(login)


@pytest.mark.parametrize(
    "first", [b"", b"\xff", b"n,,", b"n,,n=ann", b"y,,n=ann,r=x", b"p=tls-unique,,n=ann,r=x"]
)
def test_a_first_word_that_is_not_scram_is_refused(first: bytes) -> None:
    login = Login(USERS)
    shake_hands(login, SCRAM)
    answer = authenticate(login, first)
    assert answer["error_code"] == ErrorCode.SASL_AUTHENTICATION_FAILED


@pytest.mark.parametrize(
    "final", ["", "c=biws,r={nonce}", "c=biws,r=x,p={proof}", "p=%", "p={proof}"]
)
def test_a_last_word_without_a_proof_is_refused(final: str) -> None:
    login = Login(USERS)
    shake_hands(login, SCRAM)
    server_first = authenticate(login, b"n,,n=ann,r=mine")["sasl_auth_bytes"].decode()
    nonce = server_first.split(",")[0].removeprefix("r=")
    assert nonce.startswith("mine")
    proof = base64.b64encode(bytes(32)).decode()
    answer = authenticate(login, final.format(nonce=nonce, proof=proof).encode())
    assert answer["error_code"] == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert not is_let_in(login)


def test_a_token_without_a_handshake_or_after_a_refusal_is_not_looked_at() -> None:
    login = Login(USERS)
    assert authenticate(login, b"\0ann\0secret")["error_code"] == ErrorCode.ILLEGAL_SASL_STATE
    shake_hands(login, "PLAIN")
    authenticate(login, b"\0ann\0wrong")
    assert authenticate(login, b"\0ann\0secret")["error_code"] == ErrorCode.ILLEGAL_SASL_STATE
    assert not is_let_in(login)


def test_users_are_lines_of_name_and_password(tmp_path: Path) -> None:
    file = tmp_path / "users"
    file.write_text("ann:sec:ret\n\nbob: x\n")
    assert read_users(file) == {"ann": "sec:ret", "bob": " x"}
    for text, said in (("ann\n", "line 1: expected name:password"), ("\n", "found none")):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_users(file)


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate for `localhost`, the authority that signed it, and users."""
    folder = tmp_path_factory.mktemp("papers")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    issued = authority.issue_cert("localhost")
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "broker.pem")
    (folder / "users").write_text("ann:secret\n")
    return folder


@pytest.fixture(scope="module")
def guarded(papers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker that is known as `localhost`, speaks TLS and wants a password."""
    options = ("--tls-certificate", str(papers / "broker.pem"), "--users", str(papers / "users"))
    folder = tmp_path_factory.mktemp("guarded")
    with BrokerProcess(folder, options=(*options, "--advertised-host", "localhost")) as running:
        yield running


async def test_clients_are_sent_to_the_name_that_the_certificate_is_for(
    papers: Path, guarded: BrokerProcess
) -> None:
    admin = AIOKafkaAdminClient(
        bootstrap_servers=f"localhost:{guarded.port}",
        security_protocol="SASL_SSL",
        ssl_context=ssl.create_default_context(cafile=papers / "ca.pem"),
        sasl_mechanism=SCRAM,
        sasl_plain_username="ann",
        sasl_plain_password="secret",
    )
    await admin.start()
    try:
        described = await admin.describe_cluster()
        assert [node["host"] for node in described["brokers"]] == ["localhost"]
        assert await admin.list_topics() == []  # asked of that node
    finally:
        await admin.close()


def test_a_request_before_the_login_closes_the_connection_and_says_why(
    papers: Path, guarded: BrokerProcess
) -> None:
    context = ssl.create_default_context(cafile=papers / "ca.pem")
    raw = socket.create_connection(("localhost", guarded.port), timeout=10)
    with context.wrap_socket(raw, server_hostname="localhost") as connection:
        frame = struct.pack(">hhih", ApiKey.METADATA, 1, 7, -1) + struct.pack(">i", -1)
        connection.sendall(struct.pack(">i", len(frame)) + frame)
        assert connection.recv(1) == b""
    assert "expected a login (SASL) before METADATA" in guarded.output()


def test_bytes_that_are_no_tls_end_their_connection_only(guarded: BrokerProcess) -> None:
    with socket.create_connection(("localhost", guarded.port), timeout=10) as connection:
        connection.sendall(b"\0\0\0\x10 this is no TLS")
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(100):
                pass
    assert "Traceback" not in guarded.output()


@pytest.mark.parametrize("mechanism", ["PLAIN", SCRAM])
def test_librdkafka_logs_in(papers: Path, guarded: BrokerProcess, mechanism: str) -> None:
    confluent_kafka = pytest.importorskip("confluent_kafka")
    settings = {
        "bootstrap.servers": f"localhost:{guarded.port}",
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(papers / "ca.pem"),
        "sasl.mechanism": mechanism,
        "sasl.username": "ann",
        "sasl.password": "secret",
    }
    topic = f"rdkafka-{uuid.uuid4().hex[:8]}"
    failed: list[Any] = []
    producer = confluent_kafka.Producer(settings)
    producer.produce(topic, b"v", callback=lambda error, _: failed.append(error))
    assert producer.flush(20) == 0
    assert failed == [None]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tls-certificate", "/nowhere"), "expected PEM files with a certificate chain"),
        (("--tls-certificate", "{users}"), "expected PEM files with a certificate chain"),
        (("--tls-certificate", "{pem}", "--tls-client-ca", "{users}"), "expected a PEM file with"),
        (("--tls-key", "{pem}"), "expected --tls-certificate too"),
        (("--users", "/nowhere"), "cannot use /nowhere for users"),
        (("--users", "{pem}"), "expected name:password"),
    ],
)
def test_a_file_that_does_not_serve_is_named_at_start(
    papers: Path, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    files = {"users": str(papers / "users"), "pem": str(papers / "broker.pem")}
    command = [sys.executable, "-m", "turnfold.embedded.broker", "--data", str(tmp_path)]
    command += ["--port", "0", *(option.format(**files) for option in options)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1

"""How a client proves who it is: SASL with PLAIN or SCRAM-SHA-256, one exchange for each connection.

    client: SaslHandshake "SCRAM-SHA-256"     broker: fine, or the mechanisms that there are
    client: SaslAuthenticate <token>          broker: <token>, until both are content

PLAIN is RFC 4616, SCRAM is RFC 5802 without channel binding.
"""

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from turnfold.embedded.broker.errors import ErrorCode, Refused
from turnfold.embedded.broker.protocol import ApiKey, ProtocolError, Request

Users = Mapping[str, str]
"""Passwords by user name."""
Exchange = Generator[bytes, bytes, bytes]
"""Is sent the client's tokens, yields the broker's and returns the last one. Raises Refused."""

NUM_ITERATIONS = 4096
"""Rounds of the password's hash in SCRAM: what RFC 7677 asks for at least."""


class Login:
    """Where one connection stands. Without users everybody is let in, and nobody may say who it is."""

    def __init__(self, users: Users | None) -> None:
        self._users = users
        self._exchange: Exchange | None = None
        self._is_done = users is None

    def check(self, request: Request) -> None:
        """Raises ProtocolError for a request that comes before its client is let in."""
        if not self._is_done and request.api_key not in (ApiKey.API_VERSIONS, *ANSWERED_HERE):
            raise ProtocolError(f"expected a login (SASL) before {request.api_key.name}")

    def answer(self, request: Request) -> dict[str, Any]:
        """The answer to one of `ANSWERED_HERE`."""
        try:
            return ANSWERED_HERE[request.api_key](self, request.body)
        except Refused as refused:
            self._exchange = None
            return {
                "error_code": refused.code,
                "error_message": refused.message,
                "enabled_mechanisms": list(MECHANISMS),
                **_AUTHENTICATED,
            }

    def _handshake(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._is_done:
            raise Refused(ErrorCode.ILLEGAL_SASL_STATE)
        assert self._users is not None
        if body["mechanism"] not in MECHANISMS:
            raise Refused(ErrorCode.UNSUPPORTED_SASL_MECHANISM)
        self._exchange = MECHANISMS[body["mechanism"]](self._users)
        next(self._exchange)
        return {"error_code": ErrorCode.NONE, "enabled_mechanisms": list(MECHANISMS)}

    def _authenticate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._exchange is None:
            raise Refused(ErrorCode.ILLEGAL_SASL_STATE, "expected SaslHandshake first")
        try:
            token = self._exchange.send(body["sasl_auth_bytes"] or b"")
        except StopIteration as end:
            token, self._exchange, self._is_done = end.value, None, True
        except (ValueError, KeyError):
            raise _refused("the client's token cannot be read") from None
        answer = {"error_code": ErrorCode.NONE, "error_message": None}
        return {**answer, **_AUTHENTICATED, "sasl_auth_bytes": token}


# 0: a login lasts as long as its connection.
_AUTHENTICATED = {"sasl_auth_bytes": b"", "session_lifetime_ms": 0}
ANSWERED_HERE: Mapping[ApiKey, Callable[[Login, Mapping[str, Any]], dict[str, Any]]] = {
    ApiKey.SASL_HANDSHAKE: Login._handshake,
    ApiKey.SASL_AUTHENTICATE: Login._authenticate,
}


def read_users(path: Path) -> Users:
    """Passwords by name from lines `name:password`. Raises OSError, or ValueError naming the line."""
    users: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        name, colon, password = line.partition(":")
        if not line.strip():
            continue
        if not (name and colon and password):
            raise ValueError(f"{path}, line {number}: expected name:password")
        users[name] = password
    if not users:
        raise ValueError(f"{path}: expected lines of name:password, found none")
    return users


def _plain(users: Users) -> Exchange:
    """`authorization NUL user NUL password`; the first is empty, or the user once more."""
    _, user, password = (yield b"").split(b"\0")
    known = users.get(user.decode())
    if known is None or not hmac.compare_digest(known.encode(), password):
        raise _refused()
    return b""


def _scram(users: Users) -> Exchange:
    """The client proves that it knows the password and the broker that it does, and none shows it."""
    first = (yield b"").decode()
    if not first.startswith("n,,"):
        raise _refused("expected no channel binding and no other identity")
    client_first = first.removeprefix("n,,")
    fields = _fields(client_first)
    password = users.get(fields["n"].replace("=2C", ",").replace("=3D", "="))
    if password is None:
        raise _refused()
    nonce, salt = fields["r"] + secrets.token_urlsafe(18), secrets.token_bytes(16)
    server_first = f"r={nonce},s={_base64(salt)},i={NUM_ITERATIONS}"

    final = (yield server_first.encode()).decode()
    unproven, _, proof = final.rpartition(",p=")
    signed = f"{client_first},{server_first},{unproven}".encode()
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, NUM_ITERATIONS)
    expected = _proof(salted, signed)
    is_proven = hmac.compare_digest(expected, base64.b64decode(proof, validate=True))
    if _fields(unproven) != {"c": "biws", "r": nonce} or not is_proven:
        raise _refused()
    return b"v=" + _base64(_hmac(_hmac(salted, b"Server Key"), signed)).encode()


MECHANISMS: Mapping[str, Callable[[Users], Exchange]] = {"PLAIN": _plain, "SCRAM-SHA-256": _scram}


def _proof(salted: bytes, signed: bytes) -> bytes:
    """ClientKey xor HMAC(H(ClientKey), signed)."""
    client_key = _hmac(salted, b"Client Key")
    signature = _hmac(hashlib.sha256(client_key).digest(), signed)
    return bytes(a ^ b for a, b in zip(client_key, signature, strict=True))


def _fields(text: str) -> dict[str, str]:
    """`n=user,r=nonce` to {"n": "user", "r": "nonce"}."""
    return {name: value for name, _, value in (part.partition("=") for part in text.split(","))}


def _hmac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _refused(reason: str = "unknown user or wrong password") -> Refused:
    return Refused(ErrorCode.SASL_AUTHENTICATION_FAILED, reason)

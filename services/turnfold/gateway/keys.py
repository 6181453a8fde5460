"""Session keys: the api key that an agent gets is a signed statement of whose calls it makes.

    tf-<base64url(payload)>.<base64url(HMAC-SHA256(secret, payload))>

The payload is msgpack with one-letter names. It says which rollout and session a call belongs to and
where in the log the rollout began, so a gateway that never saw the session can read it back.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from functools import lru_cache

import msgspec

PREFIX = "tf-"
_MAX_KEY_CHARS = 2048


class SessionKey(msgspec.Struct, frozen=True, kw_only=True):
    """What a key states.

    Example: `SessionKey(rollout_id="g1-00", session_id="main", partition=2, offset=17,
    expires_at=1.8e9)`.
    """

    rollout_id: str = msgspec.field(name="r")
    session_id: str = msgspec.field(name="s")
    partition: int = msgspec.field(name="p")
    """Partition of the rollout's events."""
    offset: int = msgspec.field(name="o")
    """Offset of its RolloutStarted."""
    expires_at: int = msgspec.field(name="x")
    """Unix seconds."""


class KeyRefused(Exception):
    """A key that gives no access; the text never holds any part of the key."""


class BadKey(KeyRefused):
    """Not a key of this gateway: the form or the signature is wrong."""


class ExpiredKey(KeyRefused):
    """Signed by this gateway, and out of date."""


def sign(key: SessionKey, secret: str) -> str:
    """The api key as the agent gets it."""
    payload = msgspec.msgpack.encode(key)
    return f"{PREFIX}{_to_text(payload)}.{_to_text(_signature(payload, secret))}"


def verify(api_key: str, secret: str, now: float) -> SessionKey:
    """What the key states at Unix second `now`. Raises BadKey or ExpiredKey.

    The signature is compared in constant time and before anything of the payload is believed.
    """
    key = _signed(api_key, secret)
    if now >= key.expires_at:
        raise ExpiredKey("the api key has expired")
    return key


def matches(given: str, expected: str) -> bool:
    """Whether two secrets are equal, in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


@lru_cache(maxsize=4096)  # an agent shows the same key with each call; bad ones are not kept
def _signed(api_key: str, secret: str) -> SessionKey:
    payload, signature = _parts(api_key)
    if not hmac.compare_digest(signature, _signature(payload, secret)):
        raise BadKey("the api key was not issued by this gateway")
    try:
        return msgspec.msgpack.decode(payload, type=SessionKey)
    except msgspec.MsgspecError as error:
        raise BadKey("the api key holds no session") from error


def _signature(payload: bytes, secret: str) -> bytes:
    return hmac.new(secret.encode(), payload, hashlib.sha256).digest()


def _parts(api_key: str) -> tuple[bytes, bytes]:
    body, dot, signature = api_key.removeprefix(PREFIX).partition(".")
    if not api_key.startswith(PREFIX) or not dot or len(api_key) > _MAX_KEY_CHARS:
        raise BadKey("the api key is not a turnfold session key")
    try:
        return _from_text(body), _from_text(signature)
    except (binascii.Error, ValueError) as error:
        raise BadKey("the api key is not a turnfold session key") from error


def _to_text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _from_text(text: str) -> bytes:
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if _to_text(data) != text:  # one key has one spelling
        raise ValueError("not canonical base64url")
    return data

"""A record as it lies in the log; importing this connects to nothing."""

from __future__ import annotations

import msgspec

from turnfold.schemas.codec import MSGPACK as _MSGPACK

_MSGPACK_BYTES = _MSGPACK.encode()


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A record as it lies in the log."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: float
    """Unix seconds."""
    headers: tuple[tuple[str, bytes], ...] = ()

    @property
    def content_type(self) -> str | None:
        for name, value in self.headers:
            if name == "content-type":
                return _MSGPACK if value == _MSGPACK_BYTES else value.decode("latin-1")
        return None

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}@{self.offset}"

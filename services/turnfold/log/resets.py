"""Connections that are reset as soon as they are made, as the errors that they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx


@contextmanager
def resets_are_transport_errors() -> Iterator[None]:
    """Around every request that httpx makes in a service.

    Under uvloop a connection that the other side has reset has no socket any more when anyio asks
    for its address, and httpx lets the AttributeError through instead of a TransportError, which
    its callers expect and repeat the request after.
    """
    try:
        yield
    except AttributeError as error:
        if error.name != "getpeername":
            raise
        raise httpx.ConnectError("the connection was reset as soon as it was made") from error

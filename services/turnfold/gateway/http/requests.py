"""Reading requests: bodies within a limit, JSON bodies of one type, keys."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import Request

from turnfold.gateway.keys import PREFIX
from turnfold.gateway.refusals import Refusal, invalid

B = TypeVar("B")

_MAX_HARNESS_CHARS = 64


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises Refusal when it is larger than `limit` bytes."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise Refusal("too_large", f"the body is larger than {limit} bytes", code="too_large")
        chunks.append(chunk)
    return b"".join(chunks)


def decode(body: bytes, kind: type[B]) -> B:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`") or None
        raise invalid(f"{param}: {what}" if param else what, param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from error


def bearer(request: Request) -> str:
    scheme, _, value = request.headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""


def api_key(request: Request) -> str:
    """The key of an agent: SDKs send it as a bearer token or as `x-api-key`, some send both."""
    given = (bearer(request), request.headers.get("x-api-key", "").strip())
    ours = (key for key in given if key.startswith(PREFIX))
    return next(ours, given[0] or given[1])


def is_retry(request: Request) -> bool:
    """SDKs made by Stainless say how often they have sent a request before."""
    return request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")


def harness(request: Request) -> str:
    """The first product of the User-Agent without its version.

    AsyncOpenAI/Python 3.57.0             AsyncOpenAI/Python
    claude-cli/1.0.3 (external, cli)      claude-cli
    """
    product = request.headers.get("user-agent", "").split(" ")[0][:_MAX_HARNESS_CHARS]
    name, _, version = product.partition("/")
    return name if version[:1].isdigit() else product


async def until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

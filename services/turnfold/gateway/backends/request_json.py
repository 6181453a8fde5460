"""JSON of requests to engines."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from turnfold.gateway.calls import CallParams


def encode_with_arrays(body: dict[str, Any]) -> bytes:
    """The body as JSON; numpy arrays become lists.

    orjson reads an array as it lies in memory: 100,000 ids take 0.7 ms instead of the 8 ms of a
    list of Python ints that is encoded.
    """
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def given_params(params: CallParams) -> dict[str, Any]:
    """What the agent has set, by name; an engine has its own defaults for the rest."""
    fields = msgspec.structs.asdict(params)
    return {name: value for name, value in fields.items() if value not in (None, ())}

"""Work on another thread, when there is enough of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_MAX_BYTES_ON_LOOP = 64 * 1024
"""JSON takes 2 ns a byte, of many small values 30: a fraction of a millisecond as a rule, two at
most. The loop waits one anyway for a busy thread to let go of the interpreter."""


async def off_loop(num_bytes: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """The result of work on so many bytes: done on another thread when there are many.

    The way to a thread and back costs more than small work itself. Encoding that is one call into
    C is no work for here: it holds up the loop wherever it is done.
    """
    if num_bytes <= _MAX_BYTES_ON_LOOP:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)

"""How the C library and Python treat the memory of a process."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_BLOCK_BYTES = 30 * 1024 * 1024
_M_TRIM_THRESHOLD, _M_ARENA_MAX = -1, -8
_TRIM_BYTES = 1024 * 1024
_MANY_OBJECTS = 20_000


def keep_freed_memory() -> None:
    """Let the process keep some tens of megabytes that it has freed, for its next rollout.

    A rollout is folded into a few blocks of some hundred kilobytes, which are freed again when it
    is written. glibc gives such blocks back to the system at once, and a fold of long turns then
    spends half of its time on getting fresh pages. It stops doing so for blocks up to the size of
    the largest one that it has seen freed, at most 32 MiB; with other C libraries nothing happens.
    """
    bytes(_BLOCK_BYTES)  # reserved but never written to, so it takes no memory


def give_back_freed_memory() -> None:
    """Let the process hold little more than it uses.

    A model call goes through several threads and some megabytes, and glibc keeps what each thread
    has freed for that thread: with 100,000 tokens a session that came to 10 MB a session, of which
    one was used. With one arena for all threads, trimmed at 1 MiB, it is 3 MB. With other C
    libraries nothing happens.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_ARENA_MAX, 1)
        libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


def seldom_look_for_cycles() -> None:
    """Have Python's collector spare what is there now, and look at the rest when it is much.

    Call it when everything is loaded: libraries and a model are some 100,000 objects that stay to
    the end, and a full collection goes through them in 50 ms during which nothing else runs. What a
    gateway frees holds no cycles: looking for them every 700 objects, as Python does, found none and
    took 0.9 ms of CPU a turn.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MANY_OBJECTS, 20, 20)

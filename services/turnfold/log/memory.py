"""How the C library treats the memory of a process."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_BLOCK_BYTES = 30 * 1024 * 1024
_M_TRIM_THRESHOLD, _M_ARENA_MAX = -1, -8
_TRIM_BYTES = 1024 * 1024


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

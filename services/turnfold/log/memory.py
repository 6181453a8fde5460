"""How the C library treats the memory of a process that folds a log."""

from __future__ import annotations

_BLOCK_BYTES = 30 * 1024 * 1024


def keep_freed_memory() -> None:
    """Let the process keep some tens of megabytes that it has freed, for its next rollout.

    A rollout is folded into a few blocks of some hundred kilobytes, which are freed again when it
    is written. glibc gives such blocks back to the system at once, and a fold of long turns then
    spends half of its time on getting fresh pages. It stops doing so for blocks up to the size of
    the largest one that it has seen freed, at most 32 MiB; with other C libraries nothing happens.
    """
    bytes(_BLOCK_BYTES)  # reserved but never written to, so it takes no memory

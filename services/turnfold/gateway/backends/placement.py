"""Which replica serves a session: rendezvous hashing, so a lost replica moves only its own sessions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def ranked(session_id: str, urls: Iterable[str]) -> list[str]:
    """All replicas, the session's own first, then where it goes when that one is down.

    The same for every gateway, whatever the order in which it lists the replicas.
    """
    return sorted(urls, key=lambda url: _weight(session_id, url), reverse=True)


def _weight(session_id: str, url: str) -> bytes:
    return hashlib.blake2b(f"{session_id}\0{url}".encode(), digest_size=8).digest()

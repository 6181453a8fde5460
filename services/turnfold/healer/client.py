"""Bytes in a temporary file, for what need not be in memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, MutableMapping


class TemporaryStore(MutableMapping[str, bytes]):
    """A mapping that lies on disk and is gone with its process, however that ends.

    It holds nothing that is not in the log too, so nothing waits for the disk. The file is where
    TMPDIR says, and has no name from the start.
    """

    def __init__(self) -> None:
        # An empty name makes a private database on disk, which SQLite deletes as it opens it.
        self._database = sqlite3.connect("", isolation_level=None)
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE entry (name TEXT PRIMARY KEY, value BLOB)")

    def __getitem__(self, name: str) -> bytes:
        row = self._database.execute("SELECT value FROM entry WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise KeyError(name)
        value: bytes = row[0]
        return value

    def __setitem__(self, name: str, value: bytes) -> None:
        self._database.execute("INSERT OR REPLACE INTO entry VALUES (?, ?)", (name, value))

    def __delitem__(self, name: str) -> None:
        if self._database.execute("DELETE FROM entry WHERE name = ?", (name,)).rowcount == 0:
            raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for (name,) in self._database.execute("SELECT name FROM entry"))

    def clear(self) -> None:
        self._database.execute("DELETE FROM entry")

    def __len__(self) -> int:
        (number,) = self._database.execute("SELECT COUNT(*) FROM entry").fetchone()
        return int(number)

    def close(self) -> None:
        self._database.close()

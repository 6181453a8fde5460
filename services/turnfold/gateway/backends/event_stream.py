"""Server-sent events as engines send them: one line of data each."""

from __future__ import annotations

END = b"[DONE]"
"""The data of the last event."""

_FIELD = b"data:"


class EventData:
    """The data of each event in a byte stream that is cut anywhere.

        events = EventData()
        events.feed(b'data: {"a"')      -> []
        events.feed(b': 1}\\n\\ndata: ')  -> [b'{"a": 1}']

    Comments and other fields are left out.
    """

    def __init__(self) -> None:
        self._open: list[bytes] = []
        """What came of a line that has not ended."""

    def feed(self, received: bytes) -> list[bytes]:
        """The data of the events that end in these bytes."""
        *ended, begun = received.split(b"\n")
        if not ended:
            self._open.append(begun)
            return []
        lines = [b"".join([*self._open, ended[0]]), *ended[1:]]
        self._open = [begun]
        return [line[len(_FIELD) :].strip() for line in lines if line.startswith(_FIELD)]

"""How a reader of calls says that it cannot read one."""

from __future__ import annotations

from turnfold.gateway.parsing.replies import MalformedReason


class BrokenCall(Exception):
    """The call cannot be read; `at` is where that showed.

    Without a reason the text was never meant as a call: it is not reported.
    """

    def __init__(self, reason: MalformedReason | None, at: int) -> None:
        super().__init__(reason, at)
        self.reason: MalformedReason | None = reason
        self.at = at

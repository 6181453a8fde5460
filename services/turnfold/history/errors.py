"""What can be wrong with a history, as typed errors whose text says what came and where."""

from __future__ import annotations

from turnfold.schemas.events import Divergence


class HistoryError(ValueError):
    """A turn event that contradicts the turns before it.

    The text names rollout and turn: `rollout r7, turn t3: parent t9 is not in this rollout`.
    """


class RenderError(ValueError):
    """The chat template refused a conversation; the text is the template's own message."""


class NonlinearHistory(ValueError):
    """Policy `error`: the history continues no stored turn, so linear mode refuses the call."""

    def __init__(self, session_id: str, divergence: Divergence) -> None:
        self.divergence = divergence
        super().__init__(
            f"session {session_id}: the history continues no stored turn "
            f"({divergence.cause} at message {divergence.message_index})"
        )

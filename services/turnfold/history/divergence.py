"""Why a client's history is not what was stored: one typed cause and the message where it begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from turnfold.history.canonical import CosmeticRules, is_same_message
from turnfold.schemas.events import Divergence
from turnfold.schemas.messages import ChatMessage

TOOL_ARGUMENTS_REORDERED = "tool_arguments_reordered"
"""The same argument values, in another key order or number form."""
WHITESPACE = "whitespace"
"""Edge whitespace of assistant text."""
REASONING_DROPPED = "reasoning_dropped"
"""Reasoning that the model wrote did not come back."""
TEXT_DROPPED = "text_dropped"
"""Text that the model wrote beside a tool call did not come back."""
CONTENT_EDITED = "content_edited"
"""A message came back with other text, calls or role."""
MESSAGE_REMOVED = "message_removed"
"""A stored message is missing, later ones are still there; or the history ends early."""
SYSTEM_CHANGED = "system_changed"
"""The system message is another one."""
TOOLS_CHANGED = "tools_changed"
"""The set of tool schemas is another one."""
COMPACTION = "compaction"
"""Sampled turns were replaced by shorter text."""
TEMPLATE_REWROTE_HISTORY = "template_rewrote_history"
"""The chat template shows an earlier message differently now that others follow."""
REPLY_REFORMATTED = "reply_reformatted"
"""The template writes the parsed reply otherwise than the model did: spacing, markup, line breaks."""
RETOKENIZED = "retokenized"
"""The text is equal, but the sampled tokens are not those that it encodes to."""
UNKNOWN = "unknown"

EDITS = frozenset((CONTENT_EDITED, MESSAGE_REMOVED, SYSTEM_CHANGED, TOOLS_CHANGED, COMPACTION))
"""Causes that change what the conversation says: no healing undoes them."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference that does not count, at a message of the request."""

    message_index: int
    cause: str


def cosmetic_causes(stored: ChatMessage, incoming: ChatMessage) -> tuple[str, ...]:
    """How canonically equal messages differ all the same."""
    return tuple(_causes(stored, incoming)) if stored.role == "assistant" else ()


def _causes(stored: ChatMessage, incoming: ChatMessage) -> Iterator[str]:
    if stored.content != incoming.content:
        yield TEXT_DROPPED if stored.content.strip() and not incoming.content else WHITESPACE
    if stored.reasoning and not incoming.reasoning:
        yield REASONING_DROPPED
    elif stored.reasoning != incoming.reasoning:
        yield WHITESPACE
    if _written_arguments(stored) != _written_arguments(incoming):
        yield TOOL_ARGUMENTS_REORDERED


def _written_arguments(message: ChatMessage) -> list[bytes]:
    # Encoded in the order of the keys: two dicts are equal whatever their order.
    return [msgspec.json.encode(call.arguments) for call in message.tool_calls]


def is_identical(stored: ChatMessage, incoming: ChatMessage) -> bool:
    """Whether two messages are equal to the letter, the key order of arguments included."""
    if stored is incoming:
        return True
    return stored == incoming and _written_arguments(stored) == _written_arguments(incoming)


def explain_edit(
    stored: Sequence[ChatMessage],
    incoming: Sequence[ChatMessage],
    num_common: int,
    rules: CosmeticRules,
) -> Divergence:
    """Why the request stops being the stored history after `num_common` equal messages."""
    cause = _edit_cause(stored, incoming, num_common, rules)
    return Divergence(cause=cause, message_index=num_common)


def _edit_cause(
    stored: Sequence[ChatMessage],
    incoming: Sequence[ChatMessage],
    at: int,
    rules: CosmeticRules,
) -> str:
    if at >= len(incoming):
        return MESSAGE_REMOVED
    if at >= len(stored):
        return UNKNOWN
    ours, theirs = stored[at], incoming[at]
    if "system" in (ours.role, theirs.role):
        return SYSTEM_CHANGED
    if _contains(stored[at + 1 :], theirs, rules):
        return MESSAGE_REMOVED
    if _replaces_turns(stored[at:], incoming[at:], rules):
        return COMPACTION
    if ours.role == theirs.role == "assistant":
        return _assistant_cause(ours, theirs, rules)
    return CONTENT_EDITED


def _assistant_cause(ours: ChatMessage, theirs: ChatMessage, rules: CosmeticRules) -> str:
    """Under rules that heal less, a difference may be cosmetic in kind and still break the match."""
    if not is_same_message(ours, theirs, CosmeticRules()):
        return CONTENT_EDITED
    return next(iter(_causes(ours, theirs)), UNKNOWN)


def _contains(messages: Sequence[ChatMessage], wanted: ChatMessage, rules: CosmeticRules) -> bool:
    return any(is_same_message(message, wanted, rules) for message in messages)


def _replaces_turns(
    stored: Sequence[ChatMessage], incoming: Sequence[ChatMessage], rules: CosmeticRules
) -> bool:
    """Whether sampled turns went away for text of another role, the latest ones kept or none.

    stored    u1 a1 u2 a2 u3 a3
    incoming  summary u4    or    summary u3 a3 u4
    """
    ours, theirs = _replies(stored), _replies(incoming)
    if len(ours) < 2 or len(theirs) >= len(ours):
        return False
    latest = zip(reversed(ours), reversed(theirs), strict=False)
    return all(is_same_message(one, other, rules) for one, other in latest)


def _replies(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    return [message for message in messages if message.role == "assistant"]

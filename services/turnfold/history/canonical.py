"""When two messages are the same message: canonical form, digests and chains of digests.

Agents send the history back re-serialised. What carries no meaning must not count: the order and
spacing of JSON keys in tool arguments, call ids, null against empty content, the order of the tools
list. Edge whitespace of assistant text, reasoning that was left out, and text beside a tool call
that was left out are cosmetic by rule.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from turnfold.schemas.messages import ChatMessage, Tool, ToolCall

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class CosmeticRules:
    """Which differences in an assistant message are healed rather than taken as an edit."""

    is_edge_whitespace_cosmetic: bool = True
    """Leading and trailing whitespace of the content."""
    is_dropped_reasoning_cosmetic: bool = True
    """Reasoning that the model wrote and the client does not send back."""
    is_dropped_call_text_cosmetic: bool = True
    """Text that the model wrote beside a tool call and the client does not send back: many agents
    keep the calls of such a message only. The calls themselves must be equal."""


def extend_chain(
    digest: bytes, messages: Iterable[ChatMessage], rules: CosmeticRules
) -> list[bytes]:
    """Digests of all message prefixes, so that equal prefixes are found without comparing them.

    d0, m1 m2  →  [d0, d1, d2] with di = H(d(i-1), canonical(mi)); d0 tells the tools
    """
    chain = [digest]
    for message in messages:
        digest = _hash(digest, canonical_message(message, rules))
        chain.append(digest)
    return chain


def tools_digest(tools: Sequence[Tool] | None) -> bytes:
    """Digest of a set of tool schemas: order does not matter, none and an empty list are equal."""
    schemas = sorted(
        msgspec.json.encode(_canonical_value(tool), order="sorted") for tool in tools or ()
    )
    return _hash(*(hashlib.sha256(schema).digest() for schema in schemas))


def canonical_message(message: ChatMessage, rules: CosmeticRules) -> bytes:
    """The bytes that two messages share when they are the same message.

    Reasoning, and text beside a call, take part only where dropping them is not cosmetic; see
    `is_same_message` for edits.
    """
    is_assistant = message.role == "assistant"
    form: list[Any] = [message.role, canonical_content(message, rules)]
    form.append([[call.name, canonical_arguments(call)] for call in message.tool_calls])
    form.append("" if message.role == "tool" else message.name)
    if is_assistant and not rules.is_dropped_reasoning_cosmetic:
        form.append(message.reasoning)
    return msgspec.json.encode(form, order="sorted")


def is_same_message(stored: ChatMessage, incoming: ChatMessage, rules: CosmeticRules) -> bool:
    """Whether `incoming` is `stored` sent back: canonically equal, what may be dropped kept or not."""
    if is_dropped_part_edited(stored, incoming, rules):
        return False
    # Not `stored == incoming`: to Python, True is 1.
    return canonical_message(stored, rules) == canonical_message(incoming, rules)


def is_dropped_part_edited(
    stored: ChatMessage, incoming: ChatMessage, rules: CosmeticRules
) -> bool:
    """Whether reasoning, or text beside a call, came back as something else than was written.

    Leaving it out is no edit.
    """
    theirs = incoming.reasoning.strip()
    if theirs and theirs != stored.reasoning.strip():
        return True
    if not _may_drop_content(stored, rules):
        return False
    content = _content(incoming, rules)
    return bool(content) and content != _content(stored, rules)


def canonical_content(message: ChatMessage, rules: CosmeticRules) -> str:
    """The content without what the rules call cosmetic."""
    return "" if _may_drop_content(message, rules) else _content(message, rules)


def _content(message: ChatMessage, rules: CosmeticRules) -> str:
    if message.role == "assistant" and rules.is_edge_whitespace_cosmetic:
        return message.content.strip()
    return message.content


def _may_drop_content(message: ChatMessage, rules: CosmeticRules) -> bool:
    is_call = message.role == "assistant" and bool(message.tool_calls)
    return is_call and rules.is_dropped_call_text_cosmetic


def canonical_arguments(call: ToolCall) -> Any:
    """Tool arguments as parsed values; text that is not JSON stays text.

    '{"b": 1.0, "a": 2}'  →  {"b": 1, "a": 2}, equal to {"a": 2, "b": 1}
    """
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            return arguments
    return _canonical_value(arguments)


def _canonical_value(value: Any) -> Any:
    """The same value with whole floats as integers: JSON clients write 1.0 back as 1."""
    match value:
        case dict():
            return {str(key): _canonical_value(item) for key, item in value.items()}
        case list() | tuple():
            return [_canonical_value(item) for item in value]
        case float() if value.is_integer():
            return int(value)
        case _:
            return value


def _hash(*parts: bytes) -> bytes:
    lengths = b"".join(len(part).to_bytes(8, "little") for part in parts)
    return hashlib.blake2b(b"".join((lengths, *parts)), digest_size=DIGEST_BYTES).digest()

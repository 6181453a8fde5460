"""Volatile nonces in system text, replaced by a constant before anything is rendered.

Some agents put a checksum of the request into their system text. The model learns nothing from it,
but it makes each request another conversation from its first tokens on: no turn would extend the
one before it, and no engine would find its prefix in the cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import msgspec

from turnfold.gateway.calls import ModelCall
from turnfold.schemas.messages import ChatMessage
from turnfold.schemas.settings import SettingsError

PIN = "0"
"""What stands for every nonce."""


def compile_pins(patterns: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """Patterns whose first group is the nonce. Raises SettingsError naming the one that is not."""
    return tuple(_compiled(pattern) for pattern in patterns)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise SettingsError(f"TURNFOLD_PINNED_PATTERNS: {pattern!r}: {error}") from error
    if compiled.groups != 1:
        raise SettingsError(
            f"TURNFOLD_PINNED_PATTERNS: {pattern!r} has {compiled.groups} groups, expected 1 "
            "around what changes"
        )
    return compiled


def pin_nonces(call: ModelCall, patterns: Sequence[re.Pattern[str]]) -> ModelCall:
    """The call with its nonces replaced, and what came kept in `pinned`.

    system "billing: cch=36ee5; You are …"  ->  "billing: cch=0; You are …"
    pinned (("cch=36ee5;", "cch=0;"),)
    """
    pinned: list[tuple[str, str]] = []

    def replace(match: re.Match[str]) -> str:
        came, offset = match.group(), match.start()
        if match.start(1) < 0:  # an alternative of the pattern that has no nonce
            return came
        stands = came[: match.start(1) - offset] + PIN + came[match.end(1) - offset :]
        pinned.append((came, stands))
        return stands

    def pinned_message(message: ChatMessage) -> ChatMessage:
        content = message.content
        for pattern in patterns:
            content = pattern.sub(replace, content)
        return msgspec.structs.replace(message, content=content)

    if not patterns:
        return call
    messages = tuple(
        pinned_message(message) if message.role == "system" else message
        for message in call.messages
    )
    if not pinned:  # the messages stay the objects that their session knows
        return call
    return msgspec.structs.replace(call, messages=messages, pinned=tuple(pinned))

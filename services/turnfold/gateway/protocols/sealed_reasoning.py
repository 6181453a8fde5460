"""Reasoning inside an opaque token that clients send back as it came.

Anthropic's `signature` and OpenAI's `encrypted_content` are fields that no client touches. What the
model thought rides in them to the byte, so it comes back even from a client that trims the text it
shows, or that asked for no text at all. It is no secret: the token is only an encoding.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "tf1."


def seal(reasoning: str) -> str:
    """The token for a text.

    >>> seal("hm")
    'tf1.aG0='
    """
    return _PREFIX + base64.urlsafe_b64encode(reasoning.encode()).decode()


def unseal(token: str, shown: str = "") -> str:
    """The reasoning of a block with this token and this text.

    The sealed text counts when the block shows it, but for whitespace at its edges, or shows none.
    Where a client wrote something else, or the token is not ours, what the block shows counts.

    >>> unseal("tf1.IGhtCg==", "hm"), unseal("tf1.aG0=", "ah"), unseal("EqQBCkgIARAB", "ah")
    (' hm\\n', 'ah', 'ah')
    """
    if not token.startswith(_PREFIX):
        return shown
    try:
        encoded = token.removeprefix(_PREFIX)
        sealed = base64.b64decode(encoded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return shown
    return sealed if shown.strip() in ("", sealed.strip()) else shown

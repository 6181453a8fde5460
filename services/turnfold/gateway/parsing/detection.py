"""Which family a chat template belongs to."""

from __future__ import annotations

from turnfold.gateway.parsing import plain, qwen
from turnfold.gateway.parsing.replies import ReplyFormat

FORMATS = {
    "qwen": ReplyFormat(name="qwen", parse=qwen.parse, has_tools=True),
    "reasoning": ReplyFormat(name="reasoning", parse=qwen.parse, has_tools=False),
    "plain": ReplyFormat(name="plain", parse=plain.parse, has_tools=False),
}

_OTHER_CALLS = ("<function=", "<arg_key>", "<｜tool▁call")
"""Marks of families that wrap their calls otherwise, some of them inside `<tool_call>` too."""


class UnknownFormat(ValueError):
    """The template's way to write tool calls is not known; the text says what to set."""


def reply_format_of(template: str, override: str = "") -> ReplyFormat:
    """The format that the template shows, or the one named by `override`. Raises UnknownFormat.

    A template that writes calls as `<tool_call>` around JSON is Qwen's; with one that does not know
    tools, requests that offer some are refused. A template with tools in another form is refused
    now rather than after sampling.
    """
    if override:
        if override not in FORMATS:
            raise UnknownFormat(
                f"reply format {override!r} is not known: expected one of {', '.join(FORMATS)}"
            )
        return FORMATS[override]
    if "</tool_call>" in template and not any(mark in template for mark in _OTHER_CALLS):
        return FORMATS["qwen"]
    if "tools" not in template:
        return FORMATS["reasoning" if "</think>" in template else "plain"]
    raise UnknownFormat(
        "the chat template offers tools in a form that no reply parser reads; set "
        f"TURNFOLD_REPLY_FORMAT to one of {', '.join(FORMATS)} (plain and reasoning serve requests without tools)"
    )

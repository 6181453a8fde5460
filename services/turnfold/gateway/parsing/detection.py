"""Which family a chat template belongs to."""

from __future__ import annotations

import re

from msgspec import structs

from turnfold.gateway.parsing import (
    deepseek,
    glm,
    gpt_oss,
    llama,
    minimax,
    mistral,
    plain,
    qwen,
    qwen_coder,
)
from turnfold.gateway.parsing.replies import ReplyFormat

FORMATS = {
    reply_format.name: reply_format
    for reply_format in (
        qwen.FORMAT,
        qwen_coder.FORMAT,
        llama.FORMAT,
        mistral.FORMAT,
        deepseek.FORMAT,
        glm.FORMAT,
        gpt_oss.FORMAT,
        minimax.FORMAT,
        qwen.REASONING,
        plain.FORMAT,
    )
}

_MARKS = {
    "gpt_oss": ("<|channel|>", "<|message|>", "to="),
    "minimax": ("<minimax:tool_call>", "<invoke name="),
    "glm": ("<tool_call>", "<arg_key>", "<arg_value>"),
    "qwen_coder": ("<tool_call>", "<function=", "<parameter="),
    "deepseek": ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    "mistral": ("[TOOL_CALLS]", "[INST]"),
    "llama": ("<|start_header_id|>", '"parameters": '),
    "qwen": ("<tool_call>", "</tool_call>"),
}
"""What a template of the family writes, all of it; the first family that fits is the one.

GLM and Qwen3-Coder write their calls inside Qwen's tags, so they stand before it.
"""


_OTHERS_IN_THE_SAME_TAGS = ("<function=", "<arg_key>", "<invoke name=", "<tool_calls>")
"""A template with one of these is not Qwen's."""


class UnknownFormat(ValueError):
    """The template's way to write tool calls is not known; the text says what to set."""


def reply_format_of(template: str, override: str = "") -> ReplyFormat:
    """The format that the template shows, or the one named by `override`. Raises UnknownFormat.

    A template that never reads `tools` makes a format without tools, so that requests which offer
    some are refused. One that offers tools in a form that nobody here reads is refused now rather
    than after sampling.
    """
    if override:
        if override not in FORMATS:
            raise UnknownFormat(
                f"reply format {override!r} is not known: expected one of {', '.join(FORMATS)}"
            )
        return FORMATS[override]
    has_tools = re.search(r"\btools\b", template) is not None
    for name, marks in _MARKS.items():
        if all(mark in template for mark in marks) and not _is_other(name, template):
            return structs.replace(FORMATS[name], has_tools=has_tools)
    if not has_tools:
        return FORMATS["reasoning" if "</think>" in template else "plain"]
    raise UnknownFormat(
        "the chat template offers tools in a form that no reply parser reads; set "
        f"TURNFOLD_REPLY_FORMAT to one of {', '.join(FORMATS)} (plain and reasoning serve requests "
        "without tools)"
    )


def _is_other(name: str, template: str) -> bool:
    return name == "qwen" and any(mark in template for mark in _OTHERS_IN_THE_SAME_TAGS)

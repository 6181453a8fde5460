"""What OpenAI's clients say about the use of tools."""

from __future__ import annotations

from typing import Any

from turnfold.gateway.refusals import invalid


def is_calling_allowed(tool_choice: Any) -> bool:
    """Whether the model may call tools. Raises Refusal where it would be forced to."""
    if tool_choice in (None, "auto"):
        return True
    if tool_choice == "none":
        return False
    raise invalid(
        "tool_choice: expected `auto` or `none`; a call cannot be forced without constraining the "
        "output",
        "tool_choice",
    )


def refuse_single_calls(parallel_tool_calls: bool | None) -> None:
    """Raise Refusal where the model would be held to one call a turn."""
    if parallel_tool_calls is False:
        raise invalid(
            "parallel_tool_calls: false is not supported: the model decides how many calls it makes",
            "parallel_tool_calls",
        )

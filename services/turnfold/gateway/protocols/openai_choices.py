"""What OpenAI's clients say about the use of tools and the form of the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnfold.gateway.constraints import Constraint
from turnfold.gateway.refusals import invalid

_FORCING = ("required", "any")
"""OpenAI's word, and the one of those who speak its protocol."""


def is_calling_allowed(tool_choice: Any) -> bool:
    """Whether the model may call tools. Raises Refusal for a choice that means nothing."""
    if tool_choice in (None, "auto", "none", *_FORCING) or isinstance(tool_choice, dict):
        return bool(tool_choice != "none")
    raise invalid(_forced_call().message, "tool_choice")


def call_constraints(tool_choice: Any, parallel_tool_calls: bool | None) -> Iterator[Constraint]:
    """What would force a call, or hold the model to one a turn."""
    if tool_choice not in (None, "auto", "none"):
        yield _forced_call()
    if parallel_tool_calls is False:
        yield Constraint(
            field="parallel_tool_calls",
            message="parallel_tool_calls: false is not supported: the model decides how many calls "
            "it makes",
        )


def form_constraint(form: Any, field: str) -> Iterator[Constraint]:
    """What would give the answer a form other than text."""
    if form is not None and not isinstance(form, dict):
        raise invalid(f"{field}: expected an object", field)
    if (form or {}).get("type", "text") != "text":
        yield Constraint(
            field=field, message=f"{field}: only `text` is supported: output is not constrained"
        )


def _forced_call() -> Constraint:
    return Constraint(
        field="tool_choice",
        message="tool_choice: expected `auto` or `none`; a call cannot be forced without "
        "constraining the output",
    )

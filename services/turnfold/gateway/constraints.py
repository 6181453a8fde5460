"""What a request would hold the output to, and what is done about it.

Every reply is sampled freely from the policy, so that its logprobs are the policy's own. A request
to force a call, to allow only one, or to give the answer a form cannot be kept: it is refused by
name, or the gateway goes on without it and says so on the turn, in a header and in a counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from turnfold.gateway.refusals import invalid
from turnfold.schemas.wire import Wire

UnenforcedPolicy = Literal["refuse", "ignore"]

UNKNOWN_FIELD = "unknown_field"
"""Stands for a field whose name cannot be told, and for all unknown ones where they are counted."""

_COUNTED = frozenset(
    [
        "tool_choice", "tool_choice.type", "tool_choice.disable_parallel_tool_use",
        "parallel_tool_calls", "response_format", "text.format", "output_format",
        "output_config.format", "structured_outputs", "guided_json", "guided_regex",
        "guided_choice", "guided_grammar", "bad_words",
    ]
)  # fmt: skip


def counted_field(field: str) -> str:
    """The field as a label of a metric, which must not grow with what clients make up.

    >>> counted_field("tool_choice"), counted_field("foo")
    ('tool_choice', 'unknown_field')
    """
    return field if field in _COUNTED else UNKNOWN_FIELD


class Constraint(Wire, frozen=True, kw_only=True):
    """A field of a request that asks for what nobody enforces."""

    field: str
    """As the protocol names it: `tool_choice`, `text.format`."""
    message: str
    """Why the request is refused, if it is."""
    code: str | None = None


def refuse_unenforced(constraints: Sequence[Constraint], policy: UnenforcedPolicy) -> None:
    """Raise Refusal naming the first field, unless the policy is to go on without them."""
    if constraints and policy == "refuse":
        first = constraints[0]
        raise invalid(first.message, first.field, first.code)

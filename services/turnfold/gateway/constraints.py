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

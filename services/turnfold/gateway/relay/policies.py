"""What the policies topic says: the newest policy, and whether it is known to be served."""

from __future__ import annotations

from typing import assert_never

import msgspec

from turnfold.schemas.policies import PolicyEvent, PolicyPublished, PolicyServed
from turnfold.schemas.wire import Wire


class PolicyView(Wire, frozen=True, kw_only=True):
    """Fold of the policies topic, in log order."""

    newest: PolicyPublished | None = None
    served: PolicyServed | None = None
    """The newest statement that a version is served."""
    serving: PolicyPublished | None = None
    """The policy of that statement, as far as it is known."""
    next_offset: int = 0
    """Everything before it is folded."""

    def policy_of(self, version: str) -> PolicyPublished | None:
        """The policy that an engine means by its version, when it is one of the last two."""
        for policy in (self.serving, self.newest):
            if policy is not None and str(policy.policy_version) == version:
                return policy
        return None

    def after_serving(self, served: PolicyServed) -> PolicyView:
        """The view once this statement is made."""
        return msgspec.structs.replace(
            self, served=served, serving=_named(served, self.newest) or self.serving
        )

    @property
    def is_newest_served(self) -> bool:
        """Whether the log says so already."""
        return (
            self.newest is not None
            and self.served is not None
            and self.served.run_id == self.newest.run_id
            and self.served.policy_version == self.newest.policy_version
        )


def fold(view: PolicyView, offset: int, event: PolicyEvent) -> PolicyView:
    """The view after one event; a redelivered one changes nothing.

    The newest policy is the one published last, not the one of the highest version: a new run
    begins at 0 again.
    """
    if offset < view.next_offset:
        return view
    match event:
        case PolicyPublished():
            view = msgspec.structs.replace(view, newest=event)
        case PolicyServed():
            view = view.after_serving(event)
        case _:
            assert_never(event)
    return msgspec.structs.replace(view, next_offset=offset + 1)


def _named(served: PolicyServed, policy: PolicyPublished | None) -> PolicyPublished | None:
    if policy is None:
        return None
    is_named = (served.run_id, served.policy_version) == (policy.run_id, policy.policy_version)
    return policy if is_named else None

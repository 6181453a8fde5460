"""What the policies topic says: the newest policy, and whether it is known to be served."""

from __future__ import annotations

from typing import assert_never

from turnfold.schemas.policies import PolicyEvent, PolicyPublished, PolicyServed
from turnfold.schemas.wire import Wire


class PolicyView(Wire, frozen=True, kw_only=True):
    """Fold of the policies topic, in log order."""

    newest: PolicyPublished | None = None
    served: PolicyServed | None = None
    """The newest statement that a version is served."""
    next_offset: int = 0
    """Everything before it is folded."""

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
    newest, served = view.newest, view.served
    match event:
        case PolicyPublished():
            newest = event
        case PolicyServed():
            served = event
        case _:
            assert_never(event)
    return PolicyView(newest=newest, served=served, next_offset=offset + 1)

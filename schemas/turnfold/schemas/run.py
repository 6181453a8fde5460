"""What the parts of one run must agree on."""

from __future__ import annotations

from typing import Literal

import msgspec

from turnfold.schemas.codec import digest
from turnfold.schemas.wire import Wire


class RunConfig(Wire, frozen=True, kw_only=True, omit_defaults=False):
    """Sizes and bounds of a run; its digest is written into every manifest.

    Raises ValueError naming the field when a size makes no sense.
    """

    run_id: str = "default"
    """Name of the run; several runs share the topics of a namespace."""
    group_size: int = 8
    """Rollouts of one task (verl: actor_rollout_ref.rollout.n)."""
    groups_per_batch: int = 8
    """Groups in a batch (verl: data.train_batch_size)."""
    min_group_size: int = 2
    """Fewest survivors for a group to be trained."""
    max_staleness: int = 2
    """Batches that a row may lag behind the policy it trains; 0 is strictly on-policy."""
    on_stale: Literal["drop", "train"] = "drop"
    """What happens to a group beyond max_staleness: dropped with a reason, or trained."""
    group_timeout_s: float = 3600.0
    """From dispatch to the moment a group closes with its survivors."""
    rollout_timeout_s: float = 1800.0
    """From a rollout's start to its abort."""
    max_row_tokens: int = 32768
    """A rollout with a longer row is left out (verl: actor.ppo_max_token_len_per_gpu)."""
    is_zero_variance_dropped: bool = False
    """Drop groups whose rewards are all equal, and refill the batch."""
    max_attempts: int = 2
    """Times a lost group's task is dispatched in all."""

    def __post_init__(self) -> None:
        # 50 and 50.0 are the same bound, so they must have the same bytes and digest.
        for name in ("group_timeout_s", "rollout_timeout_s"):
            msgspec.structs.force_setattr(self, name, float(getattr(self, name)))
        for name in ("group_size", "groups_per_batch", "min_group_size", "max_row_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size: expected at most group_size {self.group_size}, "
                f"got {self.min_group_size}"
            )
        if self.max_staleness < 0:
            raise ValueError(f"max_staleness: expected 0 or more, got {self.max_staleness}")

    @property
    def digest(self) -> str:
        return digest(self)

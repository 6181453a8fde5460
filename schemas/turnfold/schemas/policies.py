"""Policy versions, on the single compacted partition of `<ns>.policies`."""

from __future__ import annotations

from turnfold.schemas.wire import Wire


class UpdateSchedule(Wire, frozen=True, kw_only=True):
    """Sizes of the update that made a version: from them the optimizer steps of a row follow."""

    num_mini_batches: int = 1
    """Mini-batches of an epoch, each one optimizer step."""
    epochs: int = 1
    """Passes over the batch."""
    steps: int = 1
    """Optimizer steps taken: num_mini_batches x epochs."""
    ranks: int = 1
    """Data-parallel ranks, among which a mini-batch is divided."""


class PolicyPublished(Wire, frozen=True, kw_only=True, tag="policy_published"):
    """The trainer made a new version; its weights can be loaded. Keyed by `run_id`."""

    run_id: str
    policy_version: int
    """Batches trained behind the weights; 0 is the initial policy."""
    weights_uri: str
    """Directory of safetensors with config and tokenizer."""
    checkpoint_uri: str = ""
    at: float = 0.0
    metrics: dict[str, float] = {}
    """What the trainer measured on the batch that made this version."""
    schedule: UpdateSchedule | None = None
    """How the batch was divided into optimizer steps; None when the writer was older, or when no
    batch made the version."""


class PolicyServed(Wire, frozen=True, kw_only=True, tag="policy_served"):
    """Every engine confirmed the version: whatever starts now is sampled by it or by a newer one.

    Keyed by `run_id` + "/served", so that compaction keeps both.
    """

    run_id: str
    policy_version: int
    engines: tuple[str, ...] = ()
    at: float = 0.0


PolicyEvent = PolicyPublished | PolicyServed

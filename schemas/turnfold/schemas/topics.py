"""The topics of a namespace, with their settings."""

from __future__ import annotations

from turnfold.schemas.wire import Wire

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
"""A turn of 100k tokens with logprobs is 0.8 MB; a whole trajectory may be many times that."""


class TopicSpec(Wire, frozen=True, kw_only=True):
    """One topic as it should be."""

    name: str
    num_partitions: int
    config: dict[str, str]
    purpose: str


class Topics(Wire, frozen=True, kw_only=True):
    """Names of all topics of one namespace."""

    namespace: str = "turnfold"

    @property
    def events(self) -> str:
        return f"{self.namespace}.events"

    @property
    def tasks(self) -> str:
        return f"{self.namespace}.tasks"

    @property
    def trajectories(self) -> str:
        return f"{self.namespace}.trajectories"

    @property
    def batches(self) -> str:
        return f"{self.namespace}.batches"

    @property
    def policies(self) -> str:
        return f"{self.namespace}.policies"

    @property
    def dead_letters(self) -> str:
        return f"{self.namespace}.dead-letters"

    def specs(self, num_partitions: int = 4, retention_ms: int = -1) -> tuple[TopicSpec, ...]:
        """Every topic; `retention_ms` of -1 keeps the log for ever."""
        kept = {
            "cleanup.policy": "delete",
            "retention.ms": str(retention_ms),
            "max.message.bytes": str(MAX_MESSAGE_BYTES),
        }
        compacted = {"cleanup.policy": "compact", "max.message.bytes": str(MAX_MESSAGE_BYTES)}
        return (
            _spec(self.events, num_partitions, kept, "the log: everything that happened"),
            _spec(self.tasks, num_partitions, kept, "groups handed to agents"),
            _spec(self.trajectories, num_partitions, kept, "rows of finished rollouts, derived"),
            _spec(self.batches, 1, kept, "manifests: which rows train in which batch"),
            _spec(self.policies, 1, compacted, "newest weights, and what the engines serve"),
            _spec(self.dead_letters, 1, kept, "records that could not be used, with the reason"),
        )


def _spec(name: str, num_partitions: int, config: dict[str, str], purpose: str) -> TopicSpec:
    return TopicSpec(name=name, num_partitions=num_partitions, config=config, purpose=purpose)

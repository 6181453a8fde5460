"""What the log says about a run so far; pure, so that a resumed display shows the same numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from turnfold.schemas.batches import BatchCut, GroupDropped
from turnfold.schemas.events import (
    Event,
    RolloutAborted,
    RolloutFinished,
    RolloutStarted,
    TurnCompleted,
    TurnFailed,
)
from turnfold.schemas.policies import PolicyPublished, PolicyServed
from turnfold.schemas.tasks import Task

Message = Event | Task | BatchCut | GroupDropped | PolicyPublished | PolicyServed


@dataclass
class BatchLine:
    """One batch as the table shows it."""

    index: int
    num_rollouts: int
    num_rows: int
    mean_reward: float
    mean_staleness: float
    max_staleness: int
    metrics: dict[str, float] = field(default_factory=dict)
    """What the trainer measured; empty until it has trained the batch."""

    @property
    def is_trained(self) -> bool:
        return bool(self.metrics)


@dataclass
class Progress:
    """Counts over the log. Feed every message once, in any order between topics."""

    num_groups: int = 0
    in_flight: set[str] = field(default_factory=set)
    num_rollouts: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_failed_turns: int = 0
    continuity: Counter[str] = field(default_factory=Counter)
    num_sampled: int = 0
    batches: dict[int, BatchLine] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    published: int = -1
    served: int = -1

    def feed(self, message: Message) -> None:
        """Count one message; a message type that the display does not show is skipped."""
        match message:
            case Task():
                self.num_groups += 1
            case RolloutStarted():
                self.num_rollouts += 1
                self.in_flight.add(message.rollout_id)
            case TurnCompleted():
                self.continuity[message.continuity] += 1
                self.num_sampled += len(message.output_ids)
            case TurnFailed():
                self.num_failed_turns += 1
            case RolloutFinished():
                self.num_finished += 1
                self.in_flight.discard(message.rollout_id)
            case RolloutAborted():
                self.num_aborted += 1
                self.in_flight.discard(message.rollout_id)
            case BatchCut():
                self.batches.setdefault(message.index, _line(message))
            case GroupDropped():
                self.dropped[message.reason] += 1
            case PolicyPublished():
                self._publish(message)
            case PolicyServed():
                self.served = max(self.served, message.policy_version)
            case _:
                pass

    def _publish(self, policy: PolicyPublished) -> None:
        self.published = max(self.published, policy.policy_version)
        line = self.batches.get(policy.policy_version)
        if line is not None:
            line.metrics = policy.metrics

    @property
    def trained(self) -> list[BatchLine]:
        """Batches that made a published version, in order."""
        return [line for index, line in sorted(self.batches.items()) if index <= self.published]

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each trained batch, in order."""
        return [line.mean_reward for line in self.trained]


def _line(batch: BatchCut) -> BatchLine:
    rollouts = [ref for group in batch.groups for ref in group.rollouts]
    lags = [batch.policy_version - ref.min_policy_version for ref in rollouts]
    return BatchLine(
        index=batch.index,
        num_rollouts=len(rollouts),
        num_rows=batch.num_rows,
        mean_reward=sum(ref.reward for ref in rollouts) / len(rollouts),
        mean_staleness=sum(lags) / len(lags),
        max_staleness=max(lags),
    )

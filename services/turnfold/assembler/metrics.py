"""What an assembler counts since it started; served on /metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from prometheus_client import Counter, Gauge, Histogram

from turnfold.schemas.batches import (
    BatchCut,
    Decision,
    EvaluationCompleted,
    GroupDropped,
    GroupEvaluated,
    LeftOut,
)

GROUPS = Gauge("turnfold_assembler_groups", "Open groups", ["state"])
BATCHES = Counter("turnfold_assembler_batches", "Batches cut")
DROPPED = Counter("turnfold_assembler_groups_dropped", "Groups that no batch will hold", ["reason"])
LEFT_OUT = Counter("turnfold_assembler_rollouts_left_out", "Rollouts not trained", ["reason"])
DEAD_LETTERS = Counter("turnfold_assembler_dead_letters", "Records that could not be decoded")
EVALUATED_VERSION = Gauge("turnfold_assembler_evaluated_version", "Version evaluated last")
EVALUATION_REWARD = Gauge("turnfold_assembler_evaluation_reward", "Mean reward of that evaluation")
STALENESS = Histogram(
    "turnfold_assembler_staleness",
    "Versions between a trained rollout's oldest token and the policy it trains",
    buckets=[0, 1, 2, 3, 4, 6, 8, 12, 16, 32],
)


def count(decision: Decision) -> None:
    """Count a decision that has been read back from the log."""
    match decision:
        case BatchCut():
            BATCHES.inc()
            for ref in (ref for group in decision.groups for ref in group.rollouts):
                STALENESS.observe(decision.policy_version - ref.min_policy_version)
            _count_left_out(left for group in decision.groups for left in group.left_out)
        case GroupDropped():
            DROPPED.labels(decision.reason).inc()
            _count_left_out(decision.left_out)
        case GroupEvaluated():
            pass  # counted with its round
        case EvaluationCompleted():
            EVALUATED_VERSION.set(decision.version)
            if decision.mean_reward is not None:
                EVALUATION_REWARD.set(decision.mean_reward)
        case _:
            assert_never(decision)


def _count_left_out(left_out: Iterable[LeftOut]) -> None:
    for left in left_out:
        LEFT_OUT.labels(left.reason.split(":")[0]).inc()

"""What is worth knowing about a batch, besides what verl measures. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from turnfold.trainer.plan import Plan
from turnfold.trainer.rows import TrainRow
from turnfold.trainer.source import Batch, refs, staleness


def batch_metrics(batch: Batch, rows: Sequence[TrainRow], plan: Plan) -> dict[str, float]:
    """Rewards, staleness and sizes of a batch; names are those of PolicyPublished.metrics."""
    rewards = [t.reward for t in batch.trajectories if t.reward is not None]
    lags = [staleness(batch.cut, ref) for _, ref in refs(batch.cut)]
    return {
        "reward_mean": _mean(rewards),
        "staleness_mean": _mean(lags),
        "staleness_max": float(max(lags, default=0)),
        "groups": float(len(batch.cut.groups)),
        "rollouts": float(len(batch.trajectories)),
        "rows": float(plan.num_rows),
        "padding_rows": float(plan.num_padding),
        "tokens": float(sum(len(row.row.token_ids) for row in rows)),
        "trained_tokens": float(sum(row.row.num_trained for row in rows)),
        "advantage_zero_share": advantage_zero_share(rows),
        "optimizer_steps": float(plan.num_steps),
    }


def advantage_zero_share(rows: Sequence[TrainRow]) -> float:
    """Share of trained tokens whose advantage is 0; 1 when nothing is trained.

    [.5 (0)] and [0 0], brackets masked: 2 of the 3 trained tokens.
    """
    total = sum(row.row.num_trained for row in rows)
    silent = sum(row.row.num_trained for row in rows if row.advantage == 0.0)
    return silent / total if total else 1.0


def idle_metrics(
    *, training_s: float, saving_s: float, no_batch_s: float, publishing_s: float
) -> dict[str, float]:
    """Seconds of training a batch, and of not training since the batch before, by cause.

    saving: checkpoint files and a copy of the weights were taken; no_batch: none was cut;
    publishing: the version before was still being written when this one was ready.
    """
    idle = saving_s + no_batch_s + publishing_s
    return {
        "seconds": training_s,
        "wait_s": no_batch_s,
        "saving_wait_s": saving_s,
        "publishing_wait_s": publishing_s,
        "idle_share": idle / (idle + training_s) if idle + training_s > 0 else 0.0,
    }


def summary(index: int, metrics: dict[str, float]) -> str:
    """One line about a batch, for the log."""
    m = metrics
    return (
        f"batch {index}: reward {m['reward_mean']:.3f}, {m['groups']:.0f} groups, "
        f"{m['rollouts']:.0f} rollouts, {m['rows']:.0f}+{m['padding_rows']:.0f} rows, "
        f"{m['trained_tokens']:.0f} trained tokens, {m['optimizer_steps']:.0f} steps, "
        f"staleness {m['staleness_mean']:.2f} (max {m['staleness_max']:.0f}), "
        f"mismatch kl {m.get('mismatch_kl', 0.0):.2g}, grad norm {m.get('grad_norm', 0.0):.3g}, "
        f"{m['seconds']:.1f} s (waited {m['wait_s']:.1f} s)"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

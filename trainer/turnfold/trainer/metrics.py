"""What is worth knowing about a batch, besides what verl measures. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnfold.schemas.policies import UpdateSchedule
from turnfold.schemas.trajectories import Trajectory
from turnfold.trainer.plan import Plan, Schedule
from turnfold.trainer.rows import TrainRow, token_advantages
from turnfold.trainer.source import Batch, refs, staleness


def update_schedule(schedule: Schedule) -> UpdateSchedule:
    """The schedule as PolicyPublished carries it."""
    return UpdateSchedule(
        num_mini_batches=schedule.num_mini_batches,
        epochs=schedule.num_epochs,
        steps=schedule.num_steps,
        ranks=schedule.num_ranks,
    )


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
        "split_rollouts": float(sum(len(t.rows) > 1 for t in batch.trajectories)),
        "left_out_rollouts": float(sum(len(group.left_out) for group in batch.cut.groups)),
        "rows": float(plan.num_rows),
        "padding_rows": float(plan.num_padding),
        "tokens": float(sum(len(row.row.token_ids) for row in rows)),
        "trained_tokens": float(sum(row.row.num_trained for row in rows)),
        "advantage_zero_share": advantage_zero_share(rows),
        "optimizer_steps": float(plan.num_steps),
        **ledger_shares(batch.trajectories),
        **verl_metrics(batch.trajectories, rows),
    }


def ledger_shares(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Where the sampled tokens of the batch went, as shares that sum to 1, and why.

    8 trained, 2 dropped as orphan  ->  ledger/trained 0.8, ledger/masked 0, ledger/dropped 0.2,
                                        ledger/dropped/orphan 0.2
    """
    ledgers = [trajectory.ledger for trajectory in trajectories]
    counts: Counter[str] = Counter({"trained": 0, "masked": 0, "dropped": 0})
    for ledger in ledgers:
        counts["trained"] += ledger.num_trained
        for kind, reasons in (("masked", ledger.masked), ("dropped", ledger.dropped)):
            counts[kind] += reasons.total()
            counts.update({f"{kind}/{reason}": number for reason, number in reasons.items()})
    sampled = sum(ledger.num_sampled for ledger in ledgers)
    return {f"ledger/{name}": count / max(sampled, 1) for name, count in counts.items()}


def verl_metrics(trajectories: Sequence[Trajectory], rows: Sequence[TrainRow]) -> dict[str, float]:
    """What verl's own trainers call these numbers, for dashboards made for them.

    A score is that of a rollout; lengths are those of rows, prompt and the rest as verl gets them.
    """
    rewards = [t.reward for t in trajectories if t.reward is not None]
    advantages = [token_advantages(row)[row.row.loss_mask.array == 1] for row in rows]
    prompts = [row.num_prompt for row in rows]
    lengths = [len(row.row.token_ids) for row in rows]
    answers = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    return {
        **_spread("critic/score", rewards),
        **_spread("critic/rewards", rewards),
        **_spread("critic/advantages", np.concatenate(advantages) if advantages else []),
        **_spread("prompt_length", prompts),
        **_spread("response_length", answers),
        **_spread("training/num_turns", [t.num_turns for t in trajectories]),
        "perf/total_num_tokens": float(sum(lengths)),
    }


def advantage_zero_share(rows: Sequence[TrainRow]) -> float:
    """Share of trained tokens whose advantage is 0; 1 when nothing is trained.

    [.5 (0)] and [0 0], brackets masked: 2 of the 3 trained tokens.
    """
    total = sum(row.row.num_trained for row in rows)
    moving = sum(int(np.count_nonzero(token_advantages(row))) for row in rows)
    return (total - moving) / total if total else 1.0


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
        "timing_s/update_actor": training_s,
        "timing_s/step": idle + training_s,
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
        f"mismatch kl {m.get('mismatch_kl', math.nan):.2g}, grad norm {m.get('grad_norm', 0.0):.3g}, "
        f"{m['seconds']:.1f} s (waited {m['wait_s']:.1f} s)"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _spread(name: str, values: Sequence[float] | NDArray[np.float32]) -> dict[str, float]:
    if len(values) == 0:
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }

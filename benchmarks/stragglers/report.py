"""From a finished simulation to figures."""

from __future__ import annotations

from collections import Counter
from typing import Any

import bias
import numpy as np
from engine import SimGroup, Simulation


def figures(sim: Simulation, *, warmup: int, permutations: int) -> dict[str, Any]:
    """What the trainer, the agents and the data saw; the first `warmup` batches are left out."""
    steps = sim.steps[warmup : sim.num_published]
    began = steps[0].started_at - steps[0].waited_s
    seconds = sim.finished_at - began
    staleness = staleness_counts(sim)
    total = sum(staleness.values())
    settled = settled_groups(sim)
    return {
        "policy": sim.policy.name,
        "batches": sim.num_published,
        "hours": round(seconds / 3600, 2),
        "batches_per_hour": round(3600 * len(steps) / seconds, 4),
        "trainer_idle_share": round(sum(step.waited_s for step in steps) / seconds, 5),
        "staleness": {str(lag): round(n / total, 5) for lag, n in sorted(staleness.items())},
        "mean_staleness": round(sum(lag * n for lag, n in staleness.items()) / total, 3),
        "max_staleness": max(staleness),
        "groups": dict(Counter(group.fate for group in sim.groups)),
        "wasted_share": round(wasted_share(settled), 5),
        "longest_undecided_s": round(longest_undecided(sim), 1),
        "peak_running": sim.peak_running,
        "bias": bias_of(sim, settled, permutations),
    }


def staleness_counts(sim: Simulation) -> Counter[int]:
    return Counter(lag for batch in sim.batches[: sim.num_published] for lag in batch.staleness)


def settled_groups(sim: Simulation) -> list[SimGroup]:
    """Groups dispatched before the oldest one that is open: each has met its fate."""
    first_open = next((g.index for g in sim.groups if g.fate == "open"), len(sim.groups))
    return sim.groups[:first_open]


def wasted_share(groups: list[SimGroup]) -> float:
    """Of the rollouts that completed, those in no batch."""
    completed = sum(len(group.survivors) for group in groups)
    trained = sum(len(group.trained) for group in groups)
    return 1.0 - trained / completed if completed else 0.0


def longest_undecided(sim: Simulation) -> float:
    """Longest time from a dispatch to a decision, or to the end of the run."""
    return max(
        (sim.finished_at if group.fate == "open" else group.decided_at) - group.dispatched_at
        for group in sim.groups
    )


def bias_of(sim: Simulation, groups: list[SimGroup], permutations: int) -> dict[str, Any]:
    """Trained against dispatched, by the length that a rollout has when nothing goes wrong."""
    size = sim.world.group_size
    lengths = np.array([group.draw.lengths for group in groups])
    trained = np.array([[slot in group.trained for slot in range(size)] for group in groups])
    scales = np.array([sim.workload.scale(group.number) for group in groups])
    found = bias.measure(
        lengths, trained, scales, permutations=permutations, seed=sim.workload.seed
    )
    shares = [round(share, 4) for share in found.trained_share_by_length]
    rounded = {
        name: round(value, 5) for name, value in vars(found).items() if not isinstance(value, tuple)
    }
    return {**rounded, "trained_share_by_length": shares}

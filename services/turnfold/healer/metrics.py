"""What a healer counts since it started; served on /metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from turnfold.schemas.trajectories import Trajectory

TRAJECTORIES = Counter("turnfold_healer_trajectories", "Trajectories written", ["status"])
TOKENS = Counter("turnfold_healer_tokens", "Sampled tokens by what became of them", ["fate"])
HEALED_TURNS = Counter("turnfold_healer_healed_turns", "Turns that would have drifted")
MARKED = Counter("turnfold_healer_marked_rollouts", "Rollouts with something wrong in their log")
DEAD_LETTERS = Counter("turnfold_healer_dead_letters", "Records that could not be used")
IGNORED = Counter("turnfold_healer_ignored_events", "Events that change nothing", ["kind"])
DEADLINES = Counter("turnfold_healer_deadlines", "Rollouts aborted at their deadline")
OPEN_ROLLOUTS = Gauge("turnfold_healer_open_rollouts", "Rollouts not closed yet", ["partition"])
IDLE_ROLLOUTS = Gauge(
    "turnfold_healer_idle_rollouts", "Open rollouts that rest on disk", ["partition"]
)
LAG = Gauge("turnfold_healer_lag", "Records of the log not folded yet", ["partition"])
FOLD_SECONDS = Histogram(
    "turnfold_healer_fold_seconds",
    "Time to fold the records of one poll",
    buckets=[0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10],
)


def count(trajectory: Trajectory) -> None:
    """Count a trajectory that is being written."""
    TRAJECTORIES.labels(trajectory.status).inc()
    TOKENS.labels("trained").inc(trajectory.ledger.num_trained)
    TOKENS.labels("masked").inc(trajectory.ledger.masked.total())
    TOKENS.labels("dropped").inc(trajectory.ledger.dropped.total())
    HEALED_TURNS.inc(trajectory.num_healed)
    MARKED.inc(bool(trajectory.marks))

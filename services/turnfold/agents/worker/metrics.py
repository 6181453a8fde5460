"""What a worker counts since it started; served on /metrics."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

ROLLOUTS = Counter("turnfold_worker_rollouts", "Rollouts that ended", ["outcome", "reason"])
RUNNING = Gauge("turnfold_worker_rollouts_running", "Rollouts of which the agent runs now")
LEFT_BEHIND = Counter("turnfold_worker_agents_left_behind", "Agents that did not end when told to")
GROUPS = Counter("turnfold_worker_groups", "Groups taken from the log")
SKIPPED = Counter("turnfold_worker_groups_skipped", "Groups not taken", ["reason"])

"""Tasks that the dispatcher hands to agents, keyed by `group_id` on `<ns>.tasks`."""

from __future__ import annotations

from typing import Any

from turnfold.schemas.events import HistoryMode, NonlinearPolicy, RewritePolicy, Sampling, Split
from turnfold.schemas.wire import Wire


class Evaluation(Wire, frozen=True, kw_only=True):
    """The round of evaluation that a task belongs to: the same tasks at one policy version."""

    version: int
    """The policy version that was due; it names the round."""
    num_tasks: int
    """Tasks of the round."""
    pass_reward: float = 1.0
    """A rollout with this reward or more has passed, for pass@k."""


class Task(Wire, frozen=True, kw_only=True, tag="task"):
    """One group of `n` rollouts to run on one problem."""

    run_id: str
    group_id: str
    """Unique for one dispatch; a re-dispatch of the same task is another group."""
    task_id: str
    dispatch_index: int
    """0, 1, 2, … in order of dispatch within the run; the oldest group is trained first.
    Evaluation groups have a count of their own."""
    n: int
    """Rollouts in the group."""
    payload: dict[str, Any]
    """What the agent gets: the row of the data set, verbatim."""
    split: Split = "train"
    attempt: int = 0
    """0, then one more for each re-dispatch after the group was lost."""
    epoch: int = 0
    cursor: int = 0
    """Place in the data set's order of this epoch; the dispatcher resumes after the highest."""
    policy_version: int = 0
    """Version that every engine served when this was dispatched."""
    dispatched_at: float = 0.0
    """Unix seconds."""
    rollout_timeout_s: float | None = None
    """Time from a rollout's start to its abort."""
    history_mode: HistoryMode = "linear"
    nonlinear: NonlinearPolicy = "reset"
    rewrites: RewritePolicy = "keep"
    sampling: Sampling = Sampling()
    max_turns: int | None = None
    max_context_tokens: int | None = None
    evaluation: Evaluation | None = None
    """Set on the tasks of an evaluation, whose `split` is eval; `cursor` is its place in the round."""

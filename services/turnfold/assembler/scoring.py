"""The next decision on evaluations: what a group scored, or a whole round. Pure.

Nothing here looks at the groups to be trained, and nothing there looks at evaluations: with and
without them the same batches are cut.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from turnfold.assembler.evaluation import EvaluationGroup, EvaluationTask
from turnfold.assembler.groups import GroupsState
from turnfold.assembler.rollouts import RolloutSummary, reason_for_no_reward
from turnfold.schemas.batches import (
    EvaluatedRollout,
    EvaluationCompleted,
    GroupEvaluated,
    LeftOut,
)
from turnfold.schemas.run import RunConfig


def decide_evaluation(
    state: GroupsState, config: RunConfig, now: float
) -> GroupEvaluated | EvaluationCompleted | None:
    """One decision; None when no round is complete and no evaluation group has closed.

    A function of the log up to `state.positions`, of the decisions before it, of the configuration
    and of `now`, as `cut.decide` is.
    """
    assert config == state.config, "decide with the configuration that the state was made with"
    for version, results in sorted(state.evaluations.results.items()):
        groups = [results[cursor] for cursor in sorted(results)]
        if len(groups) >= groups[0].evaluation.num_tasks:
            return _completed(state, config, now, version, groups)
    group = state.evaluations.first_closed(now)
    if group is None or group.task is None:
        return None
    return _evaluated(state, config, now, group, group.task)


def pass_at(groups: Sequence[tuple[int, int]]) -> dict[int, float]:
    """Chance that one of k rollouts passes, for k = 1, 2, 4, … up to the smallest group.

    `groups` holds (rollouts, of these passed), at least one rollout each. The mean over groups of
    1 - C(n - c, k) / C(n, k), which is unbiased (Chen et al. 2021, arXiv:2107.03374).

        pass_at([(4, 1), (4, 4)])  == {1: 0.625, 2: 0.75, 4: 1.0}
    """
    largest = min((n for n, _ in groups), default=0)
    sizes = [2**power for power in range(largest.bit_length())]
    return {
        k: math.fsum(1 - math.comb(n - c, k) / math.comb(n, k) for n, c in groups) / len(groups)
        for k in sizes
    }


def _evaluated(
    state: GroupsState, config: RunConfig, now: float, group: EvaluationGroup, task: EvaluationTask
) -> GroupEvaluated:
    scored, left_out = _scored(group, task)
    return GroupEvaluated(
        run_id=config.run_id,
        group_id=group.group_id,
        task_id=task.task_id,
        cursor=task.cursor,
        attempt=task.attempt,
        evaluation=task.evaluation,
        rollouts=tuple(scored),
        left_out=tuple(left_out),
        is_retried=not scored and task.attempt + 1 < config.max_attempts,
        positions=state.positions,
        at=now,
        config_digest=config.digest,
        config=config,
    )


def _scored(
    group: EvaluationGroup, task: EvaluationTask
) -> tuple[list[EvaluatedRollout], list[LeftOut]]:
    """One reward for each slot, and why the other rollouts have none that counts."""
    scored: dict[int, EvaluatedRollout] = {}
    left_out: list[LeftOut] = []
    for rollout in sorted(group.rollouts.values(), key=lambda r: (r.index, r.rank)):
        reason = _reason_not_to_score(rollout, task)
        if reason is None and rollout.index in scored:
            reason = "superseded"
        if reason is None:
            scored[rollout.index] = _result(rollout)
        else:
            left_out.append(LeftOut(rollout_id=rollout.rollout_id, reason=reason))
    ended = {rollout.index for rollout in group.rollouts.values()}
    left_out += [
        LeftOut(rollout_id=f"{group.group_id}-{index:02d}", reason="not_finished")
        for index in range(task.n)
        if index not in ended
    ]
    return list(scored.values()), left_out


def _reason_not_to_score(rollout: RolloutSummary, task: EvaluationTask) -> str | None:
    """A rollout that sampled nothing or too much has a reward all the same: it counts."""
    reason = reason_for_no_reward(rollout)
    if reason is not None:
        return reason
    return None if 0 <= rollout.index < task.n else "no_such_slot"


def _result(rollout: RolloutSummary) -> EvaluatedRollout:
    assert rollout.reward is not None, f"rollout {rollout.rollout_id} has no reward"
    return EvaluatedRollout(
        rollout_id=rollout.rollout_id,
        index=rollout.index,
        reward=rollout.reward,
        num_tokens=rollout.num_tokens,
        min_policy_version=rollout.min_policy_version,
        max_policy_version=rollout.max_policy_version,
    )


def _completed(
    state: GroupsState,
    config: RunConfig,
    now: float,
    version: int,
    groups: Sequence[GroupEvaluated],
) -> EvaluationCompleted:
    means = [mean for group in groups if (mean := group.mean_reward) is not None]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    reasons = Counter(left.reason for group in groups for left in group.left_out)
    return EvaluationCompleted(
        run_id=config.run_id,
        version=version,
        num_tasks=groups[0].evaluation.num_tasks,
        num_scored=len(means),
        num_rollouts=len(rollouts),
        mean_reward=math.fsum(means) / len(means) if means else None,
        pass_at=pass_at([(len(g.rollouts), g.num_passed) for g in groups if g.rollouts]),
        left_out=dict(sorted(reasons.items())),
        min_policy_version=min((r.min_policy_version for r in rollouts), default=None),
        max_policy_version=max((r.max_policy_version for r in rollouts), default=None),
        positions=state.positions,
        at=now,
        config_digest=config.digest,
        config=config,
    )

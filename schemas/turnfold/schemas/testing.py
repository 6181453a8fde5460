"""Builders of messages for tests, ours and our users': plain integers in, messages out.

    events = [
        started("r1", group_id="g1"),
        turn("r1", "t0", prompt=[1, 2], output=[3, 4]),
        turn("r1", "t1", prompt=[1, 2, 3, 4, 5], output=[6], parent="t0", shared_len=4),
        finished("r1", reward=1.0),
    ]

Ids are derived from the arguments, so that equal calls give equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from turnfold.schemas.batches import (
    BatchCut,
    EvaluationCompleted,
    GroupDropped,
    GroupEvaluated,
    GroupRef,
    Positions,
)
from turnfold.schemas.events import (
    Event,
    RewardRevised,
    RolloutAborted,
    RolloutFinished,
    RolloutStarted,
    TurnCompleted,
    TurnFailed,
    VersionSpan,
)
from turnfold.schemas.policies import PolicyServed
from turnfold.schemas.tasks import Task
from turnfold.schemas.trajectories import Ledger, Row, Source, Trajectory, TurnLedger, TurnSpan
from turnfold.schemas.wire import Logprobs, LossMask, TokenIds

DEFAULT_LOGPROB = -0.5
"""Of every token whose logprob a test does not care about; exact in float32."""


def started(rollout_id: str = "r1", *, group_id: str = "g1", **fields: Any) -> RolloutStarted:
    """The start of a rollout; any other field of RolloutStarted by name."""
    return RolloutStarted(
        rollout_id=rollout_id,
        group_id=group_id,
        **{"event_id": f"{rollout_id}:started", **fields},
    )


def turn(
    rollout_id: str,
    turn_id: str,
    *,
    prompt: Sequence[int],
    output: Sequence[int],
    logprobs: Sequence[float] | None = None,
    parent: str | None = None,
    shared_len: int = 0,
    policy_version: int | None = 0,
    session_id: str = "main",
    **fields: Any,
) -> TurnCompleted:
    """A turn with its whole `prompt`; the first `shared_len` tokens are left to the parent.

        turn("r1", "t1", prompt=[1, 2, 3, 4, 5], output=[6], parent="t0", shared_len=4)
        # parent_turn_id="t0", shared_len=4, prompt_tail=[5], num_prompt_tokens=5

    `policy_version` None is an engine that does not say which weights sampled.
    """
    if logprobs is None:
        logprobs = [DEFAULT_LOGPROB] * len(output)
    return TurnCompleted(
        rollout_id=rollout_id,
        session_id=session_id,
        turn_id=turn_id,
        parent_turn_id=parent,
        shared_len=shared_len,
        prompt_tail=TokenIds.of(prompt[shared_len:]),
        output_ids=TokenIds.of(output),
        logprobs=Logprobs.of(logprobs),
        **{
            "event_id": f"{rollout_id}:{turn_id}",
            "num_prompt_tokens": len(prompt),
            "policy_versions": _one_version(policy_version, len(output)),
            **fields,
        },
    )


def turn_failed(
    rollout_id: str, turn_id: str, *, reason: str = "engine_error", **fields: Any
) -> TurnFailed:
    """A model call without a sample."""
    return TurnFailed(
        rollout_id=rollout_id,
        turn_id=turn_id,
        reason=reason,
        **{"event_id": f"{rollout_id}:{turn_id}:failed", "session_id": "main", **fields},
    )


def finished(rollout_id: str = "r1", *, reward: float = 1.0, **fields: Any) -> RolloutFinished:
    """The end of a rollout with its reward."""
    return RolloutFinished(
        rollout_id=rollout_id,
        reward=reward,
        **{"event_id": f"{rollout_id}:finished", **fields},
    )


def aborted(
    rollout_id: str = "r1", *, reason: str = "agent_error", **fields: Any
) -> RolloutAborted:
    """The end of a rollout without a reward."""
    return RolloutAborted(
        rollout_id=rollout_id,
        reason=reason,
        **{"event_id": f"{rollout_id}:aborted", **fields},
    )


def revised(rollout_id: str = "r1", *, reward: float, **fields: Any) -> RewardRevised:
    """A later verdict on a finished rollout."""
    return RewardRevised(
        rollout_id=rollout_id,
        reward=reward,
        **{"event_id": f"{rollout_id}:revised:{reward}", **fields},
    )


class RolloutScript:
    """Writes the events of one rollout from whole prompts, delta-encoded as the gateway would.

    script = RolloutScript("r1", group_id="g1")
    script.turn("t0", [1, 2], [3, 4])
    script.turn("t1", [1, 2, 3, 4, 5], [6], parent="t0")      # shared_len 4, tail [5]
    script.finish(reward=1.0)
    script.events                                             # start, turns, end
    """

    def __init__(self, rollout_id: str = "r1", **fields: Any) -> None:
        self.rollout_id = rollout_id
        self.events: list[Event] = [started(rollout_id, **fields)]
        self._sequences: dict[str, list[int]] = {}

    def turn(
        self,
        turn_id: str,
        prompt: Sequence[int],
        output: Sequence[int],
        *,
        parent: str | None = None,
        **fields: Any,
    ) -> TurnCompleted:
        """Add a turn; it shares as many leading tokens with `parent` as are equal."""
        shared_len = _num_equal(self._sequences[parent], prompt) if parent is not None else 0
        event = turn(
            self.rollout_id,
            turn_id,
            prompt=prompt,
            output=output,
            parent=parent,
            shared_len=shared_len,
            **fields,
        )
        self._sequences[turn_id] = [*prompt, *output]
        self.events.append(event)
        return event

    def fail(self, turn_id: str, **fields: Any) -> None:
        self.events.append(turn_failed(self.rollout_id, turn_id, **fields))

    def finish(self, reward: float = 1.0, **fields: Any) -> None:
        self.events.append(finished(self.rollout_id, reward=reward, **fields))

    def abort(self, reason: str = "agent_error", **fields: Any) -> None:
        self.events.append(aborted(self.rollout_id, reason=reason, **fields))

    def revise(self, reward: float, **fields: Any) -> None:
        self.events.append(revised(self.rollout_id, reward=reward, **fields))

    def sequence(self, turn_id: str) -> list[int]:
        """Prompt and output of a turn, for the prompt of the next one."""
        return list(self._sequences[turn_id])


def row(
    token_ids: Sequence[int],
    loss_mask: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    turn_id: str = "t0",
    session_id: str = "main",
    policy_version: int = 0,
) -> Row:
    """A row; each run of ones in the mask is the output of one turn, `turn_id` for all of them."""
    if logprobs is None:
        logprobs = [DEFAULT_LOGPROB if bit else 0.0 for bit in loss_mask]
    spans = _runs_of_ones(loss_mask)
    return Row(
        token_ids=TokenIds.of(token_ids),
        loss_mask=LossMask.of(loss_mask),
        logprobs=Logprobs.of(logprobs),
        session_id=session_id,
        turns=tuple(TurnSpan(turn_id=turn_id, start=start, end=end) for start, end in spans),
        policy_versions=tuple(
            VersionSpan(policy_version=policy_version, start=start, end=end) for start, end in spans
        ),
    )


def trajectory(
    rollout_id: str = "r1",
    *,
    group_id: str = "g1",
    rows: Iterable[Row] | None = None,
    reward: float | None = 1.0,
    policy_version: int = 0,
    **fields: Any,
) -> Trajectory:
    """A finished trajectory whose ledger trains what its rows train; one row by default."""
    kept = tuple(rows) if rows is not None else (row([1, 2, 3, 4], [0, 0, 1, 1]),)
    ledger = Ledger(
        turns=tuple(
            TurnLedger(
                turn_id=f"t{index}",
                session_id=part.session_id,
                num_sampled=part.num_trained,
                num_trained=part.num_trained,
                row=index,
            )
            for index, part in enumerate(kept)
        )
    )
    defaults: dict[str, Any] = {
        "run_id": "default",
        "status": "completed" if reward is not None else "aborted",
        "ledger": ledger,
        "num_turns": len(kept),
        "min_policy_version": policy_version,
        "max_policy_version": policy_version,
        "source": Source(topic="turnfold.events", partition=0, first_offset=0, last_offset=1),
    }
    return Trajectory(
        rollout_id=rollout_id,
        group_id=group_id,
        rows=kept,
        reward=reward,
        **{**defaults, **fields},
    )


def task(group_id: str = "g1", *, n: int = 2, dispatch_index: int = 0, **fields: Any) -> Task:
    """A dispatched group."""
    defaults: dict[str, Any] = {"run_id": "default", "task_id": "task-0", "payload": {}}
    return Task(group_id=group_id, n=n, dispatch_index=dispatch_index, **{**defaults, **fields})


def served(policy_version: int, run_id: str = "default") -> PolicyServed:
    """Every engine serves this version."""
    return PolicyServed(run_id=run_id, policy_version=policy_version)


def cut(index: int, *group_ids: str, run_id: str = "default") -> BatchCut:
    """A batch of these groups, without their rollouts."""
    groups = tuple(GroupRef(group_id=name, dispatch_index=0, rollouts=()) for name in group_ids)
    return BatchCut(run_id=run_id, index=index, groups=groups, **_UNDATED)


def dropped(group_id: str, reason: str, run_id: str = "default") -> GroupDropped:
    """A group that is in no batch."""
    return GroupDropped(
        run_id=run_id, group_id=group_id, dispatch_index=0, reason=reason, **_UNDATED
    )


def evaluated(sent: Task, *, is_retried: bool = False, run_id: str = "default") -> GroupEvaluated:
    """The score of an evaluation task, without its rollouts."""
    assert sent.evaluation is not None, f"task {sent.group_id} is no evaluation"
    return GroupEvaluated(
        run_id=run_id,
        group_id=sent.group_id,
        cursor=sent.cursor,
        attempt=sent.attempt,
        evaluation=sent.evaluation,
        rollouts=(),
        is_retried=is_retried,
        **_UNDATED,
    )


def completed(version: int, num_tasks: int = 3, run_id: str = "default") -> EvaluationCompleted:
    """The end of an evaluation round, of one rollout a task."""
    return EvaluationCompleted(
        run_id=run_id,
        version=version,
        num_tasks=num_tasks,
        num_scored=num_tasks,
        num_rollouts=num_tasks,
        **_UNDATED,
    )


_UNDATED: dict[str, Any] = {
    "positions": Positions(tasks={}, trajectories={}),
    "at": 0.0,
    "config_digest": "",
}


def _one_version(policy_version: int | None, num_tokens: int) -> tuple[VersionSpan, ...]:
    if policy_version is None or num_tokens == 0:
        return ()
    return (VersionSpan(policy_version=policy_version, start=0, end=num_tokens),)


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _runs_of_ones(mask: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for position, bit in enumerate(mask):
        if bit and runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        elif bit:
            runs.append((position, position + 1))
    return runs

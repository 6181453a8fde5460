"""The life of a rollout: started, scored or aborted, looked at."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import msgspec

from turnfold.gateway.keys import SessionKey, sign
from turnfold.gateway.refusals import Refusal, invalid
from turnfold.gateway.rollouts.app import Entry, RolloutStore
from turnfold.schemas.events import (
    HistoryMode,
    NonlinearPolicy,
    RewardRevised,
    RewritePolicy,
    RolloutAborted,
    RolloutEvent,
    RolloutFinished,
    RolloutStarted,
    Sampling,
    Split,
)

MAIN_SESSION = "main"
_KEY_GRACE_S = 3600
_MAX_ID_CHARS = 200
_RESPONSE_PREFIX = re.compile(r"^(chatcmpl-|resp_|msg_)")


class StartRollout(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/rollouts; see RolloutStarted for the fields."""

    group_id: str
    rollout_id: str = ""
    """Made up when empty."""
    session_id: str = MAIN_SESSION
    run_id: str = "default"
    task_id: str = ""
    index: int = 0
    attempt: int = 0
    split: Split = "train"
    history_mode: HistoryMode | None = None
    nonlinear: NonlinearPolicy | None = None
    rewrites: RewritePolicy | None = None
    timeout_s: float | None = None
    """Seconds until an unfinished rollout is aborted."""
    model: str = ""
    sampling: Sampling = Sampling()
    max_turns: int | None = None
    max_context_tokens: int | None = None
    dispatch_index: int = -1


class FinishRollout(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/rollouts/{id}/finish."""

    reward: float
    rewards: dict[str, float] = {}
    turn_rewards: dict[str, float] = {}
    """By turn_id, or by the id of the response that the turn was."""
    is_truncated: bool = False
    info: dict[str, str] = {}


class AbortRollout(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/rollouts/{id}/abort."""

    reason: str
    message: str = ""


class ReviseReward(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/rollouts/{id}/reward."""

    reward: float
    rewards: dict[str, float] = {}
    turn_rewards: dict[str, float] = {}
    reason: str = ""


class OpenSession(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/rollouts/{id}/sessions."""

    session_id: str = ""
    """Made up when empty."""


class Control:
    """Operations of the control API; each returns the body of its answer. Raises Refusal."""

    def __init__(
        self,
        *,
        store: RolloutStore,
        key_secret: str,
        key_ttl_s: int,
        history_mode: HistoryMode,
        nonlinear: NonlinearPolicy,
        rewrites: RewritePolicy,
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self.store = store
        self._key_secret = key_secret
        self._key_ttl_s = key_ttl_s
        self._history_mode: HistoryMode = history_mode
        self._nonlinear: NonlinearPolicy = nonlinear
        self._rewrites: RewritePolicy = rewrites
        self._clock = clock
        self._new_id = new_id
        self._starting: set[str] = set()

    async def start(self, body: StartRollout, base_url: str) -> dict[str, Any]:
        """Publish RolloutStarted and give out the key; the same request again gets a key again."""
        started = self._started(body)
        entry = self.store.peek(started.rollout_id)
        if entry is None:
            entry = await self._publish_start(started)
        elif not _is_same_start(entry.state.started, started):
            raise Refusal(
                "conflict",
                f"rollout {started.rollout_id} exists and was started differently",
                code="rollout_exists",
            )
        return self._access(entry, body.session_id, base_url)

    async def _publish_start(self, started: RolloutStarted) -> Entry:
        if started.rollout_id in self._starting:
            raise Refusal(
                "conflict",
                f"rollout {started.rollout_id} is being started by another request",
                code="rollout_exists",
                is_retriable=True,
            )
        self._starting.add(started.rollout_id)
        try:
            ack = await self.store.events.append(started)
        finally:
            self._starting.discard(started.rollout_id)
        return self.store.add(started, ack.partition, ack.offset)

    def _started(self, body: StartRollout) -> RolloutStarted:
        _check(body)
        now = self._clock()
        rollout_id = body.rollout_id or f"{body.group_id}-{self._new_id()[:12]}"
        return RolloutStarted(
            rollout_id=rollout_id,
            event_id=f"{rollout_id}:started",
            at=now,
            run_id=body.run_id,
            group_id=body.group_id,
            task_id=body.task_id,
            index=body.index,
            attempt=body.attempt,
            split=body.split,
            history_mode=body.history_mode or self._history_mode,
            nonlinear=body.nonlinear or self._nonlinear,
            rewrites=body.rewrites or self._rewrites,
            deadline_at=None if body.timeout_s is None else now + body.timeout_s,
            model=body.model,
            sampling=body.sampling,
            max_context_tokens=body.max_context_tokens,
            max_turns=body.max_turns,
            dispatch_index=body.dispatch_index,
        )

    async def open_session(self, entry: Entry, body: OpenSession, base_url: str) -> dict[str, Any]:
        """A key for another conversation of the same rollout, a sub-agent's for instance."""
        _check_id("session_id", body.session_id, is_required=False)
        return self._access(entry, body.session_id or self._new_id()[:12], base_url)

    def _access(self, entry: Entry, session_id: str, base_url: str) -> dict[str, Any]:
        started = entry.state.started
        until = max(self._clock() + self._key_ttl_s, (started.deadline_at or 0.0) + _KEY_GRACE_S)
        key = SessionKey(
            rollout_id=started.rollout_id,
            session_id=session_id,
            partition=entry.partition,
            offset=entry.offset,
            expires_at=math.ceil(until),
        )
        return {
            "rollout_id": started.rollout_id,
            "session_id": session_id,
            "api_key": sign(key, self._key_secret),
            "base_url": base_url,
        }

    async def finish(self, entry: Entry, body: FinishRollout) -> dict[str, Any]:
        """Publish the reward; the same reward again changes nothing and gets the same answer."""
        rollout_id = entry.state.rollout_id
        event = RolloutFinished(
            rollout_id=rollout_id,
            event_id=f"{rollout_id}:finished",
            at=self._clock(),
            reward=body.reward,
            rewards=body.rewards,
            turn_rewards=_by_turn(body.turn_rewards),
            is_truncated=body.is_truncated,
            info=body.info,
        )
        return await self._close(entry, event)

    async def abort(self, entry: Entry, body: AbortRollout) -> dict[str, Any]:
        """End the rollout without a reward; a second abort changes nothing."""
        if not body.reason:
            raise invalid("reason: expected a word, such as agent_error", "reason")
        rollout_id = entry.state.rollout_id
        event = RolloutAborted(
            rollout_id=rollout_id,
            event_id=f"{rollout_id}:aborted",
            at=self._clock(),
            reason=body.reason,
            message=body.message,
        )
        return await self._close(entry, event)

    async def _close(self, entry: Entry, event: RolloutFinished | RolloutAborted) -> dict[str, Any]:
        async with entry.control_lock:
            await self.store.catch_up(entry)
            terminal = entry.state.terminal
            if terminal is None:
                await self._append(entry, event)
                for flight in list(entry.flights):
                    flight.abandon()
            elif not _is_same_end(terminal, event):
                raise _already_closed(entry)
        return _outcome(entry)

    async def revise(self, entry: Entry, body: ReviseReward) -> dict[str, Any]:
        """Publish a later verdict on a finished rollout."""
        async with entry.control_lock:
            await self.store.catch_up(entry)
            if entry.state.status != "finished":
                raise Refusal(
                    "conflict",
                    f"rollout {entry.state.rollout_id} is {entry.state.status}: only the reward of "
                    "a finished rollout can be revised",
                    code="rollout_not_finished",
                )
            event = RewardRevised(
                rollout_id=entry.state.rollout_id,
                event_id=f"{entry.state.rollout_id}:revised:{self._new_id()}",
                at=self._clock(),
                reward=body.reward,
                rewards=body.rewards,
                turn_rewards=_by_turn(body.turn_rewards),
                reason=body.reason,
            )
            await self._append(entry, event)
        return _outcome(entry)

    async def _append(
        self, entry: Entry, event: RolloutFinished | RolloutAborted | RewardRevised
    ) -> None:
        await self.store.events.append(event)
        entry.state.apply(event)

    async def inspect(self, entry: Entry) -> dict[str, Any]:
        """Counts of the rollout as the log has them now."""
        await self.store.catch_up(entry)
        await entry.fold_all_foreign()
        state = entry.state
        return {
            **_outcome(entry),
            "group_id": state.started.group_id,
            "task_id": state.started.task_id,
            "history_mode": state.started.history_mode,
            "num_turns": state.num_turns,
            "num_output_tokens": state.num_output_tokens,
            "continuity": dict(state.continuity),
            "sessions": dict(state.turns_by_session),
            "failures": dict(state.failures),
        }


def _by_turn(rewards: dict[str, float]) -> dict[str, float]:
    """Rewards by turn_id; a response is named by its protocol's prefix and the turn_id.

    {"chatcmpl-5f": 1.0, "7a": 0.5}  ->  {"5f": 1.0, "7a": 0.5}
    """
    return {_RESPONSE_PREFIX.sub("", name): reward for name, reward in rewards.items()}


def _outcome(entry: Entry) -> dict[str, Any]:
    state = entry.state
    return {"rollout_id": state.rollout_id, "status": state.status, "reward": state.reward}


def _already_closed(entry: Entry) -> Refusal:
    state = entry.state
    hint = (
        f"; POST /v1/rollouts/{state.rollout_id}/reward revises it"
        if state.status == "finished"
        else ""
    )
    what = f" with reward {state.reward:g}" if state.reward is not None else ""
    return Refusal(
        "conflict",
        f"rollout {state.rollout_id} is already {state.status}{what}{hint}",
        code="rollout_closed",
    )


def _is_same_end(
    known: RolloutFinished | RolloutAborted, asked: RolloutFinished | RolloutAborted
) -> bool:
    if isinstance(known, RolloutFinished) and isinstance(asked, RolloutFinished):
        return known.reward == asked.reward
    return isinstance(known, RolloutAborted) and isinstance(asked, RolloutAborted)


def _is_same_start(known: RolloutEvent, asked: RolloutEvent) -> bool:
    ignored = {"at": 0.0, "deadline_at": None}
    return msgspec.structs.replace(known, **ignored) == msgspec.structs.replace(asked, **ignored)


def _check(body: StartRollout) -> None:
    _check_id("group_id", body.group_id)
    _check_id("rollout_id", body.rollout_id, is_required=False)
    _check_id("session_id", body.session_id)
    for name in ("max_turns", "max_context_tokens"):
        value = getattr(body, name)
        if value is not None and value < 1:
            raise invalid(f"{name}: expected at least 1, got {value}", name)
    if body.timeout_s is not None and not 0 < body.timeout_s < math.inf:
        raise invalid(f"timeout_s: expected more than 0, got {body.timeout_s}", "timeout_s")
    _check_sampling(body)


def _check_sampling(body: StartRollout) -> None:
    sampling = body.sampling
    if sampling.max_tokens < 1:
        raise invalid(
            f"sampling.max_tokens: expected at least 1, got {sampling.max_tokens}",
            "sampling.max_tokens",
        )
    if not 0 <= sampling.temperature <= 2:
        raise invalid(
            f"sampling.temperature: expected 0 to 2, got {sampling.temperature}",
            "sampling.temperature",
        )
    is_biased = sampling.top_p != 1.0 or sampling.top_k not in (-1, 0)
    if is_biased and body.split == "train" and not sampling.is_biased_allowed:
        raise invalid(
            "sampling: top_p and top_k bias the recorded logprobs of a training rollout; set "
            "is_biased_allowed to accept that",
            "sampling",
        )


def _check_id(name: str, value: str, is_required: bool = True) -> None:
    if not value and not is_required:
        return
    if not 0 < len(value) <= _MAX_ID_CHARS or not value.isprintable() or "/" in value:
        raise invalid(
            f"{name}: expected 1 to {_MAX_ID_CHARS} printable characters without a slash", name
        )

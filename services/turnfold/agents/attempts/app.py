"""Runs an agent for one rollout under its deadlines, and tells the gateway how it ended.

    start ── run the agent ──┬── it returns ────────────── finish(reward)
                             ├── it raises ─────────────── abort(reason)
                             ├── run deadline: cancel it ─ within the grace a late reward still
                             │                             counts, as truncated; else abort
                             └── stop(reason): abort at once, then cancel it

An abort makes the gateway give up the model calls of the rollout, and these the engine's work. An
agent that does not end although it was cancelled is left behind: it holds no slot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from turnfold.agents.client import GatewayError, Rollout, RolloutClosed
from turnfold.agents.deadlines import Deadlines
from turnfold.agents.results import (
    EnvironmentFailed,
    InvalidResult,
    Outcome,
    Reason,
    Result,
    SetUpTimedOut,
    as_result,
    outcome_of,
)

log = logging.getLogger("turnfold.worker")

Agent = Callable[[Any, Rollout], Awaitable[Any]]
"""`async def agent(task, rollout)`: task is the payload, the result a reward or a Result."""

Phase = Literal["starting", "set-up", "running", "stopping"]

_MAX_MESSAGE_CHARS = 2000


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a rollout."""

    outcome: Outcome
    reason: Reason | None = None
    """None when it has a reward."""
    message: str = ""
    error: BaseException | None = None
    is_left_behind: bool = False
    """The agent still runs, without a slot."""


class Attempt:
    """One rollout of one group.

    ended = await Attempt(agent, payload, rollout, deadlines).run()
    """

    def __init__(self, agent: Agent, payload: Any, rollout: Rollout, deadlines: Deadlines) -> None:
        self.agent = agent
        self.payload = payload
        self.rollout = rollout
        self.deadlines = deadlines
        rollout.deadlines = deadlines
        self.began = time.monotonic()
        self._is_stopping = False
        self._stop: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()

    @property
    def phase(self) -> Phase:
        if self._is_stopping:
            return "stopping"
        if self.rollout.status == "new":
            return "starting"
        return "set-up" if self.rollout.is_setting_up else "running"

    def stop(self, reason: Reason) -> None:
        """Its reward is not wanted any more: `run` ends soon, with this reason."""
        if not self._stop.done():
            self._stop.set_result(reason)

    async def run(self) -> Ended:
        """Run to the end; raises nothing that concerns the agent."""
        try:
            async with asyncio.timeout(self.deadlines.end_s):
                await self.rollout.start()
        except (GatewayError, TimeoutError) as error:
            return _ended("gateway_error", error)
        if self._stop.done():
            await self._abort(self._stop.result(), "")
            return _ended(self._stop.result(), None)
        work = asyncio.create_task(self._agent())
        await self._wait(work)
        if work.done():
            return await self._closed(work)
        self._is_stopping = True
        if self._stop.done():
            return await self._given_up(work, self._stop.result())
        return await self._timed_out(work)

    async def _agent(self) -> Any:
        try:
            return await self.agent(self.payload, self.rollout)
        except SystemExit as error:
            # asyncio would end the whole worker with it.
            raise RuntimeError(f"the agent called sys.exit({error.code!r})") from error

    async def _wait(self, work: asyncio.Task[Any]) -> None:
        """Until the agent is done, somebody calls `stop`, or its time is up."""
        left_s = max(0.0, self.began + self.deadlines.run_s - time.monotonic())
        await asyncio.wait({work, self._stop}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    async def _closed(self, work: asyncio.Task[Any], *, is_late: bool = False) -> Ended:
        """Tell the gateway what the agent gave or raised."""
        try:
            if work.cancelled():
                raise _Failed("agent_error", RuntimeError("the agent cancelled itself"))
            return await self._finished(_value(work), is_late=is_late)
        except RolloutClosed as error:
            return _ended("closed", error)
        except _Failed as failed:
            ended = _ended(failed.reason, failed.error)
            await self._abort(failed.reason, ended.message)
            return ended

    async def _finished(self, value: Any, *, is_late: bool) -> Ended:
        """Give the reward, unless the agent has done so itself. Raises _Failed, RolloutClosed."""
        if value is None and self.rollout.status == "finished":
            return Ended(outcome="completed")
        if value is None and self.rollout.status == "aborted":
            return _ended("closed", None)
        try:
            result = as_result(value)
        except InvalidResult as error:
            raise _Failed("invalid_result", error) from error
        if is_late:
            result = msgspec.structs.replace(result, is_truncated=True)
        await self._finish(result)
        return Ended(outcome="truncated" if result.is_truncated else "completed")

    async def _finish(self, result: Result) -> None:
        try:
            await self.rollout.finish(
                result.reward,
                rewards=result.rewards,
                turn_rewards=result.turn_rewards,
                is_truncated=result.is_truncated,
                info=result.info,
            )
        except RolloutClosed:
            raise
        except GatewayError as error:
            raise _Failed("gateway_error", error) from error

    async def _given_up(self, work: asyncio.Task[Any], reason: Reason) -> Ended:
        """End the agent, and abort meanwhile, so that the engine stops at once."""
        is_over, _ = await asyncio.gather(
            _is_over(work, self.deadlines.grace_s), self._abort(reason, "")
        )
        return msgspec.structs.replace(_ended(reason, None), is_left_behind=not is_over)

    async def _timed_out(self, work: asyncio.Task[Any]) -> Ended:
        """End the agent; what it still gives within the grace counts, as truncated."""
        is_over = await _is_over(work, self.deadlines.grace_s)
        if is_over and not work.cancelled() and work.exception() is None:
            return await self._closed(work, is_late=True)
        said = _error_of(work) if is_over else None
        message = f"no reward after {self.deadlines.run_s:g} s"
        if self.rollout.is_setting_up:
            message += ", still in its set-up"
        if said is not None:
            message += f"; when it was stopped: {_text(said)}"
        await self._abort("agent_timeout", message[:_MAX_MESSAGE_CHARS])
        return Ended(
            outcome=outcome_of("agent_timeout"),
            reason="agent_timeout",
            message=message[:_MAX_MESSAGE_CHARS],
            is_left_behind=not is_over,
        )

    async def _abort(self, reason: Reason, message: str) -> None:
        if self.rollout.status != "running":
            return
        try:
            await self.rollout.abort(reason, message)
        except GatewayError as error:
            # Past its deadline the healer ends it.
            log.warning("rollout %s could not be aborted: %s", self.rollout.rollout_id, error)


class _Failed(Exception):
    """A rollout without a reward, and why."""

    def __init__(self, reason: Reason, error: BaseException) -> None:
        super().__init__(reason)
        self.reason: Reason = reason
        self.error = error


def _value(work: asyncio.Task[Any]) -> Any:
    """What the agent returned. Raises RolloutClosed, and _Failed for any other exception."""
    try:
        return work.result()
    except RolloutClosed:
        raise
    except SetUpTimedOut as error:
        raise _Failed("setup_timeout", error) from error
    except EnvironmentFailed as error:
        raise _Failed("environment_error", error) from error
    except GatewayError as error:
        raise _Failed("gateway_error", error) from error
    except InvalidResult as error:
        raise _Failed("invalid_result", error) from error
    except Exception as error:
        raise _Failed("agent_error", error) from error


async def _is_over(work: asyncio.Task[Any], grace_s: float) -> bool:
    """Cancel the work; False when it goes on all the same, twice told."""
    work.cancel()
    await asyncio.wait({work}, timeout=grace_s)
    if not work.done():
        work.cancel()
        await asyncio.wait({work}, timeout=0.0 if grace_s == 0 else min(1.0, grace_s))
    if work.done() and not work.cancelled():
        work.exception()  # looked at, so that asyncio does not complain that nobody did
    return work.done()


def _error_of(work: asyncio.Task[Any]) -> BaseException | None:
    return None if work.cancelled() else work.exception()


def _ended(reason: Reason, error: BaseException | None) -> Ended:
    return Ended(
        outcome=outcome_of(reason),
        reason=reason,
        message="" if error is None else _text(error)[:_MAX_MESSAGE_CHARS],
        error=error,
    )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"

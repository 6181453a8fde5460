"""One rollout: its deadlines, how it is stopped, and what the log says of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from openai import AsyncOpenAI

from turnfold.agents import EnvironmentFailed, GatewayClient, Result, SetUpTimedOut
from turnfold.agents.attempts.app import Attempt, Ended
from turnfold.agents.deadlines import deadlines
from turnfold.gateway.testing import Reply
from turnfold.schemas.events import RolloutAborted, RolloutFinished, TurnFailed
from turnfold.schemas.testing import task

Agent = Callable[[Any, Any], Awaitable[Any]]


@pytest.fixture
def attempt(client: GatewayClient) -> Callable[..., Attempt]:
    def make(agent: Agent, timeout_s: float = 60.0, **times: float) -> Attempt:
        sent = task("g0", n=1, rollout_timeout_s=timeout_s)
        grace_s = times.pop("grace_s", 10.0)
        return Attempt(
            agent, sent.payload, client.rollout_of(sent, 0), deadlines(timeout_s, grace_s, **times)
        )

    return make


async def end_in(bench: Any) -> Any:
    return (await bench.ends())["g0-00"]


async def call_forever(task: Any, rollout: Any) -> None:
    """Asks the model again and again, whatever comes back."""
    async with AsyncOpenAI(
        base_url=rollout.base_url, api_key=rollout.api_key, max_retries=0
    ) as client:
        message: Any = [{"role": "user", "content": "open door 3"}]
        await client.chat.completions.create(model="policy", messages=message)


async def test_named_parts_are_summed_and_kept(bench: Any, attempt: Any) -> None:
    async def run(task: Any, rollout: Any) -> dict[str, float]:
        return {"format": 0.25, "answer": 0.5}

    assert await attempt(run).run() == Ended(outcome="completed")
    end = await end_in(bench)
    assert (end.reward, end.rewards) == (0.75, {"format": 0.25, "answer": 0.5})


async def test_a_stop_reaches_the_engine_and_the_rollout_ends_at_once(
    bench: Any, attempt: Any, eventually: Any
) -> None:
    release = threading.Event()
    bench.engine.script(Reply(ids=[5], release=release))
    trying = attempt(call_forever)
    running = asyncio.create_task(trying.run())

    async def is_sampling() -> bool:
        return bool(bench.engine.requests)

    async def is_aborted() -> bool:
        return bool(bench.engine.aborted)

    await eventually(is_sampling)
    trying.stop("group_decided")
    ended = await asyncio.wait_for(running, 20)
    assert (ended.outcome, ended.reason) == ("aborted", "group_decided")
    await eventually(is_aborted)
    release.set()
    end = await end_in(bench)
    assert isinstance(end, RolloutAborted)
    assert end.reason == "group_decided"


async def test_a_stop_ends_the_engines_work_even_when_the_agent_ignores_it(
    bench: Any, attempt: Any, eventually: Any
) -> None:
    release, is_over = threading.Event(), asyncio.Event()
    bench.engine.script(Reply(ids=[5], release=release))

    async def stubborn(task: Any, rollout: Any) -> None:
        calling = asyncio.create_task(call_forever(task, rollout))
        while not is_over.is_set():
            with suppress(BaseException):
                await asyncio.sleep(0.01)
        calling.cancel()

    trying = attempt(stubborn, timeout_s=60.0, grace_s=0.2)
    running = asyncio.create_task(trying.run())

    async def is_sampling() -> bool:
        return bool(bench.engine.requests)

    async def is_aborted() -> bool:
        return bool(bench.engine.aborted)

    await eventually(is_sampling)
    trying.stop("group_decided")
    ended = await asyncio.wait_for(running, 20)
    assert ended.is_left_behind
    await eventually(is_aborted)
    release.set()
    is_over.set()


@pytest.mark.field_case("miles#2030")
async def test_an_agent_that_hangs_on_a_dead_endpoint_ends_at_its_deadline(
    bench: Any, attempt: Any
) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def run(task: Any, rollout: Any) -> str:
        async with rollout.http(timeout=None) as client:  # the mistake in question
            return str(await client.get(f"http://127.0.0.1:{port}/"))

    ended = await attempt(run, timeout_s=2.0).run()
    server.close()
    assert (ended.outcome, ended.reason) == ("timeout", "agent_timeout")
    assert not ended.is_left_behind
    assert (await end_in(bench)).reason == "agent_timeout"


@pytest.mark.field_case("rllm#586")
async def test_a_timeout_is_no_error_and_says_how_long_it_took_and_what_came_then(
    bench: Any, attempt: Any
) -> None:
    async def run(task: Any, rollout: Any) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise RuntimeError("the browser was still loading") from None

    ended = await attempt(run, timeout_s=2.0).run()
    assert (ended.outcome, ended.reason, ended.error) == ("timeout", "agent_timeout", None)
    end = await end_in(bench)
    assert end.rollout_id == "g0-00"
    assert end.message == (
        "no reward after 1.5 s; when it was stopped: RuntimeError: the browser was still loading"
    )


@pytest.mark.field_case("rllm#677")
async def test_the_agent_is_stopped_and_may_still_score_before_the_rollouts_own_deadline(
    bench: Any, attempt: Any
) -> None:
    async def run(task: Any, rollout: Any) -> Result:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # the verification
        return Result(reward=0.5)

    assert (await attempt(run, timeout_s=10.0).run()).outcome == "truncated"
    end = await end_in(bench)
    assert isinstance(end, RolloutFinished)
    assert (end.reward, end.is_truncated) == (0.5, True)
    (started, *_) = (await bench.events())["g0-00"]
    assert end.at < started.deadline_at


@pytest.mark.field_case("OpenEnv#1036")
async def test_a_set_up_that_hangs_ends_at_the_set_up_deadline(bench: Any, attempt: Any) -> None:
    async def run(task: Any, rollout: Any) -> float:
        async with rollout.set_up():
            await asyncio.sleep(3600)
        return 1.0

    ended = await attempt(run, timeout_s=600.0, setup_timeout_s=0.2).run()
    assert (ended.outcome, ended.reason) == ("environment_error", "setup_timeout")
    assert (await end_in(bench)).message == "SetUpTimedOut: not ready after 0.2 s"


async def test_what_breaks_in_the_set_up_is_the_environments_failure(
    bench: Any, attempt: Any
) -> None:
    async def run(task: Any, rollout: Any) -> float:
        async with rollout.set_up(5):
            raise ConnectionError("no sandbox is free")

    ended = await attempt(run).run()
    assert (ended.outcome, ended.reason) == ("environment_error", "environment_error")
    assert ended.message == "EnvironmentFailed: set-up: ConnectionError: no sandbox is free"


async def test_a_set_up_of_its_own_works_without_a_worker(client: GatewayClient) -> None:
    async with client.rollout(group_id="g") as rollout:
        with pytest.raises(SetUpTimedOut, match=r"not ready after 0\.05 s"):
            async with rollout.set_up(0.05):
                await asyncio.sleep(3600)
        with pytest.raises(EnvironmentFailed, match="as it is"):
            async with rollout.set_up():
                raise EnvironmentFailed("as it is")
        await rollout.finish(0.0)


async def test_an_agent_that_calls_sys_exit_fails_alone(attempt: Any) -> None:
    async def run(task: Any, rollout: Any) -> None:
        raise SystemExit(3)

    ended = await attempt(run).run()
    assert (ended.reason, ended.message) == (
        "agent_error",
        "RuntimeError: the agent called sys.exit(3)",
    )


async def test_a_stop_before_the_start_runs_no_agent_and_the_log_has_the_reason(
    bench: Any, attempt: Any
) -> None:
    async def run(task: Any, rollout: Any) -> float:
        raise AssertionError("must not run")

    trying = attempt(run)
    trying.stop("worker_shutdown")
    assert (await trying.run()).reason == "worker_shutdown"
    assert (await end_in(bench)).reason == "worker_shutdown"


@pytest.mark.field_case("NeMo Gym#2750")
async def test_no_failure_is_ever_a_reward_of_zero(bench: Any, attempt: Any) -> None:
    async def run(task: Any, rollout: Any) -> None:
        await call_forever(task, rollout)

    bench.engine.script(Reply(ids=[], status=400))
    ended = await attempt(run).run()
    assert ended.outcome == "agent_error"
    (_, failed, end) = (await bench.events())["g0-00"]
    assert isinstance(failed, TurnFailed)
    assert isinstance(end, RolloutAborted)
    assert not hasattr(end, "reward")

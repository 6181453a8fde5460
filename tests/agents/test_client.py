"""The rollout client against a real gateway."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec
import pytest
from openai import AsyncOpenAI

from turnfold.agents import EnvironmentFailed, GatewayClient, GatewayError, RolloutClosed
from turnfold.gateway.testing import free_port, running_gateway
from turnfold.schemas.events import (
    RewardRevised,
    RolloutAborted,
    RolloutFinished,
    RolloutStarted,
    TurnCompleted,
)
from turnfold.schemas.testing import task


async def ask(access: Any) -> str:
    async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
        completion = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "open door 3"}]
        )
    return completion.choices[0].message.content or ""


async def end_of(bench: Any, rollout_id: str) -> Any:
    return (await bench.ends())[rollout_id]


async def test_a_rollout_gives_access_and_takes_the_reward(
    bench: Any, client: GatewayClient
) -> None:
    async with client.rollout(group_id="g", payload={"door": 3}) as rollout:
        assert rollout.payload == {"door": 3}
        assert await ask(rollout) == "the code is 5"
        await rollout.finish(0.5, rewards={"format": 1.0}, info={"note": "fine"})
    assert rollout.status == "finished"
    started, turn, end = (await bench.events())[rollout.rollout_id]
    assert isinstance(started, RolloutStarted)
    assert isinstance(turn, TurnCompleted)
    assert (end.reward, end.rewards, end.info) == (0.5, {"format": 1.0}, {"note": "fine"})


async def test_a_rollout_of_a_task_carries_everything_that_the_task_says(
    bench: Any, client: GatewayClient
) -> None:
    sent = task(
        "g7", run_id="r", task_id="t", attempt=1, dispatch_index=5, split="eval", max_turns=3
    )
    async with client.rollout_of(sent, 1) as rollout:
        await rollout.finish(1.0)
    started = (await bench.events())["g7-01"][0]
    assert isinstance(started, RolloutStarted)
    assert (started.run_id, started.group_id, started.task_id) == ("r", "g7", "t")
    assert (started.index, started.attempt, started.dispatch_index) == (1, 1, 5)
    assert (started.split, started.max_turns) == ("eval", 3)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("oops"), "agent_error"),
        (EnvironmentFailed("the sandbox died"), "environment_error"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
async def test_an_exception_ends_the_rollout_without_a_reward(
    bench: Any, client: GatewayClient, error: BaseException, reason: str
) -> None:
    with pytest.raises(type(error)):
        async with client.rollout(group_id="g", rollout_id="r1"):
            raise error
    end = await end_of(bench, "r1")
    assert isinstance(end, RolloutAborted)
    assert end.reason == reason


async def test_a_rollout_left_without_a_reward_is_aborted(
    bench: Any, client: GatewayClient
) -> None:
    async with client.rollout(group_id="g", rollout_id="r1"):
        pass
    assert (await end_of(bench, "r1")).reason == "unfinished"


async def test_a_sub_agent_has_a_session_of_its_own_in_the_same_rollout(
    bench: Any, client: GatewayClient
) -> None:
    async with client.rollout(group_id="g", rollout_id="r1") as rollout:
        helper = await rollout.session("helper")
        await ask(rollout)
        await ask(helper)
        seen = await rollout.inspect()
        await rollout.finish(1.0)
    assert seen["sessions"] == {"main": 1, "helper": 1}


async def test_the_same_reward_twice_is_fine_and_another_one_is_refused(
    bench: Any, client: GatewayClient
) -> None:
    async with client.rollout(group_id="g", rollout_id="r1") as rollout:
        await rollout.finish(1.0)
        await rollout.finish(1.0)
        with pytest.raises(RolloutClosed, match="already finished with reward 1"):
            await rollout.finish(0.0)
    assert isinstance(await end_of(bench, "r1"), RolloutFinished)


async def test_a_wrong_control_key_is_said_at_once(bench: Any) -> None:
    async with GatewayClient(bench.gateway_url, "wrong") as client:
        with pytest.raises(GatewayError, match="401 the control key is wrong"):
            await client.rollout(group_id="g").start()


async def test_a_gateway_that_nobody_started_is_named_after_some_patience() -> None:
    async with GatewayClient("http://127.0.0.1:1", "key", patience_s=0.3) as client:
        with pytest.raises(GatewayError, match=r"no gateway answers at http://127\.0\.0\.1:1"):
            await client.rollout(group_id="g").start()


async def test_a_restart_of_the_gateway_loses_no_rollout(bench: Any) -> None:
    # Another gateway of the same log, on a port of its own, which goes away and comes back.
    second = msgspec.structs.replace(bench.gateway_settings, port=free_port())
    url = f"http://127.0.0.1:{second.port}"
    async with GatewayClient(url, "control", patience_s=20.0) as client:
        async with running_gateway(second):
            rollout = client.rollout(group_id="g", rollout_id="r1")
            await rollout.start()
            await ask(rollout)
        finishing = asyncio.create_task(rollout.finish(1.0))
        async with running_gateway(second):
            await asyncio.wait_for(finishing, 20)
    assert isinstance(await end_of(bench, "r1"), RolloutFinished)


async def test_clients_of_either_sdk_and_plain_http_are_made_with_url_and_key(
    bench: Any, client: GatewayClient
) -> None:
    question: Any = [{"role": "user", "content": "open door 3"}]
    async with client.rollout(group_id="g", rollout_id="r1") as rollout:
        session = await rollout.session("helper")
        async with rollout.openai() as openai_client:
            completion = await openai_client.chat.completions.create(
                model="policy", messages=question
            )
        async with session.anthropic(max_retries=0) as anthropic_client:
            message = await anthropic_client.messages.create(
                model="policy", messages=question, max_tokens=9
            )
            assert anthropic_client.max_retries == 0
        async with rollout.http() as http_client:
            body = {"model": "policy", "messages": question}
            answer = await http_client.post("chat/completions", json=body)
            await http_client.post("rollouts/current/finish", json={"reward": 0.5})
    assert completion.choices[0].message.content == "the code is 5"
    assert message.content[0].type == "text"
    assert answer.json()["choices"][0]["message"]["content"] == "the code is 5"
    turns = [e for e in (await bench.events())["r1"] if isinstance(e, TurnCompleted)]
    assert [(turn.session_id, turn.protocol) for turn in turns] == [
        ("main", "openai_chat"),
        ("helper", "anthropic_messages"),
        ("main", "openai_chat"),
    ]


async def test_a_package_that_is_not_installed_is_named(
    client: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "anthropic", None)
    rollout = client.rollout(group_id="g")
    with pytest.raises(ModuleNotFoundError, match="pip install anthropic"):
        rollout.anthropic()


async def test_a_later_reward_replaces_the_first_and_an_unfinished_rollout_takes_none(
    bench: Any, client: GatewayClient
) -> None:
    async with client.rollout(group_id="g", rollout_id="r1") as rollout:
        with pytest.raises(GatewayError, match="only the reward of a finished rollout") as refused:
            await client.revise("r1", 0.9)
        assert refused.value.code == "rollout_not_finished"
        await rollout.finish(0.5)
    await client.revise("r1", 0.75, rewards={"judge": 0.75}, reason="a person looked")
    *_, revised = (await bench.events())["r1"]
    assert isinstance(revised, RewardRevised)
    assert (revised.reward, revised.rewards, revised.reason) == (
        0.75,
        {"judge": 0.75},
        "a person looked",
    )

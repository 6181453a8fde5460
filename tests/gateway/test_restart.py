"""Gateways come and go; the log remembers."""

import asyncio
import itertools
from typing import Any

import pytest

from turnfold.gateway.testing import gateway_process, running_gateway

MESSAGES: list[Any] = [{"role": "user", "content": "a"}]


async def say(rollout: Any, messages: list[Any], text: str) -> str:
    """One turn of a growing conversation; returns the id of the answer."""
    messages.append({"role": "user", "content": text})
    response = await rollout.client.chat.completions.create(model="m", messages=messages)
    messages.append(response.choices[0].message.model_dump(exclude_none=True))
    answer_id: str = response.id
    return answer_id


async def test_a_new_gateway_continues_a_session_it_never_saw(stack: Any) -> None:
    messages: list[Any] = []
    async with running_gateway(stack.settings) as url:
        rollout = await stack.start_rollout(url)
        for text in ("one", "two"):
            await say(rollout, messages, text)
    async with running_gateway(stack.settings) as url:
        moved = stack.rollout(f"{url}/v1", rollout.rollout_id, rollout.api_key)
        await say(moved, messages, "three")
        inspected = await stack.http.get(f"{url}/v1/rollouts/current", headers=rollout.headers)
        assert inspected.json()["num_turns"] == 3
    turns = await stack.turns(rollout.rollout_id)
    assert [t.continuity for t in turns] == ["first", "extended", "extended"]
    assert turns[2].parent_turn_id == turns[1].turn_id
    prompts = [request["token_ids"] for request in stack.engine.requests]
    fulls = stack.full_sequences(turns)
    assert [f[: len(p)] for f, p in zip(fulls, prompts, strict=True)] == prompts


async def test_two_gateways_share_a_session_turn_by_turn(gateway: Any) -> None:
    other = await gateway.start_gateway()
    rollout = await gateway.start_rollout()
    moved = gateway.rollout(f"{other}/v1", rollout.rollout_id, rollout.api_key)
    messages: list[Any] = []
    for i in range(6):
        await say((rollout, moved)[i % 2], messages, f"m{i}")
    turns = await gateway.turns(rollout.rollout_id)
    assert [t.continuity for t in turns] == ["first"] + ["extended"] * 5
    for previous, turn in itertools.pairwise(turns):
        assert turn.parent_turn_id == previous.turn_id
        assert len(turn.new_messages) == 1


async def test_what_one_gateway_ends_is_over_at_the_other(gateway: Any, eventually: Any) -> None:
    other = await gateway.start_gateway()
    rollout = await gateway.start_rollout()
    moved = gateway.rollout(f"{other}/v1", rollout.rollout_id, rollout.api_key)
    await say(moved, [], "a")
    await gateway.http.post(
        f"{rollout.base_url}/rollouts/current/abort", headers=rollout.headers, json={"reason": "x"}
    )

    async def is_refused() -> bool:
        response = await gateway.http.post(
            f"{other}/v1/chat/completions", headers=rollout.headers, json={"messages": MESSAGES}
        )
        return int(response.status_code) == 409

    await eventually(is_refused)


async def test_rollouts_given_up_by_the_cache_come_back(stack: Any) -> None:
    await stack.start_gateway(max_rollouts=2)
    rollouts = [await stack.start_rollout() for _ in range(5)]
    histories: list[list[Any]] = [[] for _ in rollouts]
    for text in ("one", "two"):
        await asyncio.gather(*(say(r, h, text) for r, h in zip(rollouts, histories, strict=True)))
    for rollout in rollouts:
        turns = await stack.turns(rollout.rollout_id)
        assert [t.continuity for t in turns] == ["first", "extended"]


@pytest.mark.field_case("miles#888")
async def test_a_killed_gateway_loses_no_answered_turn(stack: Any) -> None:
    options = [
        "--bootstrap", stack.bootstrap, "--namespace", stack.settings.namespace,
        "--model", stack.settings.model, "--engine", stack.engine.url,
    ]  # fmt: skip
    messages: list[Any] = []
    with gateway_process(*options) as first:
        started = await stack.http.post(
            f"{first.base_url}/v1/rollouts",
            headers={"authorization": "Bearer turnfold-dev"},
            json={"group_id": "g"},
        )
        rollout = stack.rollout(
            started.json()["base_url"], started.json()["rollout_id"], started.json()["api_key"]
        )
        answered = [await say(rollout, messages, text) for text in ("one", "two")]
        first.kill9()
    with gateway_process(*options) as second:
        moved = stack.rollout(f"{second.base_url}/v1", rollout.rollout_id, rollout.api_key)
        answered.append(await say(moved, messages, "three"))
        assert second.stop() == 0
    turns = await stack.turns(rollout.rollout_id)
    assert [f"chatcmpl-{t.turn_id}" for t in turns] == answered
    assert turns[2].continuity == "extended"


async def test_an_answer_is_acknowledged_before_it_is_seen(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    for is_streamed in (False, True):
        response = await gateway.http.post(
            f"{rollout.base_url}/chat/completions",
            headers=rollout.headers,
            json={"messages": MESSAGES, "stream": is_streamed},
        )
        turns = await gateway.turns(rollout.rollout_id)
        assert f"chatcmpl-{turns[-1].turn_id}" in response.text


async def test_without_a_log_no_answer_is_given(stack: Any, own_broker: Any) -> None:
    from turnfold.log.client import create_topics

    await create_topics(own_broker.bootstrap, stack.settings.topics.specs(1))
    url = await stack.start_gateway(bootstrap=own_broker.bootstrap)
    rollout = await stack.start_rollout(url)
    own_broker.kill9()
    calling = asyncio.create_task(
        stack.http.post(
            f"{rollout.base_url}/chat/completions",
            headers=rollout.headers,
            json={"messages": MESSAGES},
        )
    )
    done, _ = await asyncio.wait({calling}, timeout=1.0)
    assert not done
    own_broker.start()
    response = await calling
    assert response.status_code == 200

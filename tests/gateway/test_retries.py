"""A client that sends a request again gets the recorded answer, not a second sample."""

import asyncio
import threading
from typing import Any

import httpx
import openai

from turnfold.gateway.testing import Reply

MESSAGES: list[Any] = [{"role": "user", "content": "a"}]


async def post(
    stack: Any, rollout: Any, messages: list[Any] = MESSAGES, **headers: str
) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response: httpx.Response = await stack.http.post(
        f"{rollout.base_url}/chat/completions",
        headers={**rollout.headers, **named},
        json={"model": "m", "messages": messages},
    )
    return response


async def test_a_retry_gets_the_recorded_answer(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    gateway.engine.script(gateway.says("first"), gateway.says("second"))
    first = await post(gateway, rollout)
    again = await post(gateway, rollout, x_stainless_retry_count="1")
    assert again.content == first.content
    assert len(gateway.engine.requests) == 1
    assert len(await gateway.turns(rollout.rollout_id)) == 1


async def test_the_same_request_without_a_sign_of_a_retry_is_a_new_sample(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    gateway.engine.script(gateway.says("first"), gateway.says("second"))
    answers = [await post(gateway, rollout) for _ in range(2)]
    texts = [a.json()["choices"][0]["message"]["content"] for a in answers]
    assert texts == ["first", "second"]
    turns = await gateway.turns(rollout.rollout_id)
    assert [t.continuity for t in turns] == ["first", "forked"]


async def test_an_idempotency_key_marks_the_same_request(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    gateway.engine.script(*(gateway.says(text) for text in ("one", "two", "three")))
    first = await post(gateway, rollout, idempotency_key="k1")
    assert (await post(gateway, rollout, idempotency_key="k1")).content == first.content
    other_key = await post(gateway, rollout, idempotency_key="k2")
    other_body = await post(
        gateway, rollout, [{"role": "user", "content": "b"}], idempotency_key="k1"
    )
    assert len({r.json()["id"] for r in (first, other_key, other_body)}) == 3
    (recorded, *_) = await gateway.turns(rollout.rollout_id)
    assert recorded.idempotency_key == "k1"


async def test_a_request_that_was_continued_is_sampled_anew(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    first = await post(gateway, rollout)
    reply = first.json()["choices"][0]["message"]
    await post(gateway, rollout, [*MESSAGES, reply, {"role": "user", "content": "b"}])
    again = await post(gateway, rollout, x_stainless_retry_count="1")
    assert again.json()["id"] != first.json()["id"]


async def test_a_retry_waits_for_the_turn_in_the_making(gateway: Any, eventually: Any) -> None:
    rollout = await gateway.start_rollout()
    release = threading.Event()
    gateway.engine.script(Reply(ids=[5], release=release))
    first = asyncio.create_task(post(gateway, rollout))

    async def has_arrived() -> bool:
        return len(gateway.engine.requests) == 1

    await eventually(has_arrived)
    again = asyncio.create_task(post(gateway, rollout, x_stainless_retry_count="1"))

    async def has_joined() -> bool:
        text = (await gateway.http.get(f"{gateway.urls[0]}/metrics")).text
        return "turnfold_gateway_in_flight 2.0" in text

    await eventually(has_joined)
    release.set()
    assert (await first).content == (await again).content
    assert len(gateway.engine.requests) == 1


async def test_a_first_client_that_leaves_does_not_stop_the_turn_for_the_second(
    gateway: Any, eventually: Any
) -> None:
    rollout = await gateway.start_rollout()
    release = threading.Event()
    gateway.engine.script(Reply(ids=[5], release=release))
    first = asyncio.create_task(post(gateway, rollout))

    async def in_flight(number: int) -> bool:
        text = (await gateway.http.get(f"{gateway.urls[0]}/metrics")).text
        arrived = len(gateway.engine.requests) == 1
        return arrived and f"turnfold_gateway_in_flight {number}.0" in text

    await eventually(lambda: in_flight(1))
    again = asyncio.create_task(post(gateway, rollout, x_stainless_retry_count="1"))
    await eventually(lambda: in_flight(2))
    first.cancel()
    await eventually(lambda: in_flight(1))
    release.set()
    assert (await again).status_code == 200
    assert gateway.engine.aborted == []


async def test_a_retry_at_another_gateway_gets_the_recorded_answer(gateway: Any) -> None:
    other = await gateway.start_gateway()
    rollout = await gateway.start_rollout()
    first = await post(gateway, rollout)
    moved = gateway.rollout(f"{other}/v1", rollout.rollout_id, rollout.api_key)
    again = await post(gateway, moved, x_stainless_retry_count="2")
    assert again.content == first.content
    assert len(gateway.engine.requests) == 1


async def test_the_sdk_retries_an_engine_failure_by_itself(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    gateway.engine.script(Reply(ids=[], status=503), gateway.says("fine"))
    async with openai.AsyncOpenAI(base_url=rollout.base_url, api_key=rollout.api_key) as client:
        response = await client.chat.completions.create(model="m", messages=MESSAGES)
    assert response.choices[0].message.content == "fine"
    assert len(await gateway.turns(rollout.rollout_id)) == 1


async def test_the_sdk_does_not_repeat_what_is_final(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    finish = f"{rollout.base_url}/rollouts/current/finish"
    await gateway.http.post(finish, headers=rollout.headers, json={"reward": 1})
    sent = []

    async def note(request: Any) -> None:
        sent.append(request)

    http_client = openai.DefaultAsyncHttpxClient(event_hooks={"request": [note]})
    async with openai.AsyncOpenAI(
        base_url=rollout.base_url, api_key=rollout.api_key, http_client=http_client
    ) as client:
        try:
            await client.chat.completions.create(model="m", messages=MESSAGES)
        except openai.ConflictError as error:
            assert error.code == "rollout_closed"  # noqa: PT017 (the requests are counted below)
    assert len(sent) == 1

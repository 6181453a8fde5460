"""Bad requests, bad keys, bad engines: each gets the protocol's error object, and nothing is half done."""

import asyncio
import threading
from typing import Any

import msgspec
import openai
import pytest

from turnfold.gateway.keys import SessionKey, sign
from turnfold.gateway.testing import Reply, free_port
from turnfold.schemas.events import TurnFailed

MESSAGES: list[Any] = [{"role": "user", "content": "a"}]


async def post(stack: Any, rollout: Any, **body: Any) -> Any:
    return await stack.http.post(
        f"{rollout.base_url}/chat/completions",
        headers=rollout.headers,
        json={"model": "m", "messages": MESSAGES, **body},
    )


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["request_id"] == response.headers["x-request-id"]
    return error


async def failures(stack: Any, rollout: Any) -> list[TurnFailed]:
    return [e for e in await stack.events(rollout.rollout_id) if isinstance(e, TurnFailed)]


async def test_keys_that_give_no_access(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    key = SessionKey(
        rollout_id="elsewhere", session_id="main", partition=0, offset=0, expires_at=2**40
    )
    expired = msgspec.structs.replace(key, expires_at=1)
    bad = {
        "": "not a turnfold session key",
        "sk-12345678": "not a turnfold session key",
        "control": "not a turnfold session key",
        rollout.api_key[:-2] + "xx": "not",
        sign(key, "other secret"): "not issued by this gateway",
        sign(expired, "secret"): "expired",
        sign(key, "secret"): "not in this log",
        sign(msgspec.structs.replace(key, partition=77), "secret"): "not in this log",
    }
    for given, what in bad.items():
        response = await gateway.http.post(
            f"{rollout.base_url}/chat/completions",
            headers={"authorization": f"Bearer {given}"} if given else {},
            json={"messages": MESSAGES},
        )
        error = error_of(response, 401)
        assert error["type"] == "authentication_error"
        assert what in error["message"]
        assert response.headers["x-should-retry"] == "false"
        assert not given or given not in response.text
    assert gateway.engine.requests == []


async def test_a_request_that_is_wrong_names_its_field(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    response = await post(gateway, rollout, n=2)
    error = error_of(response, 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", "n")
    response = await gateway.http.post(
        f"{rollout.base_url}/chat/completions", headers=rollout.headers, content=b"{"
    )
    assert "not valid JSON" in error_of(response, 400)["message"]


async def test_biased_sampling_is_refused_by_name(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    assert error_of(await post(gateway, rollout, top_p=0.9), 400)["param"] == "top_p"
    allowed = await gateway.start_rollout(sampling={"is_biased_allowed": True})
    assert (await post(gateway, allowed, top_p=0.9)).status_code == 200
    assert gateway.engine.requests[-1]["sampling_params"]["top_p"] == 0.9


async def test_messages_that_the_template_refuses_are_a_bad_request(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": 10**30}}}]
    assert "64 bits" in error_of(await post(gateway, rollout, tools=tools), 400)["message"]


async def test_unknown_paths_and_methods_get_an_error_object(gateway: Any) -> None:
    url = gateway.urls[0]
    error_of(await gateway.http.get(f"{url}/v1/chat/completions"), 405)
    assert error_of(await gateway.http.get(f"{url}/v1/nothing"), 404)["code"] == "not_found"


async def test_a_doubled_version_in_the_path_is_tolerated(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    response = await gateway.http.post(
        f"{rollout.base_url}/v1/chat/completions",
        headers=rollout.headers,
        json={"messages": MESSAGES},
    )
    assert response.status_code == 200


async def test_a_body_beyond_the_limit_is_refused(stack: Any) -> None:
    await stack.start_gateway(max_body_bytes=1000)
    rollout = await stack.start_rollout()
    big = [{"role": "user", "content": "x" * 2000}]
    response = await post(stack, rollout, messages=big)
    assert error_of(response, 413)["code"] == "too_large"


@pytest.mark.field_case("verifiers#1504")
async def test_a_large_body_of_what_changes_nothing_is_no_obstacle(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    response = await post(gateway, rollout, metadata={"screenshot": "x" * 25_000_000})
    assert response.status_code == 200


async def test_a_full_context_is_refused_before_the_engine(gateway: Any) -> None:
    wide = await gateway.start_rollout()
    await post(gateway, wide)
    (turn,) = await gateway.turns(wide.rollout_id)
    num_prompt = turn.num_prompt_tokens
    for limit in (num_prompt - 1, num_prompt):
        rollout = await gateway.start_rollout(max_context_tokens=limit)
        error = error_of(await post(gateway, rollout), 400)
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {limit} tokens" in error["message"]
        assert (await gateway.turns(rollout.rollout_id)) == []
    assert len(gateway.engine.requests) == 1
    rollout = await gateway.start_rollout(max_context_tokens=num_prompt + 1)
    assert (await post(gateway, rollout)).status_code == 200
    assert gateway.engine.requests[-1]["sampling_params"]["max_tokens"] == 1


async def test_the_engines_own_limit_counts_too(stack: Any) -> None:
    stack.engine.max_model_len = 5
    await stack.start_gateway()
    rollout = await stack.start_rollout()
    assert "length is 5 tokens" in error_of(await post(stack, rollout), 400)["message"]


async def test_the_turn_limit_is_final_and_engine_failures_do_not_count(gateway: Any) -> None:
    rollout = await gateway.start_rollout(max_turns=2)
    gateway.engine.script(Reply(ids=[], status=500), Reply(ids=[5]), Reply(ids=[], status=500))
    statuses = [(await post(gateway, rollout, seed=i)).status_code for i in range(4)]
    assert statuses == [503, 200, 503, 200]
    response = await post(gateway, rollout)
    assert error_of(response, 400)["code"] == "turn_limit_reached"
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("changes", [
    {"ids": [10**6]},
    {"logprobs": [None]},
    {"logprobs": [-1.0, -2.0]},
    {"ids": []},
    {"body": b"<html>"},
])  # fmt: skip
async def test_output_that_cannot_be_trained_on_is_no_turn(
    gateway: Any, changes: dict[str, Any], eventually: Any
) -> None:
    rollout = await gateway.start_rollout()
    gateway.engine.script(Reply(**({"ids": [5]} | changes)))
    response = await post(gateway, rollout)
    assert error_of(response, 502)["code"] == "invalid_output"
    assert response.headers["x-should-retry"] == "false"

    async def is_recorded() -> bool:
        return [f.reason for f in await failures(gateway, rollout)] == ["invalid_output"]

    await eventually(is_recorded)
    assert await gateway.turns(rollout.rollout_id) == []
    assert (await post(gateway, rollout)).status_code == 200


async def test_an_engine_that_is_down_is_a_retriable_503(stack: Any, eventually: Any) -> None:
    await stack.start_gateway(engines=(f"http://127.0.0.1:{free_port()}",))
    rollout = await stack.start_rollout()
    response = await post(stack, rollout)
    assert error_of(response, 503)["code"] == "engine_unavailable"
    assert response.headers["x-should-retry"] == "true"

    async def is_recorded() -> bool:
        return [f.reason for f in await failures(stack, rollout)] == ["engine_unavailable"]

    await eventually(is_recorded)
    assert (await stack.http.get(f"{stack.urls[0]}/readyz")).status_code == 503


async def test_an_error_in_a_stream_that_has_begun_is_an_event(stack: Any) -> None:
    await stack.start_gateway(stream_keepalive_s=0.05)
    rollout = await stack.start_rollout()
    release = threading.Event()
    stack.engine.script(Reply(ids=[], status=500, release=release))
    async with stack.http.stream(
        "POST",
        f"{rollout.base_url}/chat/completions",
        headers=rollout.headers,
        json={"messages": MESSAGES, "stream": True},
    ) as response:
        assert response.status_code == 200
        lines = []
        async for line in response.aiter_lines():
            lines.append(line)
            release.set()
    # A comment while the prompt is planned, the role once it is.
    assert lines[0] == ": keepalive" or '"role":"assistant"' in lines[0]
    error = msgspec.json.decode(lines[-2].removeprefix("data: "))["error"]
    assert error["code"] == "engine_error"
    assert "data: [DONE]" not in lines


async def test_the_sdk_raises_an_error_event(stack: Any) -> None:
    await stack.start_gateway(stream_keepalive_s=0.05)
    rollout = await stack.start_rollout()
    release = threading.Event()
    stack.engine.script(Reply(ids=[], status=500, release=release))
    stream = await rollout.client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    release.set()
    with pytest.raises(openai.APIError, match="scripted failure"):
        async for _ in stream:
            pass


async def test_an_early_error_of_a_stream_has_its_status(gateway: Any) -> None:
    rollout = await gateway.start_rollout(max_context_tokens=1)
    with pytest.raises(openai.BadRequestError):
        await rollout.client.chat.completions.create(model="m", messages=MESSAGES, stream=True)


async def test_a_client_that_leaves_frees_the_engine(gateway: Any, eventually: Any) -> None:
    rollout = await gateway.start_rollout()
    release = threading.Event()
    gateway.engine.script(Reply(ids=[5], release=release))
    calling = asyncio.create_task(post(gateway, rollout))

    async def has_arrived() -> bool:
        return len(gateway.engine.requests) == 1

    await eventually(has_arrived)
    calling.cancel()

    async def is_aborted() -> bool:
        return len(gateway.engine.aborted) == 1

    await eventually(is_aborted)

    async def is_recorded() -> bool:
        return [f.reason for f in await failures(gateway, rollout)] == ["aborted"]

    await eventually(is_recorded)
    release.set()
    assert await gateway.turns(rollout.rollout_id) == []


async def test_nothing_secret_is_logged(
    gateway: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from turnfold.gateway.turns import steps

    message = "swordfish"

    def fail(*args: object) -> None:
        raise ValueError(f"a text that quotes the agent: {message}")

    rollout = await gateway.start_rollout()
    monkeypatch.setattr(steps, "reply_message", fail)
    with caplog.at_level("DEBUG"):
        response = await post(gateway, rollout, messages=[{"role": "user", "content": message}])
    error = error_of(response, 500)
    assert error["code"] == "internal_error"
    assert error["request_id"] in caplog.text
    assert message not in caplog.text
    assert rollout.api_key not in caplog.text
    assert message not in (await gateway.http.get(f"{gateway.urls[0]}/metrics")).text


async def test_a_stream_that_waited_still_ends_with_the_answer(stack: Any) -> None:
    await stack.start_gateway(stream_keepalive_s=0.05)
    rollout = await stack.start_rollout()
    release = threading.Event()
    reply = stack.says("at last")
    reply.release = release
    stack.engine.script(reply)
    stream = await rollout.client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    release.set()
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == "at last"
    assert len(await stack.turns(rollout.rollout_id)) == 1


async def test_a_client_that_leaves_a_stream_frees_the_engine(stack: Any, eventually: Any) -> None:
    await stack.start_gateway(stream_keepalive_s=0.05)
    rollout = await stack.start_rollout()
    release = threading.Event()
    stack.engine.script(Reply(ids=[5], release=release))
    stream = await rollout.client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    await stream.close()

    async def is_aborted() -> bool:
        return len(stack.engine.aborted) == 1

    await eventually(is_aborted)
    release.set()


async def test_a_rollout_that_ends_stops_its_running_turn(gateway: Any, eventually: Any) -> None:
    rollout = await gateway.start_rollout()
    release = threading.Event()
    gateway.engine.script(Reply(ids=[5], release=release))
    calling = asyncio.create_task(post(gateway, rollout))

    async def has_arrived() -> bool:
        return len(gateway.engine.requests) == 1

    await eventually(has_arrived)
    await gateway.http.post(
        f"{rollout.base_url}/rollouts/current/finish", headers=rollout.headers, json={"reward": 0}
    )
    assert error_of(await calling, 409)["code"] == "rollout_closed"

    async def is_aborted() -> bool:
        return len(gateway.engine.aborted) == 1

    await eventually(is_aborted)
    release.set()
    assert await gateway.turns(rollout.rollout_id) == []

"""Conversations through the unmodified Anthropic SDK, plain and streamed, and what the log holds."""

import itertools
import threading
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import msgspec
import pytest

from turnfold.gateway.testing import Reply

TOOLS: list[Any] = [
    {
        "name": "lookup",
        "description": "code of a door",
        "input_schema": {"type": "object", "properties": {"door": {"type": "string"}}},
    }
]
OPENAI_TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "code of a door",
            "parameters": TOOLS[0]["input_schema"],
        },
    }
]
QUESTION: list[Any] = [{"role": "user", "content": "code of door 5?"}]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"side": "left", "door": "5"}}\n</tool_call>'
SETTINGS: dict[str, Any] = {"model": "m", "max_tokens": 64}


def client_of(rollout: Any, *, has_version: bool = False) -> anthropic.AsyncAnthropic:
    """As an agent makes it, from the base URL with or without /v1."""
    base_url = rollout.base_url if has_version else rollout.base_url.removesuffix("/v1")
    return anthropic.AsyncAnthropic(base_url=base_url, api_key=rollout.api_key, max_retries=0)


@pytest.fixture
async def rollout(gateway: Any) -> Any:
    return await gateway.start_rollout()


@pytest.fixture
async def client(rollout: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(rollout) as found:
        yield found


async def ask(
    client: anthropic.AsyncAnthropic, messages: list[Any], *, is_streamed: bool, **settings: Any
) -> Any:
    """One call, from which the SDK makes the same message in both ways."""
    settings = {**SETTINGS, "messages": messages, **settings}
    if not is_streamed:
        return await client.messages.create(**settings)
    async with client.messages.stream(**settings) as stream:
        return await stream.get_final_message()


def tool_result(message: Any, text: str, **more: Any) -> dict[str, Any]:
    used = next(block for block in message.content if block.type == "tool_use")
    return {"type": "tool_result", "tool_use_id": used.id, "content": text, **more}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.field_case("NeMo Gym#1336")
@pytest.mark.field_case("verifiers TrainClient")
async def test_tool_conversation_with_thinking_is_one_sequence(
    gateway: Any, rollout: Any, client: Any, is_streamed: bool
) -> None:
    replies = [
        gateway.says(f"<think>\nhm \n</think>\n\nLooking.\n{CALL}"),
        gateway.says("<think>\nso\n</think>\n\nthe code is 2"),
        gateway.says("bye"),
    ]
    gateway.engine.script(*replies)
    messages = list(QUESTION)
    first = await ask(client, messages, is_streamed=is_streamed, tools=TOOLS)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.content[0].thinking == "hm "
    assert first.content[2].input == {"side": "left", "door": "5"}
    assert first.stop_reason == "tool_use"

    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [tool_result(first, "2")]},
    ]
    second = await ask(client, messages, is_streamed=is_streamed, tools=TOOLS)
    assert second.content[-1].text == "the code is 2"
    assert second.stop_reason == "end_turn"

    messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "!"}]
    third = await ask(client, messages, is_streamed=is_streamed, tools=TOOLS)

    turns = await gateway.turns(rollout.rollout_id)
    assert [m.id for m in (first, second, third)] == [f"msg_{t.turn_id}" for t in turns]
    assert [t.parent_turn_id for t in turns[1:]] == [t.turn_id for t in turns[:-1]]
    assert {t.continuity for t in turns[1:]} <= {"extended", "healed"}
    prompts = [request["token_ids"] for request in gateway.engine.requests]
    wholes = [prompt + reply.ids for prompt, reply in zip(prompts, replies, strict=True)]
    assert gateway.full_sequences(turns) == wholes
    for shorter, longer in zip(wholes, prompts[1:], strict=False):
        assert longer[: len(shorter)] == shorter
    assert [m.role for m in turns[1].new_messages] == ["tool"]
    assert third.usage.input_tokens == len(prompts[-1])
    assert third.usage.output_tokens == len(replies[-1].ids)
    assert {t.protocol for t in turns} == {"anthropic_messages"}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_history_that_a_client_changed_cosmetically_is_healed(
    gateway: Any, rollout: Any, client: Any, is_streamed: bool
) -> None:
    gateway.engine.script(
        gateway.says(f"<think>\nhm\n</think>\n\n Looking. \n{CALL}"), gateway.says("2")
    )
    first = await ask(client, QUESTION, is_streamed=is_streamed, tools=TOOLS)
    text, used = (block.model_dump() for block in first.content if block.type != "thinking")
    used["input"] = dict(sorted(used["input"].items()))
    used["cache_control"] = {"type": "ephemeral"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]},
        {"role": "assistant", "content": text["text"].strip()},
        {"role": "assistant", "content": [used]},
        {"role": "user", "content": [tool_result(first, "2")]},
    ]
    await ask(client, messages, is_streamed=is_streamed, tools=TOOLS)
    turns = await gateway.turns(rollout.rollout_id)
    assert [t.continuity for t in turns] == ["first", "healed"]
    assert turns[1].parent_turn_id == turns[0].turn_id
    assert turns[1].shared_len == turns[0].num_prompt_tokens + len(turns[0].output_ids)


async def test_both_protocols_make_one_conversation(
    gateway: Any, rollout: Any, client: Any
) -> None:
    gateway.engine.script(gateway.says(CALL), gateway.says("the code is 2"), gateway.says("bye"))
    first = await ask(client, QUESTION, is_streamed=False, tools=TOOLS)
    arguments = msgspec.json.encode(first.content[0].input).decode()
    call = {
        "id": first.content[0].id,
        "type": "function",
        "function": {"name": "lookup", "arguments": arguments},
    }
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "2"},
    ]
    second = await rollout.client.chat.completions.create(
        model="m", messages=messages, tools=OPENAI_TOOLS
    )
    messages = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [tool_result(first, "2")]},
        {"role": "assistant", "content": second.choices[0].message.content},
        {"role": "user", "content": "thanks"},
    ]
    await ask(client, messages, is_streamed=True, tools=TOOLS)
    turns = await gateway.turns(rollout.rollout_id)
    anthropics = "anthropic_messages"
    assert [t.protocol for t in turns] == [anthropics, "openai_chat", anthropics]
    assert [t.continuity for t in turns] == ["first", "extended", "extended"]


@pytest.mark.field_case("miles#1714")
async def test_an_answer_that_was_lost_leaves_the_conversation_whole(
    gateway: Any, rollout: Any, client: Any
) -> None:
    gateway.engine.script(*(gateway.says(text) for text in ("lost", "found", "bye")))
    await ask(client, QUESTION, is_streamed=True)
    found = await ask(client, QUESTION, is_streamed=True)
    messages = [
        *QUESTION,
        {"role": "assistant", "content": found.content},
        {"role": "user", "content": "go on"},
    ]
    await ask(client, messages, is_streamed=True)
    lost, second, third = await gateway.turns(rollout.rollout_id)
    assert [t.continuity for t in (lost, second, third)] == ["first", "forked", "extended"]
    assert third.parent_turn_id == second.turn_id


async def test_the_events_of_a_stream_reach_the_sdk_in_order(gateway: Any, client: Any) -> None:
    gateway.engine.script(gateway.says(f"<think>\nhm\n</think>\n\nLooking.\n{CALL}"))
    stream = await client.messages.create(**SETTINGS, messages=QUESTION, tools=TOOLS, stream=True)
    events = [event async for event in stream]
    # Into how many deltas a text is cut is a matter of time.
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", *block * 3, "message_delta", "message_stop"]
    assert [e.index for e in events if e.type == "content_block_start"] == [0, 1, 2]
    assert events[-2].delta.stop_reason == "tool_use"


async def test_the_signature_restores_what_a_client_does_not_show(
    gateway: Any, client: Any
) -> None:
    rollout = await gateway.start_rollout(history_mode="tree")
    gateway.engine.script(gateway.says(f"<think>\nhm  hm\n</think>\n\n{CALL}"), gateway.says("2"))
    async with client_of(rollout) as client:
        hidden = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
        first = await ask(client, QUESTION, is_streamed=True, tools=TOOLS, thinking=hidden)
        assert first.content[0].thinking == ""
        messages = [
            *QUESTION,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [tool_result(first, "2")]},
        ]
        await ask(client, messages, is_streamed=True, tools=TOOLS, thinking=hidden)
    prompt = gateway.tokenizer.decode(
        gateway.engine.requests[1]["token_ids"], skip_special_tokens=False
    )
    assert "hm  hm" in prompt


async def test_a_failed_tool_is_told_to_the_model(gateway: Any, client: Any) -> None:
    gateway.engine.script(gateway.says(CALL), gateway.says("sorry"))
    first = await ask(client, QUESTION, is_streamed=False, tools=TOOLS)
    result = tool_result(first, "no such door", is_error=True)
    messages = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "try again"}]},
    ]
    await ask(client, messages, is_streamed=False, tools=TOOLS)
    prompt = gateway.tokenizer.decode(gateway.engine.requests[1]["token_ids"])
    assert "Error: no such door" in prompt
    assert prompt.index("no such door") < prompt.index("try again")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_stop_sequence_is_named(gateway: Any, client: Any, is_streamed: bool) -> None:
    reply = gateway.says("one two", is_stopped=False)
    reply.finish_reason, reply.stop_reason = "stop", " two"
    gateway.engine.script(reply)
    message = await ask(client, QUESTION, is_streamed=is_streamed, stop_sequences=[" two"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " two")
    assert message.content[0].text == "one"


async def test_a_cut_reply_says_so(gateway: Any, client: Any) -> None:
    gateway.engine.script(gateway.says("one two", is_stopped=False))
    assert (await ask(client, QUESTION, is_streamed=True)).stop_reason == "max_tokens"


async def test_the_count_is_the_length_of_the_prompt(
    gateway: Any, rollout: Any, client: Any
) -> None:
    gateway.engine.script(gateway.says("  Looking.\n" + CALL), gateway.says("2"))
    first = await ask(client, QUESTION, is_streamed=False, tools=TOOLS, system="be brief")
    messages = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [tool_result(first, "2")]},
    ]
    for history in (QUESTION, messages):
        counted = await client.messages.count_tokens(
            model="m", messages=history, tools=TOOLS, system="be brief"
        )
        await ask(client, history, is_streamed=False, tools=TOOLS, system="be brief")
        turn = (await gateway.turns(rollout.rollout_id))[-1]
        assert counted.input_tokens == turn.num_prompt_tokens
        assert counted.input_tokens == len(gateway.engine.requests[-1]["token_ids"])
    assert len(gateway.engine.requests) == 3  # counting samples nothing


@pytest.mark.field_case("claude-code#68900")
async def test_a_volatile_header_does_not_break_the_conversation(
    gateway: Any, rollout: Any, client: Any
) -> None:
    gateway.engine.script(gateway.says("one"), gateway.says("two"))
    messages = list(QUESTION)
    for nonce in ("36ee5", "0aaa9"):
        header = f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cch={nonce};"
        system = [{"type": "text", "text": header}, {"type": "text", "text": "You are an agent."}]
        message = await ask(client, messages, is_streamed=False, system=system)
        messages += [
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": "go on"},
        ]
    turns = await gateway.turns(rollout.rollout_id)
    assert [t.continuity for t in turns] == ["first", "extended"]
    assert [t.pinned for t in turns] == [(("cch=36ee5;", "cch=0;"),), (("cch=0aaa9;", "cch=0;"),)]
    assert "cch=0;" in gateway.tokenizer.decode(gateway.engine.requests[1]["token_ids"])


async def test_the_base_url_may_have_the_version_and_the_key_may_be_in_either_header(
    gateway: Any, rollout: Any
) -> None:
    async with client_of(rollout, has_version=True) as client:
        assert (await ask(client, QUESTION, is_streamed=False)).type == "message"
        counted = await client.messages.count_tokens(model="m", messages=QUESTION)
        assert counted.input_tokens > 0
    given = {"x-api-key": rollout.api_key}
    for headers in (given, rollout.headers, given | {"authorization": "Bearer of someone else"}):
        response = await gateway.http.post(
            f"{rollout.base_url}/messages", headers=headers, json={**SETTINGS, "messages": QUESTION}
        )
        assert response.status_code == 200


async def test_the_beta_path_of_the_sdk_is_the_same(gateway: Any, client: Any) -> None:
    gateway.engine.script(gateway.says("fine"))
    message = await client.beta.messages.create(**SETTINGS, messages=QUESTION, betas=["x"])
    assert message.content[0].text == "fine"


async def test_the_models_list_suits_the_sdk(gateway: Any, client: Any) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["tiny"]


async def test_a_retry_gets_the_recorded_answer(gateway: Any, rollout: Any) -> None:
    gateway.engine.script(gateway.says("first"), gateway.says("second"))
    answers = []
    for count in ("0", "1"):
        response = await gateway.http.post(
            f"{rollout.base_url}/messages",
            headers={**rollout.headers, "x-stainless-retry-count": count},
            json={**SETTINGS, "messages": QUESTION},
        )
        answers.append(response.content)
    assert answers[0] == answers[1]
    assert len(await gateway.turns(rollout.rollout_id)) == 1


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["request_id"] == response.headers["request-id"]
    error: dict[str, Any] = body["error"]
    return error


async def test_errors_have_anthropics_bodies(gateway: Any, rollout: Any) -> None:
    async def post(path: str = "messages", key: str = rollout.api_key, **body: Any) -> Any:
        whole = {**SETTINGS, "messages": QUESTION, **body}
        headers = {"x-api-key": key}
        return await gateway.http.post(f"{rollout.base_url}/{path}", headers=headers, json=whole)

    error = error_of(await post(key="sk-ant-wrong"), 401)
    assert error == {
        "type": "authentication_error",
        "message": "the api key is not a turnfold session key",
    }
    for path in ("messages", "messages/count_tokens"):
        error = error_of(await post(path, tool_choice={"type": "any"}), 400)
        assert error["type"] == "invalid_request_error"
        assert "tool_choice.type" in error["message"]
    assert "top_p" in (error_of(await post(top_p=0.5), 400))["message"]
    error = error_of(await gateway.http.get(f"{rollout.base_url}/messages"), 405)
    assert error["type"] == "not_found_error"

    gateway.engine.script(Reply(ids=[], status=500), Reply(ids=[10**9]))
    assert (error_of(await post(), 503))["type"] == "overloaded_error"
    assert (error_of(await post(), 502))["type"] == "api_error"

    finish = f"{rollout.base_url}/rollouts/current/finish"
    await gateway.http.post(finish, headers={"x-api-key": rollout.api_key}, json={"reward": 1})
    for path in ("messages", "messages/count_tokens"):
        response = await post(path)
        assert (error_of(response, 409))["type"] == "conflict_error"
        assert response.headers["x-should-retry"] == "false"


async def test_a_full_context_is_told_in_the_words_that_agents_look_for(gateway: Any) -> None:
    rollout = await gateway.start_rollout(max_context_tokens=3)
    async with client_of(rollout) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(client, QUESTION, is_streamed=True)
    body: Any = caught.value.body
    assert body["error"]["message"].startswith("prompt is too long: ")
    assert body["error"]["message"].endswith(" tokens > 3 maximum")
    assert caught.value.request_id == body["request_id"]


async def test_a_body_beyond_the_limit_is_refused(stack: Any) -> None:
    await stack.start_gateway(max_body_bytes=1000)
    async with client_of(await stack.start_rollout()) as client:
        with pytest.raises(anthropic.APIStatusError) as caught:
            await ask(client, [{"role": "user", "content": "x" * 2000}], is_streamed=False)
    assert caught.value.status_code == 413
    assert caught.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]


async def test_an_engine_that_dies_in_a_stream_is_an_error_event(stack: Any) -> None:
    await stack.start_gateway(stream_keepalive_s=0.05)
    rollout = await stack.start_rollout()
    release = threading.Event()
    stack.engine.script(Reply(ids=[], status=500, release=release))
    async with client_of(rollout) as client:
        stream = await client.messages.create(**SETTINGS, messages=QUESTION, stream=True)
        release.set()
        with pytest.raises(anthropic.APIStatusError, match="scripted failure"):
            async for _ in stream:
                pass


async def test_a_stream_shows_signs_of_life_while_the_engine_is_silent(stack: Any) -> None:
    await stack.start_gateway(stream_keepalive_s=0.05)
    rollout = await stack.start_rollout()
    release = threading.Event()
    reply = stack.says("at last")
    reply.release = release
    stack.engine.script(reply)
    async with stack.http.stream(
        "POST",
        f"{rollout.base_url}/messages",
        headers=rollout.headers,
        json={**SETTINGS, "messages": QUESTION, "stream": True},
    ) as response:
        lines = []
        async for line in response.aiter_lines():
            lines.append(line)
            release.set()
    # The engine answers once something has come: a ping, or the start of the message if it is known.
    assert lines[0] in ("event: ping", "event: message_start")
    assert 'data: {"type":"ping"}' in lines
    assert [line for line in lines if line][-1] == 'data: {"type":"message_stop"}'
    assert len(await stack.turns(rollout.rollout_id)) == 1

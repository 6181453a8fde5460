"""OpenAI's responses API through the unmodified SDK, plain and streamed, and what the log holds."""

import threading
from typing import Any

import msgspec
import openai
import pytest

from turnfold.gateway.testing import Reply

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "lookup",
        "description": "code of a door",
        "parameters": {"type": "object", "properties": {"door": {"type": "string"}}},
        "strict": True,
    }
]
QUESTION: list[Any] = [{"role": "user", "content": "code of door 5?"}]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"side": "left", "door": "5"}}\n</tool_call>'


async def ask(rollout: Any, given: Any, *, is_streamed: bool, **settings: Any) -> Any:
    """One call, from which the SDK makes the same response in both ways."""
    if not is_streamed:
        return await rollout.client.responses.create(model="m", input=given, **settings)
    async with rollout.client.responses.stream(model="m", input=given, **settings) as stream:
        return await stream.get_final_response()


def output_of(response: Any, text: str) -> dict[str, Any]:
    call = next(item for item in response.output if item.type == "function_call")
    return {"type": "function_call_output", "call_id": call.call_id, "output": text}


def items_of(response: Any) -> list[dict[str, Any]]:
    return [item.model_dump() for item in response.output]


async def assert_one_sequence(stack: Any, rollout: Any, replies: list[Reply]) -> list[Any]:
    """Each prompt repeats all that was said before it, and the log knows it."""
    turns: list[Any] = await stack.turns(rollout.rollout_id)
    prompts = [request["token_ids"] for request in stack.engine.requests]
    wholes = [prompt + reply.ids for prompt, reply in zip(prompts, replies, strict=True)]
    assert stack.full_sequences(turns) == wholes
    for shorter, longer in zip(wholes, prompts[1:], strict=False):
        assert longer[: len(shorter)] == shorter
    assert [t.parent_turn_id for t in turns[1:]] == [t.turn_id for t in turns[:-1]]
    assert {t.continuity for t in turns[1:]} <= {"extended", "healed"}
    return turns


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.field_case("NeMo Gym#1787")
async def test_tool_conversation_with_reasoning_is_one_sequence(
    gateway: Any, is_streamed: bool
) -> None:
    rollout = await gateway.start_rollout()
    replies = [
        gateway.says(f"<think>\nhm \n</think>\n\nLooking.\n{CALL}"),
        gateway.says("<think>\nso\n</think>\n\nthe code is 2"),
        gateway.says("bye"),
    ]
    gateway.engine.script(*replies)
    settings: dict[str, Any] = {"tools": TOOLS, "instructions": "be brief"}
    history = list(QUESTION)
    first = await ask(rollout, history, is_streamed=is_streamed, **settings)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    assert first.output[0].content[0].text == "hm "
    assert first.output[2].arguments == '{"side":"left","door":"5"}'
    assert first.status == "completed"

    # Agents put the SDK's objects into the history, or the plain data that they keep of them.
    history += [*(first.output if is_streamed else items_of(first)), output_of(first, "2")]
    second = await ask(rollout, history, is_streamed=is_streamed, **settings)
    assert second.output_text == "the code is 2"

    history += [*items_of(second), {"role": "user", "content": "thanks"}]
    third = await ask(rollout, history, is_streamed=is_streamed, **settings)

    turns = await assert_one_sequence(gateway, rollout, replies)
    assert [r.id for r in (first, second, third)] == [f"resp_{t.turn_id}" for t in turns]
    assert [m.role for m in turns[1].new_messages] == ["tool"]
    assert third.usage.input_tokens == turns[2].num_prompt_tokens
    assert third.usage.output_tokens == len(replies[-1].ids)
    assert {t.protocol for t in turns} == {"openai_responses"}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_previous_response_stands_for_all_before_it(
    gateway: Any, is_streamed: bool
) -> None:
    rollout = await gateway.start_rollout()
    replies = [gateway.says(f"  Looking.\n{CALL}"), gateway.says("2"), gateway.says("bye")]
    gateway.engine.script(*replies)
    settings: dict[str, Any] = {"tools": TOOLS, "instructions": "be brief"}
    first = await ask(rollout, "code of door 5?", is_streamed=is_streamed, **settings)
    second = await ask(
        rollout,
        [output_of(first, "2")],
        is_streamed=is_streamed,
        previous_response_id=first.id,
        **settings,
    )
    assert second.previous_response_id == first.id
    await ask(
        rollout, "thanks", is_streamed=is_streamed, previous_response_id=second.id, **settings
    )
    turns = await assert_one_sequence(gateway, rollout, replies)
    assert [t.has_instructions for t in turns] == [True] * 3
    assert [[m.role for m in t.new_messages] for t in turns] == [
        ["system", "user"],
        ["tool"],
        ["user"],
    ]


async def test_a_previous_response_is_found_by_another_gateway(gateway: Any) -> None:
    other = await gateway.start_gateway()
    rollout = await gateway.start_rollout()
    moved = gateway.rollout(f"{other}/v1", rollout.rollout_id, rollout.api_key)
    first = await ask(rollout, "a", is_streamed=False)
    second = await ask(moved, "b", is_streamed=False, previous_response_id=first.id)
    await ask(rollout, "c", is_streamed=False, previous_response_id=second.id)
    turns = await gateway.turns(rollout.rollout_id)
    assert [t.continuity for t in turns] == ["first", "extended", "extended"]


async def test_two_branches_of_one_response_both_continue_it(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    first = await ask(rollout, "a", is_streamed=False)
    for text in ("b", "c"):
        await ask(rollout, text, is_streamed=False, previous_response_id=first.id)
    turns = await gateway.turns(rollout.rollout_id)
    assert [t.continuity for t in turns] == ["first", "extended", "forked"]
    assert {t.parent_turn_id for t in turns[1:]} == {turns[0].turn_id}


async def test_an_unknown_previous_response_is_refused(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    opened = await gateway.http.post(
        f"{rollout.base_url}/rollouts/current/sessions",
        headers=rollout.headers,
        json={"session_id": "helper"},
    )
    helper = gateway.rollout(rollout.base_url, rollout.rollout_id, opened.json()["api_key"])
    of_the_helper = await ask(helper, "a", is_streamed=False)
    for response_id in ("resp_unknown", of_the_helper.id):
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(rollout, "b", is_streamed=False, previous_response_id=response_id)
        assert caught.value.code == "previous_response_not_found"
        assert caught.value.param == "previous_response_id"
        assert response_id in caught.value.message
    assert len(gateway.engine.requests) == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_history_that_a_client_changed_cosmetically_is_healed(
    gateway: Any, is_streamed: bool
) -> None:
    rollout = await gateway.start_rollout()
    gateway.engine.script(
        gateway.says(f"<think>\nhm\n</think>\n\n Looking. \n{CALL}"), gateway.says("2")
    )
    first = await ask(rollout, QUESTION, is_streamed=is_streamed, tools=TOOLS)
    _, message, call = first.output
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "code of door 5?"}]},
        {"role": "assistant", "content": message.content[0].text.strip()},
        {
            "type": "function_call",
            "call_id": call.call_id,
            "name": "lookup",
            "arguments": '{ "door": "5", "side": "left" }',
        },
        output_of(first, "2"),
    ]
    await ask(rollout, history, is_streamed=is_streamed, tools=TOOLS)
    turns = await gateway.turns(rollout.rollout_id)
    assert [t.continuity for t in turns] == ["first", "healed"]
    assert turns[1].parent_turn_id == turns[0].turn_id


async def test_sealed_reasoning_comes_back_without_its_text(gateway: Any) -> None:
    rollout = await gateway.start_rollout(history_mode="tree")
    gateway.engine.script(gateway.says(f"<think>\nhm  hm\n</think>\n\n{CALL}"), gateway.says("2"))
    settings: dict[str, Any] = {"store": False, "include": ["reasoning.encrypted_content"]}
    first = await ask(rollout, QUESTION, is_streamed=True, tools=TOOLS, **settings)
    reasoning, *others = items_of(first)
    del reasoning["content"]
    history = [*QUESTION, reasoning, *others, output_of(first, "2")]
    await ask(rollout, history, is_streamed=True, tools=TOOLS, **settings)
    prompt = gateway.tokenizer.decode(
        gateway.engine.requests[1]["token_ids"], skip_special_tokens=False
    )
    assert "hm  hm" in prompt


async def test_all_of_openais_apis_make_one_conversation(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    replies = [gateway.says(CALL), gateway.says("the code is 2"), gateway.says("bye")]
    gateway.engine.script(*replies)
    first = await ask(rollout, QUESTION, is_streamed=False, tools=TOOLS)
    function = {name: TOOLS[0][name] for name in ("name", "description", "parameters")}
    call = {
        "id": first.output[0].call_id,
        "type": "function",
        "function": {"name": "lookup", "arguments": first.output[0].arguments},
    }
    await rollout.client.chat.completions.create(
        model="m",
        messages=[
            *QUESTION,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "2"},
        ],
        tools=[{"type": "function", "function": function}],
    )
    (_, second) = await gateway.turns(rollout.rollout_id)
    await ask(
        rollout,
        "thanks",
        is_streamed=True,
        tools=TOOLS,
        previous_response_id=f"resp_{second.turn_id}",
    )
    turns = await assert_one_sequence(gateway, rollout, replies)
    assert [t.protocol for t in turns] == ["openai_responses", "openai_chat", "openai_responses"]
    assert [t.continuity for t in turns] == ["first", "extended", "extended"]


async def test_the_events_of_a_stream_reach_the_sdk_in_order(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    gateway.engine.script(gateway.says(f"Looking.\n{CALL}"))
    stream = await rollout.client.responses.create(model="m", input="a", tools=TOOLS, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == "Looking."
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert done.arguments == '{"side":"left","door":"5"}'
    assert events[-1].type == "response.completed"
    assert len(events[-1].response.output) == 2


async def test_a_cut_reply_ends_incomplete(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    for is_streamed in (False, True):
        gateway.engine.script(gateway.says("one two", is_stopped=False))
        settings: dict[str, Any] = {"model": "m", "input": "a", "max_output_tokens": 7}
        if is_streamed:
            stream = await rollout.client.responses.create(**settings, stream=True)
            *_, last = [event async for event in stream]
            assert last.type == "response.incomplete"
            response = last.response
        else:
            response = await rollout.client.responses.create(**settings)
        assert response.status == "incomplete"
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output_text == "one two"
        assert gateway.engine.requests[-1]["sampling_params"]["max_tokens"] == 7


async def test_logprobs_are_given_when_included(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    reply = gateway.says("ab")
    gateway.engine.script(reply)
    response = await ask(rollout, "a", is_streamed=True, include=["message.output_text.logprobs"])
    logprobs = response.output[0].content[0].logprobs
    assert [token.logprob for token in logprobs] == [-0.5] * len(reply.ids)


async def test_the_count_is_the_length_of_the_prompt(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    first = await ask(rollout, "a", is_streamed=False, tools=TOOLS)
    settings: dict[str, Any] = {
        "model": "m",
        "input": "b",
        "tools": TOOLS,
        "previous_response_id": first.id,
    }
    counted = await rollout.client.responses.input_tokens.count(**settings)
    second = await rollout.client.responses.create(**settings)
    assert counted.input_tokens == second.usage.input_tokens
    assert counted.input_tokens == len(gateway.engine.requests[-1]["token_ids"])
    assert len(gateway.engine.requests) == 2


async def test_a_retry_gets_the_recorded_answer(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    gateway.engine.script(*(gateway.says(text) for text in ("one", "two", "three")))
    first = await ask(rollout, "a", is_streamed=False)
    answers = []
    for count in ("0", "1"):
        response = await gateway.http.post(
            f"{rollout.base_url}/responses",
            headers={**rollout.headers, "x-stainless-retry-count": count},
            json={"model": "m", "input": "b", "previous_response_id": first.id},
        )
        answers.append(response.content)
    assert answers[0] == answers[1]
    assert len(await gateway.turns(rollout.rollout_id)) == 2


async def test_errors_have_openais_bodies(gateway: Any) -> None:
    rollout = await gateway.start_rollout()

    async def error(status: int, **body: Any) -> dict[str, Any]:
        response = await gateway.http.post(
            f"{rollout.base_url}/responses",
            headers=body.pop("headers", rollout.headers),
            json={"model": "m", "input": "a", **body},
        )
        assert response.status_code == status, response.text
        found: dict[str, Any] = response.json()["error"]
        assert found.keys() == {"message", "type", "param", "code", "request_id"}
        assert found["request_id"] == response.headers["x-request-id"]
        return found

    wrong_key = await error(401, headers={"authorization": "Bearer sk-wrong"})
    assert (wrong_key["type"], wrong_key["code"]) == ("authentication_error", "invalid_api_key")
    wrong_field = await error(400, background=True)
    assert wrong_field["type"] == "invalid_request_error"
    assert (wrong_field["param"], wrong_field["code"]) == ("background", "unsupported_parameter")
    assert (await error(400, top_p=0.5))["code"] == "biased_sampling"
    gateway.engine.script(Reply(ids=[], status=500), Reply(ids=[10**9]))
    assert (await error(503))["code"] == "engine_error"
    assert (await error(502))["code"] == "invalid_output"
    finish = f"{rollout.base_url}/rollouts/current/finish"
    await gateway.http.post(finish, headers=rollout.headers, json={"reward": 1})
    assert (await error(409))["code"] == "rollout_closed"


async def test_the_sdk_raises_an_error_event(stack: Any) -> None:
    await stack.start_gateway(stream_keepalive_s=0.05)
    rollout = await stack.start_rollout()
    release = threading.Event()
    stack.engine.script(Reply(ids=[], status=500, release=release))
    stream = await rollout.client.responses.create(model="m", input="a", stream=True)
    release.set()
    with pytest.raises(openai.APIError, match="scripted failure"):
        async for _ in stream:
            pass


def references_to(response: Any) -> list[Any]:
    return [{"type": "item_reference", "id": item.id} for item in response.output]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_items_that_are_only_named_are_those_of_the_log(
    gateway: Any, is_streamed: bool
) -> None:
    rollout = await gateway.start_rollout()
    replies = [
        gateway.says(f"<think>\nhm \n</think>\n\nLooking.\n{CALL}\n{CALL}"),
        gateway.says("the code is 2"),
        gateway.says("bye"),
    ]
    gateway.engine.script(*replies)
    history = list(QUESTION)
    first = await ask(rollout, history, is_streamed=is_streamed, tools=TOOLS)
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "2"}
        for item in first.output
        if item.type == "function_call"
    ]
    assert len(outputs) == 2
    history += [*references_to(first), *outputs]
    second = await ask(rollout, history, is_streamed=is_streamed, tools=TOOLS)
    history += [*references_to(second), {"role": "user", "content": "thanks"}]
    other = await gateway.start_gateway()
    moved = gateway.rollout(f"{other}/v1", rollout.rollout_id, rollout.api_key)
    await ask(moved, history, is_streamed=is_streamed, tools=TOOLS)
    turns = await assert_one_sequence(gateway, rollout, replies)
    assert [t.continuity for t in turns] == ["first", "extended", "extended"]
    assert [[m.role for m in t.new_messages] for t in turns[1:]] == [["tool", "tool"], ["user"]]


async def test_an_item_of_another_session_is_not_found(gateway: Any) -> None:
    first = await ask(await gateway.start_rollout(), QUESTION, is_streamed=False)
    stranger = await gateway.start_rollout()
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(stranger, [*QUESTION, *references_to(first)], is_streamed=False)
    assert caught.value.param == "input[1]"
    assert caught.value.code == "item_not_found"


async def test_a_response_is_given_again_as_it_was_recorded(gateway: Any) -> None:
    other = await gateway.start_gateway()
    rollout = await gateway.start_rollout()
    said = gateway.says(f"<think>\nhm\n</think>\n\nLooking.\n{CALL}")
    gateway.engine.script(msgspec.structs.replace(said, num_cached_tokens=7))
    include: list[Any] = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    given = await ask(rollout, QUESTION, is_streamed=False, tools=TOOLS, include=include)
    assert given.usage.input_tokens_details.cached_tokens == 7
    opening, closing = (gateway.tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
    num_reasoning = said.ids.index(closing) - said.ids.index(opening) - 1
    assert given.usage.output_tokens_details.reasoning_tokens == num_reasoning > 0
    moved = gateway.rollout(f"{other}/v1", rollout.rollout_id, rollout.api_key)
    for asking in (rollout, moved):
        again = await asking.client.responses.retrieve(given.id, include=include)
        for name in ("id", "model", "status", "output", "usage", "created_at"):
            assert getattr(again, name) == getattr(given, name), name
    streamed = await rollout.client.responses.retrieve(given.id, stream=True, include=include)
    events = [event async for event in streamed]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output == given.output
    assert len(gateway.engine.requests) == 1


@pytest.mark.parametrize("response_id", ["resp_unknown", "chatcmpl-1"])
async def test_a_response_that_nobody_gave_is_not_found(gateway: Any, response_id: str) -> None:
    rollout = await gateway.start_rollout()
    with pytest.raises(openai.NotFoundError) as caught:
        await rollout.client.responses.retrieve(response_id)
    assert response_id in caught.value.message
    with pytest.raises(openai.AuthenticationError):
        await rollout.client.with_options(api_key="x").responses.retrieve(response_id)

"""Conversations through the unmodified OpenAI SDK, plain and streamed, and what the log holds of them."""

from typing import Any

import pytest

from turnfold.schemas.events import RolloutFinished, RolloutStarted

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "code of a door",
            "parameters": {"type": "object", "properties": {"door": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"side": "left", "door": "5"}}\n</tool_call>'


async def test_tool_conversation_is_recorded_token_by_token(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    called, answered = gateway.says(CALL), gateway.says("the code is 2")
    gateway.engine.script(called, answered)
    messages: list[Any] = [{"role": "user", "content": "code of door 5?"}]

    first = await rollout.client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == '{"side":"left","door":"5"}'

    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"},
    ]
    second = await rollout.client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert second.choices[0].message.content == "the code is 2"
    assert second.choices[0].finish_reason == "stop"
    assert second.usage is not None
    assert second.usage.completion_tokens == len(answered.ids)

    turns = await gateway.turns(rollout.rollout_id)
    assert [t.continuity for t in turns] == ["first", "extended"]
    assert turns[1].parent_turn_id == turns[0].turn_id
    prompts = [request["token_ids"] for request in gateway.engine.requests]
    assert gateway.full_sequences(turns) == [prompts[0] + called.ids, prompts[1] + answered.ids]
    assert prompts[1][: len(prompts[0]) + len(called.ids)] == prompts[0] + called.ids
    assert turns[1].shared_len == len(prompts[0]) + len(called.ids)
    assert [m.role for m in turns[1].new_messages] == ["tool"]
    assert second.usage.prompt_tokens == turns[1].num_prompt_tokens == len(prompts[1])


async def test_streamed_reply_equals_the_plain_one(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    gateway.engine.script(gateway.says("Looking.\n" + CALL))
    messages: list[Any] = [{"role": "user", "content": "code of door 5?"}]
    stream = await rollout.client.chat.completions.create(
        model="m",
        messages=messages,
        tools=TOOLS,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == "Looking."
    assert [call.index for call in calls] == [0, 0]
    assert calls[0].function.name == "lookup"
    arguments = "".join(call.function.arguments for call in calls)
    assert arguments == '{"side":"left","door":"5"}'
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    (turn,) = await gateway.turns(rollout.rollout_id)
    assert chunks[-1].usage.total_tokens == turn.num_prompt_tokens + len(turn.output_ids)
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{turn.turn_id}"}
    assert turn.reply.tool_calls[0].id == calls[0].id


async def test_history_that_a_client_changed_cosmetically_is_healed(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    gateway.engine.script(gateway.says(CALL), gateway.says("2"))
    messages: list[Any] = [{"role": "user", "content": "code of door 5?"}]
    first = await rollout.client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    reply = first.choices[0].message.model_dump(exclude_none=True)
    reply["tool_calls"][0]["function"]["arguments"] = '{ "door": "5", "side": "left" }'
    call_id = reply["tool_calls"][0]["id"]
    messages += [reply, {"role": "tool", "tool_call_id": call_id, "content": "2"}]
    await rollout.client.chat.completions.create(model="m", messages=messages, tools=TOOLS)

    turns = await gateway.turns(rollout.rollout_id)
    assert turns[1].continuity == "healed"
    assert turns[1].divergence.cause == "tool_arguments_reordered"
    first_prompt, second_prompt = (r["token_ids"] for r in gateway.engine.requests)
    saved = first_prompt + turns[0].output_ids.tolist()
    assert second_prompt[: len(saved)] == saved


async def test_tree_mode_sends_what_the_messages_render_to(gateway: Any) -> None:
    rollout = await gateway.start_rollout(history_mode="tree")
    gateway.engine.script(gateway.says(CALL), gateway.says("2"))
    messages: list[Any] = [{"role": "user", "content": "code of door 5?"}]
    first = await rollout.client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    reply = first.choices[0].message.model_dump(exclude_none=True)
    reply["tool_calls"][0]["function"]["arguments"] = '{"door":"5","side":"left"}'
    call_id = reply["tool_calls"][0]["id"]
    messages += [reply, {"role": "tool", "tool_call_id": call_id, "content": "2"}]
    await rollout.client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    turns = await gateway.turns(rollout.rollout_id)
    assert turns[1].continuity == "forked"
    second_prompt = gateway.engine.requests[1]["token_ids"]
    assert '"door": "5", "side": "left"' in gateway.tokenizer.decode(second_prompt)
    assert turns[1].shared_len < turns[0].num_prompt_tokens + len(turns[0].output_ids)


async def test_edited_history_is_a_reset_and_under_policy_error_a_refusal(gateway: Any) -> None:
    for policy, status in (("reset", 200), ("error", 400)):
        rollout = await gateway.start_rollout(nonlinear=policy)
        body = {"messages": [{"role": "user", "content": "a"}]}
        url = f"{rollout.base_url}/chat/completions"
        await gateway.http.post(url, headers=rollout.headers, json=body)
        body["messages"] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "what I never said"},
            {"role": "user", "content": "b"},
        ]
        response = await gateway.http.post(url, headers=rollout.headers, json=body)
        assert response.status_code == status
        turns = await gateway.turns(rollout.rollout_id)
        if policy == "reset":
            assert [t.continuity for t in turns] == ["first", "reset"]
        else:
            assert response.json()["error"]["code"] == "nonlinear_history"
            assert len(turns) == 1


async def test_sampling_settings_reach_the_engine(gateway: Any) -> None:
    rollout = await gateway.start_rollout(sampling={"temperature": 0.7, "max_tokens": 8})
    url = f"{rollout.base_url}/chat/completions"
    messages = [{"role": "user", "content": "a"}]
    for extra in (
        {},
        {"temperature": 0.2, "seed": 3, "stop": "x", "max_tokens": 4},
        {"max_completion_tokens": 50, "max_tokens": 99, "presence_penalty": 0, "top_p": 1},
    ):
        response = await gateway.http.post(
            url, headers=rollout.headers, json={"messages": messages, **extra}
        )
        assert response.status_code == 200
    assert [request["sampling_params"] for request in gateway.engine.requests] == [
        {"max_tokens": 8, "temperature": 0.7, "logprobs": 0},
        {"max_tokens": 4, "temperature": 0.2, "logprobs": 0, "seed": 3, "stop": ["x"]},
        {"max_tokens": 8, "temperature": 0.7, "logprobs": 0},
    ]


async def test_versions_that_sampled_a_turn_are_recorded(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    reply = gateway.says("abc")
    reply.weight_versions = [
        {"version": "3", "start": 0, "end": 1},
        {"version": "4", "start": 1, "end": len(reply.ids)},
    ]
    gateway.engine.script(reply)
    await rollout.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "a"}]
    )
    (turn,) = await gateway.turns(rollout.rollout_id)
    spans = [(s.policy_version, s.start, s.end) for s in turn.policy_versions]
    assert spans == [(3, 0, 1), (4, 1, len(reply.ids))]


async def test_logprobs_are_given_for_every_sampled_token(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    reply = gateway.says("ab")
    reply.logprobs = [-0.25 * (i + 1) for i in range(len(reply.ids))]
    gateway.engine.script(reply)
    response = await rollout.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "a"}], logprobs=True
    )
    content = response.choices[0].logprobs.content
    assert [token.logprob for token in content] == reply.logprobs
    assert "".join(token.token for token in content).startswith("ab")


async def test_a_stop_sequence_ends_the_content_but_stays_in_the_tokens(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    reply = gateway.says("one two", is_stopped=False)
    reply.finish_reason, reply.stop_reason = "stop", " two"
    gateway.engine.script(reply)
    response = await rollout.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "a"}], stop=[" two"]
    )
    assert response.choices[0].message.content == "one"
    (turn,) = await gateway.turns(rollout.rollout_id)
    assert turn.output_ids.tolist() == reply.ids
    assert turn.stop_reason == " two"


async def test_a_malformed_call_stays_in_the_content_and_the_turn_counts(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    text = '<tool_call>{"name": "lookup", "arguments": {</tool_call>'
    gateway.engine.script(gateway.says(text))
    response = await rollout.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "a"}], tools=TOOLS
    )
    assert response.choices[0].message.content == text
    assert response.choices[0].message.tool_calls is None
    assert len(await gateway.turns(rollout.rollout_id)) == 1


@pytest.mark.parametrize("choice", ["auto", "none"])
async def test_calls_are_given_unless_the_client_forbids_them(gateway: Any, choice: str) -> None:
    rollout = await gateway.start_rollout()
    gateway.engine.script(gateway.says(CALL))
    response = await rollout.client.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "a"}],
        tools=TOOLS,
        tool_choice=choice,
    )
    message = response.choices[0].message
    assert bool(message.tool_calls) == (choice == "auto")
    assert message.content == (None if choice == "auto" else CALL)


async def test_parallel_calls_of_one_session_are_all_recorded(gateway: Any) -> None:
    import asyncio

    rollout = await gateway.start_rollout()
    messages: list[Any] = [{"role": "user", "content": "a"}]
    create = rollout.client.chat.completions.create
    first = await create(model="m", messages=messages)
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    answers = await asyncio.gather(
        *(
            create(model="m", messages=[*messages, {"role": "user", "content": f"b{i}"}])
            for i in range(6)
        )
    )
    turns = await gateway.turns(rollout.rollout_id)
    assert len(turns) == 7
    assert {f"chatcmpl-{t.turn_id}" for t in turns} == {a.id for a in (first, *answers)}
    assert sorted(t.continuity for t in turns) == ["extended", "first"] + ["forked"] * 5
    prompts = {tuple(request["token_ids"]) for request in gateway.engine.requests}
    rebuilt = {
        tuple(full[: turn.num_prompt_tokens])
        for full, turn in zip(gateway.full_sequences(turns), turns, strict=True)
    }
    assert rebuilt == prompts


async def test_sessions_of_one_rollout_do_not_mix(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    opened = await gateway.http.post(
        f"{rollout.base_url}/rollouts/current/sessions",
        headers=rollout.headers,
        json={"session_id": "helper"},
    )
    helper = gateway.rollout(rollout.base_url, rollout.rollout_id, opened.json()["api_key"])
    messages: list[Any] = [{"role": "user", "content": "a"}]
    for agent in (rollout, helper):
        await agent.client.chat.completions.create(model="m", messages=messages)
    turns = await gateway.turns(rollout.rollout_id)
    assert [(t.session_id, t.continuity) for t in turns] == [("main", "first"), ("helper", "first")]


async def test_the_log_tells_the_whole_story_in_order(gateway: Any) -> None:
    rollout = await gateway.start_rollout(task_id="t7", index=2, attempt=1, max_turns=9)
    await rollout.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "a"}]
    )
    await gateway.http.post(
        f"{rollout.base_url}/rollouts/current/finish",
        headers=rollout.headers,
        json={"reward": 0.5, "rewards": {"format": 1.0}, "info": {"note": "x"}},
    )
    started, turn, finished = await gateway.events(rollout.rollout_id)
    assert isinstance(started, RolloutStarted)
    assert (started.group_id, started.task_id, started.index) == ("g", "t7", 2)
    assert turn.protocol == "openai_chat"
    assert turn.harness == "AsyncOpenAI/Python"
    assert len(turn.request_digest) == 64
    assert isinstance(finished, RolloutFinished)
    assert (finished.reward, finished.rewards) == (0.5, {"format": 1.0})
    assert finished.event_id == f"{rollout.rollout_id}:finished"

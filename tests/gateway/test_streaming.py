"""Text reaches the client as it is sampled: real SDKs, a real gateway, an engine that waits."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest

from turnfold.gateway.client import EventLog, LogUnavailable
from turnfold.gateway.testing import Reply, TokenGate
from turnfold.gateway.turns.sampling.app import MAX_RESUMPTIONS
from turnfold.schemas.events import TurnFailed

Eventually = Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]

MESSAGES: list[Any] = [{"role": "user", "content": "code of door 5?"}]
SCHEMA = {"type": "object", "properties": {"door": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "lookup", "parameters": SCHEMA}}]
ARGUMENTS = '{"side":"left","door":"5"}'
CALL = f'<tool_call>\n{{"name": "lookup", "arguments": {ARGUMENTS}}}\n</tool_call>'
TEXT = "Looking for the öffner."
FIRST_PIECE = b'"L'
"""As the first event has it: the next token may come in another."""

PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", {"messages": MESSAGES}),
    "responses": ("responses", {"input": "code of door 5?"}),
    "anthropic": ("messages", {"messages": MESSAGES, "max_tokens": 100}),
}


async def chat(rollout: Any) -> AsyncIterator[tuple[str, str]]:
    """(kind, text) of all that OpenAI's SDK tells of a streamed chat completion."""
    stream = await rollout.client.chat.completions.create(
        model="m", messages=MESSAGES, tools=TOOLS, stream=True
    )
    async for chunk in stream:
        (choice,) = chunk.choices
        if choice.delta.content:
            yield "text", choice.delta.content
        for call in choice.delta.tool_calls or []:
            yield "arguments", call.function.arguments
        if choice.finish_reason:
            yield "end", choice.finish_reason


async def responses(rollout: Any) -> AsyncIterator[tuple[str, str]]:
    tools: list[Any] = [{"type": "function", "name": "lookup", "parameters": SCHEMA}]
    stream = await rollout.client.responses.create(
        model="m", input="code of door 5?", tools=tools, stream=True
    )
    async for event in stream:
        if event.type == "response.output_text.delta":
            yield "text", event.delta
        elif event.type == "response.function_call_arguments.delta":
            yield "arguments", event.delta
        elif event.type == "response.completed":
            yield "end", event.response.status


async def messages(rollout: Any) -> AsyncIterator[tuple[str, str]]:
    base_url = rollout.base_url.removesuffix("/v1")
    tools: list[Any] = [{"name": "lookup", "input_schema": SCHEMA}]
    async with (
        anthropic.AsyncAnthropic(
            base_url=base_url, api_key=rollout.api_key, max_retries=0
        ) as client,
        client.messages.stream(model="m", max_tokens=100, messages=MESSAGES, tools=tools) as stream,
    ):
        async for event in stream:
            if event.type == "text":
                yield "text", event.text
            elif event.type == "input_json":
                yield "arguments", event.partial_json
            elif event.type == "message_stop":
                yield "end", str(event.message.stop_reason)


SDKS = {"chat": chat, "responses": responses, "anthropic": messages}
ENDS = {"chat": "tool_calls", "responses": "completed", "anthropic": "tool_use"}


async def read_text(told: AsyncIterator[tuple[str, str]]) -> None:
    """Read to the end, which must not come before an error."""
    async for kind, _ in told:
        assert kind == "text"


def gated(stack: Any, text: str, num_allowed: int) -> tuple[Reply, TokenGate]:
    """The engine's answer, of which the first tokens may pass."""
    reply, gate = stack.says(text), TokenGate()
    reply.gate = gate
    gate.allow(num_allowed)
    return reply, gate


@pytest.mark.field_case("vllm#27482")
@pytest.mark.field_case("sglang#30917")
@pytest.mark.parametrize("name", SDKS)
async def test_text_reaches_sdks_before_the_engine_has_finished(gateway: Any, name: str) -> None:
    rollout = await gateway.start_rollout()
    reply, gate = gated(gateway, f"{TEXT}\n{CALL}", num_allowed=4)
    gateway.engine.script(reply)
    told = SDKS[name](rollout)
    first = await anext(told)
    assert first[0] == "text"
    assert TEXT.startswith(first[1])
    gate.open()
    rest = [first, *[event async for event in told]]
    assert "".join(text for kind, text in rest if kind == "text") == TEXT
    assert "".join(text for kind, text in rest if kind == "arguments") == ARGUMENTS
    assert rest[-1] == ("end", ENDS[name])
    (turn,) = await gateway.turns(rollout.rollout_id)
    assert turn.output_ids.tolist() == reply.ids
    assert turn.reply.content == TEXT
    (request,) = gateway.engine.requests
    assert request["stream"]
    assert "return_token_ids" not in request


async def test_what_is_recorded_of_a_stream_is_what_is_recorded_of_a_plain_call(
    gateway: Any,
) -> None:
    turns = []
    for is_streamed in (False, True):
        rollout = await gateway.start_rollout()
        gateway.engine.script(gateway.says(f"<think>hm</think>{TEXT}\n{CALL}"))
        body = {"messages": MESSAGES, "tools": TOOLS, "stream": is_streamed}
        await post(gateway, rollout, "chat", **body)
        (turn,) = await gateway.turns(rollout.rollout_id)
        calls = tuple(msgspec.structs.replace(c, id="") for c in turn.reply.tool_calls)
        reply = msgspec.structs.replace(turn.reply, tool_calls=calls)
        turns.append((turn.output_ids.tolist(), turn.logprobs.tolist(), reply))
    assert turns[0] == turns[1]
    assert [request["stream"] for request in gateway.engine.requests] == [False, True]


async def post(stack: Any, rollout: Any, name: str, **changes: Any) -> httpx.Response:
    path, body = PATHS[name]
    body = {"model": "m", "stream": True, **body, **changes}
    response = await stack.http.post(
        f"{rollout.base_url}/{path}", headers=rollout.headers, json=body
    )
    assert isinstance(response, httpx.Response)
    return response


@pytest.mark.field_case("litellm#41826")
@pytest.mark.parametrize("name", PATHS)
async def test_an_engine_that_dies_in_mid_stream_is_told_as_an_error(
    gateway: Any, name: str
) -> None:
    rollout = await gateway.start_rollout()
    reply, gate = gated(gateway, TEXT, num_allowed=3)
    reply.breaks_after = 3
    gateway.engine.script(reply)
    path, body = PATHS[name]
    received = b""
    async with gateway.http.stream(
        "POST",
        f"{rollout.base_url}/{path}",
        headers=rollout.headers,
        json={"model": "m", "stream": True, **body},
    ) as response:
        assert response.status_code == 200
        async for data in response.aiter_bytes():
            received += data
            gate.open()
    assert FIRST_PIECE in received
    last = received.decode().strip().split("\n\n")[-1]
    error = msgspec.json.decode(last.split("data: ")[1])["error"]
    assert "stream broke after 3 tokens" in error["message"]
    for ending in (b"[DONE]", b"message_stop", b"message_delta", b"response.completed", b'"stop"'):
        assert ending not in received
    events = await gateway.events(rollout.rollout_id)
    assert [type(event) for event in events[1:]] in ([], [TurnFailed])
    assert len(gateway.engine.requests) == 1


@pytest.mark.parametrize("name", ["chat", "anthropic"])
async def test_sdks_raise_the_error_of_a_stream(gateway: Any, name: str) -> None:
    rollout = await gateway.start_rollout()
    reply, gate = gated(gateway, TEXT, num_allowed=3)
    reply.breaks_after = 5
    gateway.engine.script(reply)
    told = SDKS[name](rollout)
    assert (await anext(told))[0] == "text"
    gate.open()
    with pytest.raises((openai.APIError, anthropic.APIError), match="stream broke"):
        await read_text(told)


async def test_an_error_before_the_first_text_has_its_status(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    gateway.engine.script(Reply(ids=[], status=500))
    response = await post(gateway, rollout, "chat")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_error"


async def test_the_end_is_told_once_the_log_has_the_turn(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = await gateway.start_rollout()
    reached, allowed = asyncio.Event(), asyncio.Event()
    append = EventLog.append

    async def slow_append(self: EventLog, event: Any) -> Any:
        reached.set()
        await allowed.wait()
        return await append(self, event)

    monkeypatch.setattr(EventLog, "append", slow_append)
    gateway.engine.script(gateway.says(TEXT))
    told = chat(rollout)
    shown = ""
    while shown != TEXT:
        kind, text = await anext(told)
        assert kind == "text"
        shown += text
    async with asyncio.timeout(10):
        await reached.wait()
    end = asyncio.ensure_future(anext(told))
    assert not end.done()
    allowed.set()
    assert await end == ("end", "stop")


async def test_a_turn_that_the_log_does_not_take_ends_in_an_error(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = await gateway.start_rollout()
    refused = asyncio.Event()

    async def failing_append(self: EventLog, event: Any) -> Any:
        await refused.wait()
        raise LogUnavailable("the log cannot be reached")

    monkeypatch.setattr(EventLog, "append", failing_append)
    gateway.engine.script(gateway.says(TEXT))
    told = chat(rollout)
    assert (await anext(told))[0] == "text"
    refused.set()
    with pytest.raises(openai.APIError, match="cannot be reached"):
        await read_text(told)


async def test_a_client_that_leaves_in_mid_stream_aborts_the_engine(
    gateway: Any, eventually: Eventually
) -> None:
    rollout = await gateway.start_rollout()
    reply, gate = gated(gateway, TEXT, num_allowed=3)
    gateway.engine.script(reply)
    stream = await rollout.client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    await anext(aiter(stream))
    await stream.close()

    async def is_aborted() -> bool:
        return bool(gateway.engine.aborted)

    await eventually(is_aborted)
    gate.open()
    assert await gateway.turns(rollout.rollout_id) == []


async def test_a_retry_that_joins_a_stream_gets_all_of_it(
    gateway: Any, eventually: Eventually
) -> None:
    rollout = await gateway.start_rollout()
    reply, gate = gated(gateway, f"{TEXT}\n{CALL}", num_allowed=4)
    gateway.engine.script(reply)

    async def begin() -> Any:
        stream = await rollout.client.chat.completions.create(
            model="m",
            messages=MESSAGES,
            tools=TOOLS,
            stream=True,
            extra_headers={"idempotency-key": "k1"},
        )
        return stream, [await anext(aiter(stream)) for _ in range(2)]

    first, first_chunks = await begin()
    second, second_chunks = await begin()
    gate.open()
    first_chunks += [chunk async for chunk in first]
    second_chunks += [chunk async for chunk in second]
    for chunks in (first_chunks, second_chunks):
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == TEXT
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert {chunk.id for chunk in first_chunks} == {chunk.id for chunk in second_chunks}
    assert len(gateway.engine.requests) == 1
    assert len(await gateway.turns(rollout.rollout_id)) == 1


async def test_a_streamed_retry_of_a_plain_call_gets_its_answer(
    stack: Any, eventually: Eventually
) -> None:
    url = await stack.start_gateway(stream_keepalive_s=0.05)
    rollout = await stack.start_rollout(url)
    reply = stack.says(TEXT)
    reply.release = threading.Event()
    stack.engine.script(reply)
    headers = {"idempotency-key": "k1"}
    create = rollout.client.chat.completions.create
    plain = asyncio.ensure_future(create(model="m", messages=MESSAGES, extra_headers=headers))

    async def is_asked() -> bool:
        return bool(stack.engine.requests)

    await eventually(is_asked)
    stream = await create(model="m", messages=MESSAGES, stream=True, extra_headers=headers)
    reply.release.set()
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    answer = await plain
    assert (answer.choices[0].message.content, answer.id) == (TEXT, chunks[0].id)
    assert len(stack.engine.requests) == 1


@pytest.mark.parametrize(
    ("name", "sign"), [("chat", b": keepalive"), ("anthropic", b"event: ping")]
)
async def test_a_silent_engine_does_not_make_a_silent_stream(
    stack: Any, name: str, sign: bytes
) -> None:
    url = await stack.start_gateway(stream_keepalive_s=0.05)
    rollout = await stack.start_rollout(url)
    reply, gate = gated(stack, TEXT, num_allowed=3)
    stack.engine.script(reply)
    path, body = PATHS[name]
    received = b""
    async with stack.http.stream(
        "POST",
        f"{rollout.base_url}/{path}",
        headers=rollout.headers,
        json={"model": "m", "stream": True, **body},
    ) as response:
        async for data in response.aiter_bytes():
            received += data
            # Twice: a message of Anthropic's begins with one.
            if FIRST_PIECE in received and received.count(sign) >= 3:
                gate.open()
    assert received.count(sign) >= 3
    assert b"error" not in received


@pytest.mark.field_case("miles#2030")
async def test_an_engine_that_hangs_in_mid_stream_is_given_up(stack: Any) -> None:
    url = await stack.start_gateway(engine_timeout_s=1.0)
    rollout = await stack.start_rollout(url)
    reply, gate = gated(stack, TEXT, num_allowed=3)
    stack.engine.script(reply)
    told = chat(rollout)
    with pytest.raises(openai.APIError, match="within 1 seconds"):
        await read_text(told)
    gate.open()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_reply_that_the_engine_broke_off_goes_on(gateway: Any, is_streamed: bool) -> None:
    rollout = await gateway.start_rollout()
    whole = gateway.says(TEXT)
    logprobs = [-0.25 * (i + 1) for i in range(len(whole.ids))]
    gateway.engine.script(
        Reply(ids=[], finish_reason="abort"),
        Reply(
            ids=whole.ids[:5],
            logprobs=logprobs[:5],
            finish_reason="abort",
            weight_versions=[
                {"version": "3", "start": 0, "end": 2},
                {"version": "4", "start": 2, "end": 5},
            ],
        ),
        Reply(
            ids=whole.ids[5:],
            logprobs=logprobs[5:],
            weight_versions=[{"version": "4", "start": 0, "end": len(whole.ids) - 5}],
        ),
    )
    response = await post(
        gateway, rollout, "chat", stream=is_streamed, max_tokens=50, seed=7, logprobs=True
    )
    if is_streamed:
        chunks = [
            msgspec.json.decode(line.removeprefix("data: "))["choices"][0]
            for line in response.text.split("\n")
            if line.startswith("data: {")
        ]
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == TEXT
        told = [t for chunk in chunks for t in (chunk["logprobs"] or {"content": []})["content"]]
    else:
        (choice,) = response.json()["choices"]
        assert choice["message"]["content"] == TEXT
        told = choice["logprobs"]["content"]
    assert [token["logprob"] for token in told] == logprobs

    first, second, third = gateway.engine.requests
    assert second["token_ids"] == first["token_ids"]
    assert third["token_ids"] == first["token_ids"] + whole.ids[:5]
    asked = [
        (r["sampling_params"]["max_tokens"], r["sampling_params"]["seed"])
        for r in (first, second, third)
    ]
    assert asked == [(50, 7), (50, 7), (45, 12)]
    assert len({r["request_id"] for r in (first, second, third)}) == 3
    (turn,) = await gateway.turns(rollout.rollout_id)
    assert turn.turn_id == first["request_id"]
    assert turn.output_ids.tolist() == whole.ids
    assert turn.logprobs.tolist() == logprobs
    spans = [(s.policy_version, s.start, s.end) for s in turn.policy_versions]
    assert spans == [(3, 0, 2), (4, 2, len(whole.ids))]


async def test_an_engine_that_breaks_off_all_the_time_is_given_up(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    gateway.engine.default = Reply(ids=[], finish_reason="abort")
    response = await post(gateway, rollout, "chat", stream=False)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "aborted"
    assert len(gateway.engine.requests) == MAX_RESUMPTIONS + 1


async def test_a_malformed_call_in_a_stream_is_text_and_the_turn_counts(gateway: Any) -> None:
    rollout = await gateway.start_rollout()
    text = '<tool_call>{"name": "lookup", "arguments": {</tool_call>'
    gateway.engine.script(gateway.says(text))
    told = [event async for event in chat(rollout)]
    assert "".join(text for kind, text in told if kind == "text") == text
    assert told[-1] == ("end", "stop")
    assert len(await gateway.turns(rollout.rollout_id)) == 1

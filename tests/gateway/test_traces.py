"""Recorded conversations of real agents, said again by the engine and sent back by the client.

They lie beside the checkout, in `../shared/traces`, with the tokenizer of Qwen3 in
`../shared/tokenizers`; without them these tests are skipped. The engine samples each recorded answer
as Qwen3 writes it. The client must get what was recorded, and what it sends back must continue the
tokens of the conversation.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from tokenizers import Tokenizer

from turnfold.gateway.calls import ModelCall
from turnfold.gateway.protocols import anthropic_messages, openai_chat, openai_responses
from turnfold.gateway.protocols.protocol import ModelProtocol
from turnfold.gateway.refusals import Refusal
from turnfold.gateway.testing import Reply, text_ids

SHARED = Path(__file__).parents[2].parent / "shared"
TRACES, QWEN3 = SHARED / "traces", SHARED / "tokenizers" / "qwen3"
FILES = (
    "bfcl_multi_turn", "claude_code", "nemo_gym", "openhands", "pydantic_ai", "swe_agent",
    "tau_bench", "toolbench",
)  # fmt: skip
pytestmark = pytest.mark.skipif(
    not (TRACES.is_dir() and QWEN3.is_dir()), reason="no recorded conversations beside the checkout"
)


class Said(NamedTuple):
    """An answer as a client understands it; edges of text are not a model's to decide."""

    content: str
    reasoning: str
    calls: list[tuple[str, Any]]


def said(message: dict[str, Any]) -> Said:
    """What the recorded message says. Some recordings have the thinking inside the content."""
    content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
    thought, closing, rest = content.partition("</think>")
    if closing:
        reasoning, content = reasoning + thought.replace("<think>", "", 1), rest
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(f["name"], json.loads(f["arguments"])) for f in functions]
    return Said(content.strip(), reasoning.strip(), calls)


def sampled(answer: Said) -> str:
    """The answer as Qwen3 writes it."""
    thinking = f"<think>\n{answer.reasoning}\n</think>\n\n" if answer.reasoning else ""
    calls = [
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        for name, arguments in answer.calls
    ]
    blocks = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return thinking + "\n".join([*([answer.content] if answer.content else []), *blocks])


class Step(NamedTuple):
    """What the client hears from others, and what the model answers."""

    heard: list[dict[str, Any]]
    answer: Said
    call_ids: list[str]


def steps(messages: list[dict[str, Any]]) -> Iterator[Step]:
    """Answers in their order; several in a row were one, and one that answers nothing is history."""
    heard: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for message in [*messages, {"role": "end"}]:
        if message["role"] == "assistant" and any(m["role"] in ("user", "tool") for m in heard):
            answers.append(message)
            continue
        if answers:
            parts = [said(answer) for answer in answers]
            whole = Said(
                "\n".join(part.content for part in parts if part.content),
                "\n".join(part.reasoning for part in parts if part.reasoning),
                [call for part in parts for call in part.calls],
            )
            ids = [c["id"] for answer in answers for c in answer.get("tool_calls") or ()]
            yield Step(heard, whole, ids)
            heard, answers = [], []
        heard.append(message)


class ChatClient:
    """Keeps the history as OpenAI's chat completions have it."""

    path = "chat/completions"

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self.tools = tools
        self.history: list[dict[str, Any]] = []

    def hear(self, message: dict[str, Any]) -> None:
        self.history.append(message)

    def request(self) -> dict[str, Any]:
        return {"model": "m", "messages": self.history, "tools": self.tools}

    def read(self, response: dict[str, Any]) -> tuple[Said, list[str]]:
        message = response["choices"][0]["message"]
        self.history.append(message)
        return said(message), [call["id"] for call in message.get("tool_calls") or ()]


class ResponsesClient(ChatClient):
    """Keeps the history as items of OpenAI's responses API."""

    path = "responses"

    def hear(self, message: dict[str, Any]) -> None:
        if message["role"] == "tool":
            call_id, output = message["tool_call_id"], message["content"]
            self.history.append(
                {"type": "function_call_output", "call_id": call_id, "output": output}
            )
        else:
            self.history.append({"role": message["role"], "content": message["content"]})

    def request(self) -> dict[str, Any]:
        flat = [{"type": "function", **tool["function"]} for tool in self.tools]
        return {"model": "m", "input": self.history, "tools": flat}

    def read(self, response: dict[str, Any]) -> tuple[Said, list[str]]:
        items = response["output"]
        self.history += items
        texts = {"reasoning": "", "message": ""}
        calls = [item for item in items if item["type"] == "function_call"]
        for item in items:
            if item["type"] in texts:
                texts[item["type"]] += item["content"][0]["text"]
        arguments = [(call["name"], json.loads(call["arguments"])) for call in calls]
        answer = Said(texts["message"].strip(), texts["reasoning"].strip(), arguments)
        return answer, [call["call_id"] for call in calls]


class AnthropicClient(ChatClient):
    """Keeps the history as Anthropic's messages have it."""

    path = "messages"

    def hear(self, message: dict[str, Any]) -> None:
        role, content = message["role"], message["content"]
        if role == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"]}
            role, content = "user", [block | {"content": content}]
        self.history.append({"role": role, "content": content})

    def request(self) -> dict[str, Any]:
        tools = [
            {
                "name": tool["function"]["name"],
                "description": tool["function"].get("description", ""),
                "input_schema": tool["function"].get("parameters") or {"type": "object"},
            }
            for tool in self.tools
        ]
        return {"model": "m", "messages": self.history, "tools": tools, "max_tokens": 4096}

    def read(self, response: dict[str, Any]) -> tuple[Said, list[str]]:
        blocks = response["content"]
        self.history.append({"role": "assistant", "content": blocks})
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
        uses = [block for block in blocks if block["type"] == "tool_use"]
        calls = [(use["name"], use["input"]) for use in uses]
        answer = Said("".join(texts).strip(), "".join(thoughts).strip(), calls)
        return answer, [use["id"] for use in uses]


CLIENTS = {"chat": ChatClient, "responses": ResponsesClient, "anthropic": AnthropicClient}


def conversations(file: str) -> list[dict[str, Any]]:
    with (TRACES / f"{file}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def offered(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Tools of the recording; some have calls of tools that they do not list, or list no names."""
    tools = [tool for tool in trace.get("tools") or () if tool["function"].get("name")]
    known = {tool["function"]["name"] for tool in tools}
    called = {name for step in steps(trace["messages"]) for name, _ in step.answer.calls}
    return tools + [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in sorted(called - known)
    ]


async def replay(stack: Any, tokenizer: Tokenizer, trace: dict[str, Any], name: str) -> int:
    """One conversation from its start to its end; returns the number of its turns."""
    rollout = await stack.start_rollout()
    client = CLIENTS[name](offered(trace))
    renamed: dict[str, str] = {}
    expected: list[list[int]] = []
    for step in steps(trace["messages"]):
        for message in step.heard:
            if message["role"] == "tool":
                call_id = message["tool_call_id"]
                message = {**message, "tool_call_id": renamed.get(call_id, call_id)}
            client.hear(message)
        expected.append(text_ids(tokenizer, sampled(step.answer) + "<|im_end|>"))
        stack.engine.script(Reply(ids=expected[-1]))
        response = await stack.http.post(
            f"{rollout.base_url}/{client.path}", headers=rollout.headers, json=client.request()
        )
        assert response.status_code == 200, (trace["id"], response.text)
        answer, call_ids = client.read(response.json())
        assert answer == step.answer, trace["id"]
        renamed |= dict(zip(step.call_ids, call_ids, strict=True))
    turns = await stack.turns(rollout.rollout_id)
    assert [turn.output_ids.tolist() for turn in turns] == expected, trace["id"]
    assert {turn.continuity for turn in turns[1:]} <= {"extended", "healed"}, (
        trace["id"],
        [(turn.continuity, turn.divergence) for turn in turns],
    )
    return len(turns)


PROTOCOLS: dict[str, ModelProtocol] = {
    "completions": openai_chat,
    "responses": openai_responses,
    "messages": anthropic_messages,
}
ON_THE_PROVIDERS_SIDE = re.compile(
    "|".join(
        [
            # Tool search: the provider shows the model some tools, and others when it asks.
            r"block of type '(tool_reference|tool_addition)' is not supported",
            r"defer_loading is not supported",
            # Tools that the provider runs, or whose description only it knows.
            r"block of type 'server_tool_use' is not supported",
            r"type: '(code_execution|web_search|memory|advisor)_\d+' is not supported",
            r"mcp_servers is not supported",
        ]
    )
)
"""The only reasons for which a recorded request may be refused when constraints are left aside."""


def test_every_recorded_request_is_read_or_asks_the_provider_for_something() -> None:
    num_read = 0
    for trace in conversations("wire_pydantic_ai"):
        for exchange in trace["exchanges"]:
            read = read_or_refused(exchange)
            if isinstance(read, Refusal):
                assert read.param, trace["id"]
                assert read.param.partition("[")[0] in read.message
                assert ON_THE_PROVIDERS_SIDE.search(read.message), (trace["id"], read.message)
            else:
                num_read += 1
                unknown = [c.field for c in read.constraints if c.code == "unknown_parameter"]
                assert not unknown, (trace["id"], unknown)
    assert num_read >= 100


def read_or_refused(exchange: dict[str, Any]) -> ModelCall | Refusal:
    protocol = PROTOCOLS[exchange["uri"].partition("?")[0].rpartition("/")[2]]
    try:
        return protocol.read_call(msgspec.json.encode(exchange["request"]))
    except Refusal as refused:
        return refused


@pytest.fixture(scope="module")
def qwen3() -> Tokenizer:
    return Tokenizer.from_file(str(QWEN3 / "tokenizer.json"))


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_recorded_conversation_is_answered_as_recorded_in_one_line(
    stack: Any, qwen3: Tokenizer, name: str
) -> None:
    """The shortest conversation of each source that has at least three answers."""
    await stack.start_gateway(model=str(QWEN3))
    for file in FILES:
        long_enough = (t for t in conversations(file) if len(list(steps(t["messages"]))) >= 3)
        trace = min(long_enough, key=lambda trace: len(trace["messages"]))
        assert await replay(stack, qwen3, trace, name) >= 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("file", FILES)
async def test_all_recorded_conversations_are_answered_as_recorded(
    stack: Any, qwen3: Tokenizer, file: str, name: str
) -> None:
    stack.engine.max_model_len = 1_000_000
    await stack.start_gateway(model=str(QWEN3))
    for trace in conversations(file):
        await replay(stack, qwen3, trace, name)

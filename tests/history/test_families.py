"""Healing with the tokenizers and chat templates of real model families, on real conversations.

Skipped where those files are not beside the checkout.
"""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from turnfold.history.errors import RenderError
from turnfold.history.render import TemplateRenderer
from turnfold.schemas.messages import ChatMessage, ToolCall

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
FAMILIES = [
    "deepseek-v3.1",
    "devstral-2507",
    "glm-4.6",
    "gpt-oss",
    "llama-3.1",
    "minimax-m2",
    "qwen2.5",
    "qwen3",
    "qwen3-coder",
    "qwen3-instruct-2507",
    "qwen3-thinking-2507",
    "qwen3.5",
]
TRACES = ["tau_bench", "nemo_gym", "swe_agent", "bfcl_multi_turn", "pydantic_ai", "claude_code"]

pytestmark = pytest.mark.skipif(
    not (SHARED / "tokenizers").is_dir(), reason="no real tokenizers beside this checkout"
)


@cache
def load(family: str) -> TemplateRenderer:
    folder = SHARED / "tokenizers" / family
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    named = {
        name: config[name] for name in ("bos_token", "eos_token", "pad_token") if config.get(name)
    }
    return TemplateRenderer(
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        (folder / "chat_template.jinja").read_text(encoding="utf-8"),
        special_tokens=named,
        today=datetime.date(2026, 1, 2),
    )


def system(text: str) -> ChatMessage:
    return ChatMessage(role="system", content=text)


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def assistant(text: str, *calls: ToolCall, reasoning: str = "") -> ChatMessage:
    return ChatMessage(role="assistant", content=text, tool_calls=calls, reasoning=reasoning)


def tool(text: str, call: ToolCall) -> ChatMessage:
    return ChatMessage(role="tool", content=text, tool_call_id=call.id, name=call.name)


WEATHER = ToolCall(name="get_weather", arguments={"city": "Zürich", "n": 2}, id="callabc01")
RUN = ToolCall(
    name="run",
    arguments={"cmd": 'ls -la\necho "hi"', "opts": {"b": 1, "a": [1, 2]}},
    id="callabc02",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Calls {name}.",
            "parameters": {
                "type": "object",
                "properties": {
                    key: {"type": kind, "description": key} for key, kind in properties.items()
                },
                "required": list(properties),
            },
        },
    }
    for name, properties in {
        "get_weather": {"city": "string", "n": "integer"},
        "run": {"cmd": "string", "opts": "object"},
    }.items()
]
HEAD = [system("You are helpful."), user("How is the weather?")]
SCENARIOS: dict[str, list[ChatMessage]] = {
    "text": [
        *HEAD,
        assistant("Hello there, friend"),
        user("bye"),
        assistant("Ciao bello"),
        user("so"),
        assistant("Done"),
    ],
    "tool": [
        *HEAD,
        assistant("", WEATHER),
        tool("sunny", WEATHER),
        assistant("It is sunny."),
        user("and?"),
        assistant("Done"),
    ],
    "text and tool": [
        *HEAD,
        assistant("Let me look.", WEATHER),
        tool("sunny", WEATHER),
        assistant("", RUN),
        tool("a b", RUN),
        assistant("Done"),
    ],
    "parallel": [
        *HEAD,
        assistant("", WEATHER, RUN),
        tool("sunny", WEATHER),
        tool("a\nb", RUN),
        assistant("It is sunny."),
        user("thanks"),
        assistant("Gladly"),
    ],
    "thinking in a tool loop": [
        *HEAD,
        assistant("", WEATHER, reasoning="I need to look"),
        tool("sunny", WEATHER),
        assistant("Sunny.", reasoning="Now I know"),
    ],
    "thinking over user turns": [
        *HEAD,
        assistant("Hello", reasoning="I greet"),
        user("bye"),
        assistant("Ciao", reasoning="I part"),
        user("so"),
        assistant("Done", reasoning="I am done"),
    ],
    "thinking and tools over user turns": [
        *HEAD,
        assistant("", WEATHER, reasoning="I need to look"),
        tool("sunny", WEATHER),
        assistant("Sunny.", reasoning="Now I know"),
        user("thanks"),
        assistant("Gladly", reasoning="I am polite"),
    ],
}


class Model:
    """Samples the reply it is told to, in the form of its template, some tokens cut in two."""

    def __init__(self, renderer: TemplateRenderer, split: Any, is_stop_kept: bool, drift: float):
        self.renderer = renderer
        self.split = split
        self.is_stop_kept = is_stop_kept
        self.random = random.Random(7)
        self.drift = drift

    def sample(self, reply: ChatMessage, tools: Any, next_role: str) -> list[int]:
        text = self.written(reply, tools)
        ids = self.renderer.encode(text).tolist()
        stop = self.stop(ids)
        if stop is None:
            # GLM closes a reply with the mark of whoever speaks next.
            body = text.rstrip("\n")
            stops = self.renderer.encode("<|observation|>" if next_role == "tool" else "<|user|>")
            kept = stops.tolist()[:1] if len(stops) == 1 else []
        else:
            body = self.renderer.decode(np.array(ids[:stop], dtype=np.uint32))
            kept = ids[stop : stop + 1]
        sampled = self.split(self.renderer, body, lambda _: self.random.random() < self.drift)
        return [*sampled, *(kept if self.is_stop_kept else [])]

    def written(self, reply: ChatMessage, tools: Any) -> str:
        """What the template shows of a reply while it is the last message."""
        prompt = self.renderer.render([user("x")], tools, True)
        whole = self.renderer.render([user("x"), reply], tools, False)
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        # The generation prompt opens a thinking block that the history leaves out when empty.
        opening = prompt.removesuffix("<think>\n")
        assert whole.startswith(opening)
        return "\n</think>\n\n" + whole[len(opening) :]

    def stop(self, ids: list[int]) -> int | None:
        """Where the closing mark stands; none where the template does not close replies."""
        for index in range(len(ids) - 1, -1, -1):
            word = self.renderer.decode(np.array(ids[index : index + 1], dtype=np.uint32))
            if word.strip():
                is_mark = ids[index] in self.renderer.special_ids
                return index if is_mark and "tool_call" not in word else None
        return None


def play(chat: Any, model: Model, messages: Sequence[ChatMessage], tools: Any, client: Any) -> None:
    """Play a conversation; `client` is what the agent sends back of a reply."""
    said: list[ChatMessage] = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            said.append(message)
            continue
        next_role = messages[index + 1].role if index + 1 < len(messages) else "user"
        ids = model.sample(message, tools, next_role)
        before = list(chat.session)
        plan = chat.turn(said, ids, message, tools)
        if before:
            check(chat, plan, before[-1], said, tools)
        said.append(client(message))


def check(chat: Any, plan: Any, parent: str, said: Sequence[ChatMessage], tools: Any) -> None:
    sequences, renderer = chat.session.sequences, chat.renderer
    assert plan.continuity in ("extended", "healed")
    assert (plan.parent_turn_id, plan.shared_len) == (parent, sequences.length(parent))
    stored = [*chat.session.history(parent), *said[plan.shared_messages :]]
    shown = renderer.render(stored, tools, True)
    if shown.startswith(renderer.decode(sequences.full(parent))):
        assert renderer.decode(plan.prompt_ids) == shown
    else:
        assert plan.divergence is not None
        assert shown.endswith(renderer.decode(plan.prompt_tail.array))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(("is_stop_kept", "drift"), [(True, 0.0), (True, 0.5), (False, 0.2)])
def test_uninterrupted_conversation_of_each_family_is_one_row(
    family: str, scenario: str, is_stop_kept: bool, drift: float, converse: Any, split: Any
) -> None:
    if family == "llama-3.1" and scenario == "parallel":
        pytest.skip("the template takes one tool call a message")
    renderer = load(family)
    chat = converse(renderer)
    model = Model(renderer, split, is_stop_kept, drift)
    play(chat, model, SCENARIOS[scenario], TOOLS, lambda reply: reply)
    assert len(chat.rows()) == 1


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if "thinking" in name])
def test_client_that_drops_reasoning_keeps_one_row(
    family: str, scenario: str, converse: Any, split: Any
) -> None:
    renderer = load(family)
    chat = converse(renderer)

    def without_reasoning(reply: ChatMessage) -> ChatMessage:
        return assistant(reply.content, *reply.tool_calls)

    play(chat, Model(renderer, split, True, 0.2), SCENARIOS[scenario], TOOLS, without_reasoning)
    assert len(chat.rows()) == 1
    assert set(chat.causes()[1:]) == {"reasoning_dropped"}


def test_gpt_oss_closes_each_kind_of_reply_with_its_own_mark(converse: Any, split: Any) -> None:
    renderer = load("gpt-oss")
    for is_stop_kept, closed in (
        (True, "<|return|><|start|>user"),
        (False, "<|end|><|start|>user"),
    ):
        chat = converse(renderer)
        model = Model(renderer, split, is_stop_kept, 0.0)
        play(chat, model, SCENARIOS["tool"], TOOLS, lambda reply: reply)
        text = renderer.decode(chat.session.sequences.full("t2"))
        assert '"n": 2}<|call|><|start|>functions.get_weather to=assistant' in text
        assert "It is sunny." + closed in text


@pytest.mark.parametrize("family", ["qwen3-coder", "qwen3.5", "glm-4.6", "minimax-m2", "qwen2.5"])
@pytest.mark.parametrize("is_stop_kept", [True, False], ids=["stop kept", "stop trimmed"])
def test_line_break_after_a_call_does_not_close_it_twice(
    family: str, is_stop_kept: bool, converse: Any, split: Any
) -> None:
    renderer = load(family)
    chat = converse(renderer)
    said, reply = SCENARIOS["tool"][:2], SCENARIOS["tool"][2]
    ids = Model(renderer, split, is_stop_kept, 0.0).sample(reply, TOOLS, "tool")
    end = len(ids) - 1 if is_stop_kept else len(ids)
    written = [*ids[:end], *renderer.encode("\n").tolist(), *ids[end:]]
    chat.turn(said, written, reply, TOOLS)
    plan = chat.plan([*said, reply, SCENARIOS["tool"][3]], TOOLS)
    asked = chat.session.sequences.prompt_length("t0")
    clean = converse(renderer)
    clean.turn(said, ids, reply, TOOLS)
    expected = clean.plan([*said, reply, SCENARIOS["tool"][3]], TOOLS).prompt_ids.tolist()
    assert plan.prompt_ids.tolist() == [*expected[:asked], *written, *expected[asked + len(ids) :]]


def conversations(name: str, limit: int, max_messages: int) -> Iterator[tuple[Any, Any]]:
    with (SHARED / "traces" / f"{name}.jsonl").open(encoding="utf-8") as lines:
        for line in [line for _, line in zip(range(limit), lines, strict=False)]:
            trace = json.loads(line)
            yield [parse(m) for m in trace["messages"][:max_messages]], trace["tools"] or None


def parse(message: dict[str, Any]) -> ChatMessage:
    calls = [
        ToolCall(
            name=call["function"]["name"],
            arguments=arguments(call["function"]["arguments"]),
            id=call.get("id") or "",
        )
        for call in message.get("tool_calls") or []
    ]
    return ChatMessage(
        role=message["role"],
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content") or "",
        tool_calls=tuple(calls),
        tool_call_id=message.get("tool_call_id") or "",
    )


def arguments(text: str) -> Any:
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    return parsed if isinstance(parsed, dict) else text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trace", TRACES)
def test_real_conversations_heal_to_one_row(
    family: str, trace: str, converse: Any, split: Any
) -> None:
    renderer, played = load(family), 0
    for messages, tools in conversations(trace, limit=2, max_messages=12):
        chat = converse(renderer)
        try:
            play(chat, Model(renderer, split, True, 0.1), messages, tools, lambda reply: reply)
        except RenderError:
            continue  # the template does not take this conversation at all
        assert len(chat.rows()) <= 1
        played += 1
    if not played:
        pytest.skip(f"the template of {family} takes none of these conversations")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_real_conversations_heal_to_one_row(family: str, converse: Any, split: Any) -> None:
    renderer = load(family)
    for trace in [*TRACES, "toolbench", "openhands"]:
        for messages, tools in conversations(trace, limit=1000, max_messages=30):
            chat = converse(renderer)
            try:
                play(chat, Model(renderer, split, True, 0.1), messages, tools, lambda reply: reply)
            except RenderError:
                continue
            assert len(chat.rows()) <= 1

"""When two messages are one: what carries no meaning must not count, everything else must."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnfold.history.canonical import (
    CosmeticRules,
    extend_chain,
    is_same_message,
    tools_digest,
)
from turnfold.schemas.messages import ChatMessage, ToolCall

RULES = CosmeticRules()
STRICT = CosmeticRules(is_edge_whitespace_cosmetic=False, is_dropped_reasoning_cosmetic=False)


def assistant(content: str = "", reasoning: str = "", **arguments: Any) -> ChatMessage:
    calls = (ToolCall(name="f", arguments=arguments, id="c1"),) if arguments else ()
    return ChatMessage(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)


def chain_of(messages: list[ChatMessage], tools: list[Any] | None) -> list[bytes]:
    return extend_chain(tools_digest(tools), messages, RULES)


def called_with(arguments: Any, call_id: str = "", name: str = "f") -> ChatMessage:
    calls = (ToolCall(name=name, arguments=arguments, id=call_id),)
    return ChatMessage(role="assistant", tool_calls=calls)


@pytest.mark.parametrize(
    ("stored", "incoming"),
    [
        (
            called_with({"a": 1, "b": {"c": 2, "d": 3}}),
            called_with({"b": {"d": 3, "c": 2}, "a": 1}),
        ),
        (called_with({"a": 1}), called_with(' {"a" :1} ')),
        (called_with({"a": 1.0}), called_with({"a": 1})),
        (called_with({"a": 1}, "call_1"), called_with({"a": 1}, "toolu_2")),
        (called_with({}), called_with("")),
        (assistant(" hello \n"), assistant("hello")),
        (assistant("hello", "why"), assistant("hello")),
        (assistant("hello", "why\n"), assistant("hello", "why")),
        (
            ChatMessage(role="tool", content="x", tool_call_id="call_1", name="f"),
            ChatMessage(role="tool", content="x", tool_call_id="toolu_2"),
        ),
    ],
)
def test_what_carries_no_meaning_does_not_count(stored: ChatMessage, incoming: ChatMessage) -> None:
    assert is_same_message(stored, incoming, RULES)
    assert chain_of([stored], None) == chain_of([incoming], None)


@pytest.mark.parametrize(
    ("stored", "incoming"),
    [
        (called_with({"a": [1, 2]}), called_with({"a": [2, 1]})),
        (called_with({"a": 1}), called_with({"a": True})),
        (called_with({"a": 1}), called_with({"a": "1"})),
        (called_with({"a": None}), called_with({})),
        (called_with({"a": 1}), called_with({"a": 1}, name="g")),
        (called_with("ls -la"), called_with("ls  -la")),
        (assistant("hello"), assistant("hello!")),
        (assistant("a  b"), assistant("a b")),
        (ChatMessage(role="user", content="hi "), ChatMessage(role="user", content="hi")),
        (ChatMessage(role="tool", content="x\n"), ChatMessage(role="tool", content="x")),
        (ChatMessage(role="user", content="x"), ChatMessage(role="tool", content="x")),
        (
            ChatMessage(role="user", content="x", name="ann"),
            ChatMessage(role="user", content="x", name="bob"),
        ),
    ],
)
def test_what_carries_meaning_counts(stored: ChatMessage, incoming: ChatMessage) -> None:
    assert not is_same_message(stored, incoming, RULES)
    assert chain_of([stored], None) != chain_of([incoming], None)


def test_edited_reasoning_is_another_message_though_the_digest_leaves_it_out() -> None:
    assert not is_same_message(assistant("hello", "why"), assistant("hello", "how"), RULES)


def test_strict_rules_count_whitespace_and_dropped_reasoning() -> None:
    assert not is_same_message(assistant(" hello"), assistant("hello"), STRICT)
    assert not is_same_message(assistant("hello", "why"), assistant("hello"), STRICT)


def test_chain_depends_on_every_message_and_on_the_tools() -> None:
    first, second = assistant("1"), assistant("2")
    tool = {"type": "function", "function": {"name": "f"}}
    chain = chain_of([first, second], None)
    assert len(chain) == 3
    assert chain_of([first], None) == chain[:2]
    assert chain_of([second, first], None)[2] != chain[2]
    assert not set(chain_of([first, second], [tool])) & set(chain)


def test_tools_are_a_set_of_schemas() -> None:
    read = {"type": "function", "function": {"name": "read", "parameters": {"a": 1, "b": 2}}}
    read_again = {"function": {"parameters": {"b": 2, "a": 1}, "name": "read"}, "type": "function"}
    write = {"type": "function", "function": {"name": "write"}}
    assert tools_digest([read, write]) == tools_digest([write, read_again])
    assert tools_digest([read]) != tools_digest([read, write])
    assert tools_digest([read]) != tools_digest([read, read])
    assert tools_digest(None) == tools_digest([])


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text(max_size=3)
    | st.floats(-9, 9, width=16),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in sorted(value, reverse=True)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(max_size=3), json_values, max_size=4))
def test_any_arguments_survive_a_client_that_writes_them_again(arguments: dict[str, Any]) -> None:
    sent_back = json.dumps(reordered(arguments), indent=1)
    assert is_same_message(called_with(arguments), called_with(sent_back), RULES)

"""One conversation in three protocols is one canonical history, to the byte."""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from turnfold.gateway.calls import Answer, ModelCall
from turnfold.gateway.protocols import anthropic_messages, openai_chat, openai_responses
from turnfold.schemas.messages import ChatMessage, ToolCall

TEXTS = st.text(alphabet='ab \n"\\é{}<>', max_size=12)
ARGUMENTS = st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers(-9, 9), st.none(), st.booleans()))
CALLS = st.lists(st.tuples(st.sampled_from(["look", "open"]), ARGUMENTS), max_size=3)
TURNS = st.lists(st.tuples(TEXTS, TEXTS, TEXTS, CALLS), min_size=1, max_size=4)


def conversation(turns: Sequence[Any]) -> list[ChatMessage]:
    """A question, what the assistant thought, said and called, the results, the next question."""
    messages = []
    for i, (question, reasoning, content, calls) in enumerate(turns):
        made = tuple(
            ToolCall(name=name, arguments=arguments, id=f"call_{i}_{j}")
            for j, (name, arguments) in enumerate(calls)
        )
        messages.append(ChatMessage(role="user", content=question))
        messages.append(
            ChatMessage(role="assistant", content=content, reasoning=reasoning, tool_calls=made)
        )
        messages += [
            ChatMessage(role="tool", content=f"{question}!", tool_call_id=call.id) for call in made
        ]
    return [*messages, ChatMessage(role="user", content="the end")]


def answered(protocol: Any, reply: ChatMessage, call: ModelCall) -> Any:
    """The reply as an agent gets it."""
    answer = Answer(
        turn_id="t",
        created=0,
        model="m",
        reply=reply,
        finish_reason="stop",
        num_prompt_tokens=1,
        num_output_tokens=1,
    )
    return msgspec.json.decode(protocol.answer_body(answer, call))


def read(protocol: Any, **body: Any) -> ModelCall:
    call: ModelCall = protocol.read_call(msgspec.json.encode({"model": "m", **body}))
    return call


def through_chat(messages: list[ChatMessage]) -> tuple[ChatMessage, ...]:
    asked = read(openai_chat, messages=[{"role": "user", "content": "a"}])
    wire: list[Any] = []
    for message in messages:
        if message.role == "assistant":
            wire.append(answered(openai_chat, message, asked)["choices"][0]["message"])
        else:
            wire.append(
                {
                    "role": message.role,
                    "content": message.content,
                    "tool_call_id": message.tool_call_id,
                }
            )
    return read(openai_chat, messages=wire).messages


def through_anthropic(messages: list[ChatMessage]) -> tuple[ChatMessage, ...]:
    settings = {"max_tokens": 9, "thinking": {"type": "enabled", "display": "omitted"}}
    asked = read(anthropic_messages, messages=[{"role": "user", "content": "a"}], **settings)
    wire: list[Any] = []
    for message in messages:
        if message.role == "assistant":
            content = answered(anthropic_messages, message, asked)["content"]
            wire.append({"role": "assistant", "content": content})
            continue
        block = {"type": "text", "text": message.content}
        if message.role == "tool":
            block = {"type": "tool_result", "tool_use_id": message.tool_call_id}
            block |= {"content": message.content}
        wire.append({"role": "user", "content": [block]})
    return read(anthropic_messages, messages=wire, **settings).messages


def through_responses(messages: list[ChatMessage]) -> tuple[ChatMessage, ...]:
    asked = read(openai_responses, input="a", include=["reasoning.encrypted_content"])
    wire: list[Any] = []
    for message in messages:
        if message.role == "assistant":
            wire += answered(openai_responses, message, asked)["output"]
        elif message.role == "tool":
            output = {"call_id": message.tool_call_id, "output": message.content}
            wire.append({"type": "function_call_output", **output})
        else:
            wire.append({"role": "user", "content": message.content})
    for item in wire:
        if item.get("type") == "reasoning":
            del item["content"]
    return read(openai_responses, input=wire).messages


@given(TURNS)
def test_a_history_comes_back_as_it_was_said_in_every_protocol(turns: Any) -> None:
    messages = conversation(turns)
    for through in (through_chat, through_anthropic, through_responses):
        came_back = through(messages)
        assert list(came_back) == messages, through.__name__
        # Equal objects may still differ in the order of their keys.
        assert msgspec.json.encode(list(came_back)) == msgspec.json.encode(messages)

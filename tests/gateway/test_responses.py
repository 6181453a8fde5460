"""The wire format of OpenAI's responses API, both ways, without a server."""

from typing import Any

import msgspec
import pytest

from turnfold.gateway.calls import Answer, TokenLogprob
from turnfold.gateway.constraints import refuse_unenforced
from turnfold.gateway.protocols.openai_responses import (
    answer_body,
    answer_events,
    error_event,
    read_call,
)
from turnfold.gateway.protocols.sealed_reasoning import seal
from turnfold.gateway.refusals import Refusal
from turnfold.gateway.rollouts.state import RecordedTurn, recorded_turn
from turnfold.gateway.turns.steps import continued_call, resolved_call
from turnfold.schemas.events import TurnCompleted
from turnfold.schemas.messages import ChatMessage, ToolCall
from turnfold.schemas.wire import Logprobs, TokenIds

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "f", "parameters": {}, "strict": True}


def read(**body: Any) -> Any:
    return read_call(msgspec.json.encode({"model": "m", "input": "hi", **body}))


def refusal(**body: Any) -> Refusal:
    """Of the request itself, or of what would constrain the output."""
    with pytest.raises(Refusal) as caught:
        refuse_unenforced(read(**body).constraints, "refuse")
    return caught.value


def unenforced(**body: Any) -> list[str]:
    """Fields that are left aside where the gateway may."""
    constraints = read(**body).constraints
    refuse_unenforced(constraints, "ignore")
    return [constraint.field for constraint in constraints]


def called(call_id: str, **arguments: Any) -> dict[str, Any]:
    text = msgspec.json.encode(arguments).decode()
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": text}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "id": "msg_1", "content": content}


def test_a_text_is_a_message_of_the_user() -> None:
    assert read(input="a").messages == (ChatMessage(role="user", content="a"),)


def test_items_become_canonical_messages() -> None:
    call = read(
        instructions="be brief",
        input=[
            {"role": "developer", "content": "really"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "it thought"}],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            said("looking"),
            called("c1", y=1, x="2"),
            called("c2"),
            {"type": "function_call_output", "call_id": "c2", "output": "two"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "one"}],
            },
            {"role": "assistant", "content": "done"},
        ],
    )
    assert call.messages == (
        ChatMessage(role="system", content="be brief"),
        ChatMessage(role="system", content="really"),
        ChatMessage(role="user", content="a"),
        ChatMessage(
            role="assistant",
            content="looking",
            reasoning="hm",
            tool_calls=(
                ToolCall(name="f", arguments={"y": 1, "x": "2"}, id="c1"),
                ToolCall(name="f", arguments={}, id="c2"),
            ),
        ),
        ChatMessage(role="tool", content="two", tool_call_id="c2"),
        ChatMessage(role="tool", content="one", tool_call_id="c1"),
        ChatMessage(role="assistant", content="done"),
    )
    assert list(call.messages[3].tool_calls[0].arguments) == ["y", "x"]
    assert call.has_instructions


def test_an_item_out_of_order_begins_the_next_assistant_message() -> None:
    thought = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    for items, number in (
        ([thought, said("a"), called("c")], 1),
        ([thought, called("c"), called("d")], 1),
        ([said("a"), said("b")], 2),
        ([said("a"), thought, said("b")], 2),
        ([called("c"), said("a")], 2),
        ([thought, thought], 2),
    ):
        messages = read(input=[USER, *items]).messages
        assert [m.role for m in messages] == ["user"] + ["assistant"] * number


def test_sealed_reasoning_needs_no_text() -> None:
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": seal(" hm\n")}
    for item in (sealed, sealed | {"content": None}):
        assert read(input=[USER, item]).messages[1].reasoning == " hm\n"
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB"}
    assert read(input=[USER, foreign, said("a")]).messages[1] == ChatMessage(
        role="assistant", content="a"
    )


def test_arguments_that_are_no_object_stay_text() -> None:
    broken = called("c") | {"arguments": '{"a":'}
    assert read(input=[USER, broken]).messages[1].tool_calls[0].arguments == '{"a":'


def test_tools_are_nested_as_chat_completions_have_them() -> None:
    nested = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert read(tools=[TOOL]).tools == (nested,)
    assert read(tools=[TOOL | {"description": None, "strict": None}]).tools == (nested,)


def test_settings_are_read() -> None:
    call = read(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        seed=3,
        stop="x",
        stream=True,
        tools=[TOOL],
        tool_choice="none",
        previous_response_id="resp_t1",
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
    )
    params = call.params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 7)
    assert (params.seed, params.stop) == (3, ("x",))
    assert call.is_streamed
    assert not call.is_calling_allowed
    assert call.previous_turn_id == "t1"
    assert call.has_logprobs
    assert call.is_reasoning_sealed


def test_fields_that_change_nothing_are_ignored() -> None:
    read(store=False, user="u", metadata={"a": "b"}, prompt_cache_key="k", never_heard_of=[1])
    read(
        reasoning={"effort": "low"},
        truncation="disabled",
        parallel_tool_calls=True,
        background=False,
        text={"format": {"type": "text"}, "verbosity": "low"},
        top_logprobs=0,
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"truncation": "auto"}, "truncation"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"messages": [USER]}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"previous_response_id": "chatcmpl-1"}, "previous_response_id"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [USER, {"role": "user", "content": 7}]}, "input[1].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "input[0]"),
        ({"input": [{"type": "item_reference"}]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "content": "hm"}]}, "input[0].content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    refused = refusal(**body)
    assert refused.status == 400
    assert refused.param == param
    assert param in refused.message


def test_what_would_constrain_the_output_can_be_left_aside() -> None:
    names = unenforced(
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": []},
        parallel_tool_calls=False,
        text={"format": {"type": "json_object"}},
        response_format={"type": "json_object"},
    )
    assert names == ["tool_choice", "parallel_tool_calls", "text.format", "response_format"]
    assert unenforced(tool_choice="auto", parallel_tool_calls=True, text={"verbosity": "low"}) == []
    assert read(tool_choice="required").is_calling_allowed


TURN = "0123456789abcdef0123456789abcdef"


def test_a_reference_holds_the_place_of_the_item_that_it_names() -> None:
    call = read(
        instructions="be brief",
        input=[
            USER,
            {"type": "item_reference", "id": f"rs_{TURN}"},
            {"id": f"fc_{TURN}_1"},
            called("c2", x=1),
            {"type": "function_call_output", "call_id": "c2", "output": "3"},
            {"type": "item_reference", "id": f"msg_{TURN}"},
        ],
    )
    assert [m.role for m in call.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [(r.message, r.kind, r.call_number) for r in call.references] == [
        (2, "reasoning", 0),
        (2, "function_call", 1),
        (4, "message", 0),
    ]
    said_then = ChatMessage(
        role="assistant",
        content="done",
        reasoning="hm",
        tool_calls=tuple(ToolCall(name=n, arguments={}, id=n) for n in ("f0", "f1")),
    )
    resolved = resolved_call(call, {TURN: recorded(said_then)}.get)
    assert resolved.messages[2].reasoning == "hm"
    assert [c.id for c in resolved.messages[2].tool_calls] == ["f1", "c2"]
    assert resolved.messages[4].content == "done"
    assert not resolved.references


@pytest.mark.parametrize("item_id", [f"rs_{TURN}", f"fc_{TURN}_1", f"msg_{TURN[::-1]}"])
def test_a_reference_to_what_was_not_said_is_refused(item_id: str) -> None:
    call = read(input=[USER, {"type": "item_reference", "id": item_id}])
    silent = recorded(ChatMessage(role="assistant", content="x"))
    with pytest.raises(Refusal) as caught:
        resolved_call(call, {TURN: silent}.get)
    assert caught.value.param == "input[1]"
    assert item_id in caught.value.message


def recorded(reply: ChatMessage) -> RecordedTurn:
    """A turn of which nothing but the reply matters."""
    return recorded_turn(
        TurnCompleted(
            rollout_id="r",
            event_id=TURN,
            session_id="s",
            turn_id=TURN,
            prompt_tail=TokenIds.of([1]),
            output_ids=TokenIds.of([2]),
            logprobs=Logprobs.of([-0.5]),
            num_prompt_tokens=1,
            reply=reply,
        )
    )


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"input": ' + b"[" * 100_000])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal):
        read_call(body)


HISTORY = [ChatMessage(role="user", content="u1"), ChatMessage(role="assistant", content="r1")]
OLD, NEW = (ChatMessage(role="system", content=content) for content in ("old", "new"))
NEXT = ChatMessage(role="user", content="hi")


def test_a_call_continues_the_history_that_it_names() -> None:
    call = read(previous_response_id="resp_t1")
    assert list(continued_call(call, HISTORY, False).messages) == [*HISTORY, NEXT]
    kept = continued_call(call, [OLD, *HISTORY], False)
    assert list(kept.messages) == [OLD, *HISTORY, NEXT]


def test_instructions_are_not_inherited() -> None:
    call = read(previous_response_id="resp_t1")
    assert list(continued_call(call, [OLD, *HISTORY], True).messages) == [*HISTORY, NEXT]
    call = read(previous_response_id="resp_t1", instructions="new")
    assert list(continued_call(call, [OLD, *HISTORY], True).messages) == [NEW, *HISTORY, NEXT]


ANSWER = Answer(
    turn_id="t1",
    created=5,
    model="m",
    reply=ChatMessage(
        role="assistant",
        content="looking",
        reasoning="hm",
        tool_calls=(ToolCall(name="f", arguments={"y": 'a"ü', "x": None}, id="c1"),),
    ),
    finish_reason="stop",
    num_prompt_tokens=3,
    num_output_tokens=4,
    num_cached_tokens=2,
    num_reasoning_tokens=1,
)
REASONING = {
    "id": "rs_t1",
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
    "encrypted_content": None,
    "status": "completed",
}
MESSAGE = {
    "id": "msg_t1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "looking", "annotations": [], "logprobs": []}],
}
FUNCTION_CALL = {
    "id": "fc_t1_0",
    "type": "function_call",
    "call_id": "c1",
    "name": "f",
    "arguments": '{"y":"a\\"ü","x":null}',
    "status": "completed",
}


def test_an_answer_has_openais_form() -> None:
    call = read(
        instructions="be brief", tools=[TOOL], previous_response_id="resp_t0", temperature=0.5
    )
    assert msgspec.json.decode(answer_body(ANSWER, call)) == {
        "id": "resp_t1",
        "object": "response",
        "created_at": 5,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": "be brief",
        "max_output_tokens": None,
        "metadata": {},
        "model": "m",
        "output": [REASONING, MESSAGE, FUNCTION_CALL],
        "parallel_tool_calls": True,
        "previous_response_id": "resp_t0",
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}],
        "top_p": None,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 3,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 1},
            "total_tokens": 7,
        },
    }


def test_reasoning_is_sealed_when_asked_for() -> None:
    call = read(include=["reasoning.encrypted_content"])
    (reasoning, *_) = msgspec.json.decode(answer_body(ANSWER, call))["output"]
    assert reasoning["encrypted_content"] == seal("hm")


def decoded(events: Any) -> list[dict[str, Any]]:
    found = []
    for event in events:
        name, data = event.decode().removesuffix("\n\n").split("\n")
        found.append(msgspec.json.decode(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_stream_has_openais_events() -> None:
    events = decoded(answer_events(ANSWER, read()))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["output"] == []
    assert events[0]["response"]["status"] == "in_progress"
    assert [e["item"] for e in events if e["type"] == "response.output_item.done"] == [
        REASONING,
        MESSAGE,
        FUNCTION_CALL,
    ]
    assert events[14]["item"]["arguments"] == ""
    assert events[-1]["response"] == msgspec.json.decode(answer_body(ANSWER, read()))


def test_a_cut_reply_is_incomplete() -> None:
    cut = msgspec.structs.replace(ANSWER, finish_reason="length")
    body = msgspec.json.decode(answer_body(cut, read()))
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert decoded(answer_events(cut, read()))[-1]["type"] == "response.incomplete"


def test_a_reply_that_says_nothing_has_an_empty_message() -> None:
    silent = msgspec.structs.replace(ANSWER, reply=ChatMessage(role="assistant"))
    (message,) = msgspec.json.decode(answer_body(silent, read()))["output"]
    assert message["content"][0]["text"] == ""


def test_logprobs_belong_to_the_text() -> None:
    logprobs = (TokenLogprob(text="ü", logprob=-0.5),)
    answer = msgspec.structs.replace(ANSWER, logprobs=logprobs)
    body = msgspec.json.decode(answer_body(answer, read()))
    assert body["output"][1]["content"][0]["logprobs"] == [
        {"token": "ü", "logprob": -0.5, "bytes": [0xC3, 0xBC], "top_logprobs": []}
    ]


def test_an_error_event_suits_readers_of_events_and_sdks() -> None:
    refused = Refusal("unavailable", "gone", code="engine_error", is_retriable=True)
    assert decoded([error_event(refused, "req_1")]) == [
        {
            "type": "error",
            "sequence_number": 0,
            "code": "engine_error",
            "message": "gone",
            "param": None,
            "error": {
                "message": "gone",
                "type": "server_error",
                "param": None,
                "code": "engine_error",
                "request_id": "req_1",
            },
        }
    ]

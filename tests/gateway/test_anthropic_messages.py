"""Anthropic's wire format, both ways, without a server."""

from typing import Any

import msgspec
import pytest

from turnfold.gateway.calls import Answer
from turnfold.gateway.constraints import refuse_unenforced
from turnfold.gateway.protocols.anthropic_messages import (
    answer_body,
    answer_events,
    error_body,
    error_event,
    read_call,
    read_count,
)
from turnfold.gateway.protocols.sealed_reasoning import seal, unseal
from turnfold.gateway.refusals import ContextLengthExceeded, Refusal
from turnfold.schemas.messages import ChatMessage, ToolCall

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}


def read(**body: Any) -> Any:
    whole = {"model": "m", "max_tokens": 9, "messages": [USER], **body}
    return read_call(msgspec.json.encode(whole))


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


def test_blocks_become_canonical_messages() -> None:
    call = read(
        system=[{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "of another"},
                    {"type": "redacted_thinking", "data": "xyz"},
                    {"type": "text", "text": "looking"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"y": 1, "x": "2"}},
                    {"type": "tool_use", "id": "c2", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c2", "content": "two"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "one"}],
                    },
                    {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
    )
    assert call.messages == (
        ChatMessage(role="system", content="be\nbrief"),
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
        ChatMessage(role="tool", content="1\none", tool_call_id="c1"),
        ChatMessage(role="user", content="go on"),
    )
    assert list(call.messages[2].tool_calls[0].arguments) == ["y", "x"]


def test_how_a_client_groups_blocks_makes_no_difference() -> None:
    whole = read(
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c"},
                    {"type": "text", "text": "b"},
                    {"type": "text", "text": "c"},
                ],
            },
        ]
    )
    split = read(
        messages=[
            USER,
            {"role": "assistant", "content": "a"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
            {"role": "user", "content": "b"},
            {"role": "user", "content": "c"},
        ]
    )
    assert whole.messages == split.messages


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_an_assistant_that_said_nothing_is_one_message(content: Any) -> None:
    messages = read(messages=[USER, {"role": "assistant", "content": content}, USER]).messages
    assert messages[1] == ChatMessage(role="assistant")
    assert len(messages) == 3


@pytest.mark.parametrize(
    ("content", "seen"),
    [("no such file", "Error: no such file"), ("Error: gone", "Error: gone"), (None, "Error")],
)
def test_a_failed_tool_result_says_so(content: str | None, seen: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": content}
    called = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    call = read(
        messages=[
            USER,
            {"role": "assistant", "content": [called]},
            {"role": "user", "content": [result]},
        ]
    )
    assert call.messages[-1] == ChatMessage(role="tool", content=seen, tool_call_id="c")


@pytest.mark.parametrize("shown", ["", "hm", " hm\n"])
@pytest.mark.field_case("litellm#26916")
def test_reasoning_comes_back_to_the_byte_in_its_signature(shown: str) -> None:
    block = {"type": "thinking", "thinking": shown, "signature": seal(" hm\n")}
    call = read(messages=[USER, {"role": "assistant", "content": [block]}, USER])
    assert call.messages[1].reasoning == " hm\n"


def test_edited_reasoning_and_foreign_signatures_count_as_shown() -> None:
    assert unseal(seal("hm"), "something else") == "something else"
    for token in ("tf1.%", "tf1.gICA", "EqQBCkgIARAB", ""):
        assert unseal(token, "shown") == "shown"


def test_tools_get_openais_form_without_what_does_not_reach_the_model() -> None:
    marked = TOOL | {"type": "custom", "cache_control": {"type": "ephemeral"}, "strict": True}
    function = {"name": "f", "description": "d", "parameters": TOOL["input_schema"]}
    for tool in (TOOL, marked):
        assert read(tools=[tool]).tools == ({"type": "function", "function": function},)


def test_settings_are_read() -> None:
    call = read(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stop_sequences=["a", "b"],
        stream=True,
        seed=3,
        tools=[TOOL],
        tool_choice={"type": "none"},
        thinking={"type": "adaptive", "display": "omitted"},
    )
    params = call.params
    assert (params.max_tokens, params.temperature, params.seed) == (7, 0.5, 3)
    assert (params.top_p, params.top_k, params.stop) == (0.9, 5, ("a", "b"))
    assert call.is_streamed
    assert not call.is_calling_allowed
    assert call.is_reasoning_hidden


def test_fields_that_change_nothing_are_ignored() -> None:
    read(
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "enabled", "budget_tokens": 2048},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        mcp_servers=[],
        never_heard_of=[1],
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.type"),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use",
        ),
        ({"thinking": {"type": "telepathy"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema"}}, "output_format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits",
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": "The answer is ("}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "x"}]}
                        ],
                    }
                ]
            },
            "messages[0].content[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "c", "name": "f", "input": "x"}],
                    }
                ]
            },
            "messages[0].content[0].input",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]},
            "messages[0].content[0]",
        ),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    refused = refusal(**body)
    assert refused.status == 400
    assert refused.param == param
    assert param in refused.message


@pytest.mark.parametrize("kind", ["any", "tool"])
def test_what_would_constrain_the_output_can_be_left_aside(kind: str) -> None:
    choice = {"type": kind, "name": "f", "disable_parallel_tool_use": True}
    given = {"output_config": {"format": {"type": "json_schema"}}, "output_format": {"type": "x"}}
    assert unenforced(tool_choice=choice, **given) == [
        "tool_choice.disable_parallel_tool_use",
        "tool_choice.type",
        "output_config.format",
        "output_format",
    ]
    assert read(tool_choice=choice).is_calling_allowed
    assert unenforced(tool_choice={"type": "none"}, output_config={"effort": "low"}) == []
    with pytest.raises(Refusal, match=r"tool_choice\.type"):
        unenforced(tool_choice={"type": "sometimes"})


def test_a_request_without_a_token_limit_is_refused_but_counted() -> None:
    body = msgspec.json.encode({"model": "m", "messages": [USER]})
    with pytest.raises(Refusal, match="max_tokens"):
        read_call(body)
    assert read_count(body).messages == (ChatMessage(role="user", content="hi"),)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"messages": ' + b"[" * 100_000])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal):
        read_call(body)


ANSWER = Answer(
    turn_id="t1",
    created=5,
    model="m",
    reply=ChatMessage(
        role="assistant",
        reasoning="hm",
        tool_calls=(ToolCall(name="f", arguments={"y": 'a"ü', "x": None}, id="c1"),),
    ),
    finish_reason="stop",
    num_prompt_tokens=3,
    num_output_tokens=4,
    num_cached_tokens=2,
    num_reasoning_tokens=1,
)


def replying(**changes: Any) -> Answer:
    reply = ChatMessage(role="assistant", content=changes.pop("content", "a"))
    return msgspec.structs.replace(ANSWER, reply=reply, **changes)


def decoded(events: Any) -> list[tuple[str, Any]]:
    found = []
    for event in events:
        name, data = event.decode().removesuffix("\n\n").split("\n")
        found.append((name.removeprefix("event: "), msgspec.json.decode(data[len("data: ") :])))
    return found


def test_an_answer_has_anthropics_form() -> None:
    body = answer_body(ANSWER, read())
    assert msgspec.json.decode(body) == {
        "id": "msg_t1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": seal("hm")},
            {"type": "tool_use", "id": "c1", "name": "f", "input": {"y": 'a"ü', "x": None}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 4,
        },
    }
    assert b'"input":{"y":"a\\"' in body  # in the model's order


def test_hidden_reasoning_is_only_in_its_signature() -> None:
    call = read(thinking={"type": "enabled", "display": "omitted"})
    (thinking, *_) = msgspec.json.decode(answer_body(ANSWER, call))["content"]
    assert thinking == {"type": "thinking", "thinking": "", "signature": seal("hm")}


@pytest.mark.parametrize(
    ("answer", "reason", "sequence"),
    [
        (ANSWER, "tool_use", None),
        (msgspec.structs.replace(ANSWER, finish_reason="length"), "tool_use", None),
        (replying(finish_reason="length"), "max_tokens", None),
        (replying(stop_reason="END"), "stop_sequence", "END"),
        (replying(stop_reason=151645), "end_turn", None),
        (replying(), "end_turn", None),
    ],
)
def test_the_reason_that_a_reply_ended(answer: Answer, reason: str, sequence: str | None) -> None:
    body = msgspec.json.decode(answer_body(answer, read()))
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)
    name, data = decoded(answer_events(answer, read()))[-2]
    assert name == "message_delta"
    assert data["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


def test_a_reply_that_says_nothing_has_an_empty_text() -> None:
    body = msgspec.json.decode(answer_body(replying(content=""), read()))
    assert body["content"] == [{"type": "text", "text": ""}]


def test_a_stream_has_anthropics_events() -> None:
    events = decoded(answer_events(ANSWER, read()))
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(name == data["type"] for name, data in events)
    message = events[0][1]["message"]
    assert (message["stop_reason"], message["content"]) == (None, [])
    assert message["usage"]["input_tokens"] == 3  # nobody knows yet what was cached
    assert events[2][1]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert events[4][1]["delta"] == {"type": "signature_delta", "signature": seal("hm")}
    assert events[6][1]["content_block"] == {
        "type": "tool_use",
        "id": "c1",
        "name": "f",
        "input": {},
    }
    partial = {"type": "input_json_delta", "partial_json": '{"y":"a\\"ü","x":null}'}
    assert events[7][1] == {"type": "content_block_delta", "index": 1, "delta": partial}
    assert events[9][1]["usage"] == {
        "input_tokens": 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 4,
    }


@pytest.mark.parametrize(
    ("refused", "kind", "message"),
    [
        (Refusal("authentication", "no"), "authentication_error", "no"),
        (Refusal("permission", "no"), "permission_error", "no"),
        (Refusal("not_found", "no"), "not_found_error", "no"),
        (Refusal("conflict", "no"), "conflict_error", "no"),
        (Refusal("too_large", "no"), "request_too_large", "no"),
        (Refusal("unavailable", "no"), "overloaded_error", "no"),
        (Refusal("bad_gateway", "no"), "api_error", "no"),
        (Refusal("internal", "no"), "api_error", "no"),
        (
            ContextLengthExceeded(12, 10),
            "invalid_request_error",
            "prompt is too long: 12 tokens > 10 maximum",
        ),
    ],
)
def test_errors_have_anthropics_form(refused: Refusal, kind: str, message: str) -> None:
    expected = {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": "req_1",
    }
    assert msgspec.json.decode(error_body(refused, "req_1")) == expected
    assert decoded([error_event(refused, "req_1")]) == [("error", expected)]

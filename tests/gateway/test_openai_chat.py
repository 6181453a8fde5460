from typing import Any

import msgspec
import pytest

from turnfold.gateway.calls import Answer, biasing_params, request_digest
from turnfold.gateway.constraints import refuse_unenforced
from turnfold.gateway.protocols.openai_chat import (
    answer_body,
    answer_events,
    error_body,
    read_call,
)
from turnfold.gateway.refusals import ContextLengthExceeded, Refusal
from turnfold.schemas.messages import ChatMessage, ToolCall

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}


def read(**body: Any) -> Any:
    return read_call(msgspec.json.encode({"model": "m", "messages": [USER], **body}))


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


def test_messages_become_canonical() -> None:
    call = read(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"y": 1, "x": 2}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ]
    )
    assert call.messages == (
        ChatMessage(role="system", content="be brief"),
        ChatMessage(role="user", content="a\nb"),
        ChatMessage(
            role="assistant",
            reasoning="hm",
            tool_calls=(ToolCall(name="f", arguments={"y": 1, "x": 2}, id="c1"),),
        ),
        ChatMessage(role="tool", content="ok", tool_call_id="c1"),
    )
    assert list(call.messages[2].tool_calls[0].arguments) == ["y", "x"]


@pytest.mark.field_case("NeMo Gym#1545")
def test_tools_are_kept_as_they_came_and_flat_ones_are_nested() -> None:
    assert read(tools=[TOOL]).tools == (TOOL,)
    flat = {"type": "function", "name": "f", "parameters": {}}
    nested = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert read(tools=[flat]).tools == (nested,)


def test_settings_are_read() -> None:
    call = read(
        temperature=0.5,
        max_tokens=7,
        seed=3,
        stop=["a", "b"],
        top_p=0.9,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    params = call.params
    assert (params.temperature, params.max_tokens, params.seed) == (0.5, 7, 3)
    assert (params.stop, params.top_p) == (("a", "b"), 0.9)
    assert call.is_streamed
    assert call.is_usage_streamed
    assert call.has_logprobs


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert read(max_completion_tokens=50, max_tokens=99).params.max_tokens == 50


def test_fields_that_change_nothing_are_ignored() -> None:
    read(user="u", metadata={"a": "b"}, store=False, service_tier="auto", never_heard_of=[1])
    read(
        n=1, top_logprobs=0, parallel_tool_calls=True, response_format={"type": "text"}, audio=None
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 2}, "n"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "robot"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[0].function_call",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages[0].tool_calls[0]",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
    ],
)
@pytest.mark.field_case("NeMo Gym#1545")
def test_what_is_not_supported_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    refused = refusal(**body)
    assert refused.param is not None
    assert refused.param.startswith(param)
    assert refused.status == 400
    assert not refused.is_retriable
    assert param.rpartition(".")[2].partition("[")[0] in refused.message


@pytest.mark.parametrize("choice", ["sometimes", 7, ["auto"]])
def test_a_tool_choice_that_means_nothing_is_refused_whatever_the_policy(choice: Any) -> None:
    with pytest.raises(Refusal, match="tool_choice"):
        unenforced(tool_choice=choice)


def test_what_would_constrain_the_output_can_be_left_aside() -> None:
    names = unenforced(
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {}},
        guided_regex="a+",
    )
    assert names == ["tool_choice", "parallel_tool_calls", "response_format", "guided_regex"]
    assert unenforced(tool_choice="none", response_format={"type": "text"}) == []
    assert read(tool_choice="required").is_calling_allowed


def test_a_tool_without_a_type_is_a_function() -> None:
    (tool,) = read(tools=[{"function": {"name": "f"}}]).tools
    assert tool == {"type": "function", "function": {"name": "f"}}
    assert refusal(tools=[{"name": "f"}]).param == "tools[0].type"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"messages": [{"role": "user"}], "a": \xff}']
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        read_call(body)
    assert caught.value.status == 400


def test_a_body_nested_without_end_is_refused() -> None:
    with pytest.raises(Refusal):
        read_call(b'{"messages": ' + b"[" * 100_000)


def test_the_same_request_has_the_same_digest_streamed_or_not() -> None:
    assert request_digest(read()) == request_digest(read(stream=True))
    assert request_digest(read()) != request_digest(read(seed=1))


def test_only_settings_that_do_something_bias() -> None:
    assert biasing_params(read(top_p=1.0, top_k=-1, presence_penalty=0).params) == {}
    assert biasing_params(read(top_p=0.9, frequency_penalty=0.1).params) == {
        "top_p": 0.9,
        "frequency_penalty": 0.1,
    }


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


def test_an_answer_has_openais_form() -> None:
    assert msgspec.json.decode(answer_body(ANSWER, read())) == {
        "id": "chatcmpl-t1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "service_tier": None,
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "f", "arguments": '{"y":"a\\"ü","x":null}'},
                        }
                    ],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "completion_tokens_details": {"reasoning_tokens": 1},
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_a_stream_ends_with_its_reason_the_usage_and_done() -> None:
    streamed = read(stream=True, stream_options={"include_usage": True})
    *_, last, usage, done = answer_events(ANSWER, streamed)
    assert b'"finish_reason":"tool_calls"' in last
    assert b'"choices":[],"usage":{"prompt_tokens":3' in usage
    assert done == b"data: [DONE]\n\n"
    assert b"usage" not in b"".join(answer_events(ANSWER, read()))


def test_an_engine_that_says_nothing_of_its_cache_leaves_out_the_cached_tokens() -> None:
    untold = msgspec.structs.replace(ANSWER, num_cached_tokens=None)
    usage = msgspec.json.decode(answer_body(untold, read()))["usage"]
    assert "prompt_tokens_details" not in usage


def test_a_cut_reply_says_length() -> None:
    cut = msgspec.structs.replace(
        ANSWER, reply=ChatMessage(role="assistant", content="a"), finish_reason="length"
    )
    assert b'"finish_reason":"length"' in answer_body(cut, read())


def test_errors_have_openais_form() -> None:
    assert msgspec.json.decode(error_body(ContextLengthExceeded(12, 10), "req_1")) == {
        "error": {
            "message": "This model's maximum context length is 10 tokens. However, your messages "
            "resulted in 12 tokens. Please reduce the length of the messages.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
            "request_id": "req_1",
        }
    }

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnfold.embedded.tiny import task
from turnfold.embedded.tiny.tokenizer import (
    MARKUP_TOKENS,
    SPECIAL_TOKENS,
    build_tokenizer,
    render,
)

TOKENIZER: Any = build_tokenizer()

TOOL_BLOCK = (
    "<|im_start|>system\n# Tools\n<tools>\n" + json.dumps(task.TOOLS[0]) + "\n</tools><|im_end|>\n"
)
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "lookup", "arguments": {"door": "3"}},
}
CALL_TEXT = '<tool_call>\n{"name": "lookup", "arguments": {"door": "3"}}\n</tool_call>'
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "open door 3"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "code 5"},
    {"role": "assistant", "content": "the code is 5"},
]


def text(messages: list[dict[str, Any]], **options: Any) -> str:
    return str(TOKENIZER.apply_chat_template(messages, tokenize=False, **options))


@given(st.text())
def test_any_text_survives_encoding_and_decoding(original: str) -> None:
    ids = TOKENIZER.encode(original, add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == original


@pytest.mark.parametrize("token", [*SPECIAL_TOKENS, *MARKUP_TOKENS])
def test_special_and_markup_tokens_are_one_token_each(token: str) -> None:
    assert len(TOKENIZER.encode(token, add_special_tokens=False)) == 1


def test_skipping_special_tokens_keeps_the_markup_that_a_parser_needs() -> None:
    ids = TOKENIZER.encode(CALL_TEXT + "<|im_end|>", add_special_tokens=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == CALL_TEXT


def test_each_digit_is_a_token_of_its_own_wherever_it_stands() -> None:
    digit = TOKENIZER.convert_tokens_to_ids("3")
    for written in ("open door 3", '"3"', "33", "code 3"):
        ids = TOKENIZER.encode(written, add_special_tokens=False)
        assert ids.count(digit) == written.count("3")


def test_the_end_of_a_turn_is_the_end_of_sequence_token() -> None:
    assert TOKENIZER.eos_token == "<|im_end|>"
    assert TOKENIZER.pad_token == "<|endoftext|>"


def test_a_conversation_with_tools_renders_as_qwen_writes_it() -> None:
    assert text(CONVERSATION, tools=task.TOOLS) == (
        TOOL_BLOCK
        + "<|im_start|>user\nopen door 3<|im_end|>\n"
        + f"<|im_start|>assistant\n{CALL_TEXT}<|im_end|>\n"
        + "<|im_start|>user\n<tool_response>\ncode 5\n</tool_response><|im_end|>\n"
        + "<|im_start|>assistant\nthe code is 5<|im_end|>\n"
    )


def test_a_system_message_comes_before_the_tools() -> None:
    messages = [{"role": "system", "content": "Be brief."}, CONVERSATION[0]]
    with_tools = text(messages, tools=task.TOOLS)
    assert with_tools.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n<tools>")
    assert with_tools.count("Be brief.") == 1
    assert text(messages).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")


def test_without_tools_and_system_message_there_is_no_system_block() -> None:
    rendered = text(CONVERSATION[:1], add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nopen door 3<|im_end|>\n<|im_start|>assistant\n"


def test_text_before_a_call_and_parallel_calls_are_put_on_lines_of_their_own() -> None:
    message = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, CALL]}
    rendered = text([CONVERSATION[0], message])
    assert f"assistant\nLet me see.\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>" in rendered


def test_results_of_parallel_calls_share_one_user_block() -> None:
    results = [{"role": "tool", "content": "code 5"}, {"role": "tool", "content": "code 6"}]
    assert text([*CONVERSATION[:2], *results]).endswith(
        "<|im_start|>user\n<tool_response>\ncode 5\n</tool_response>"
        "\n<tool_response>\ncode 6\n</tool_response><|im_end|>\n"
    )


def test_arguments_may_be_a_mapping_or_json_text() -> None:
    as_text = {**CALL, "function": {"name": "lookup", "arguments": '{"door": "3"}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [as_text]}
    assert text([CONVERSATION[0], message]) == text(CONVERSATION[:2])


def test_reasoning_is_rendered_before_the_answer() -> None:
    message = {"role": "assistant", "content": "5", "reasoning_content": "door 3"}
    rendered = text([CONVERSATION[0], message])
    assert rendered.endswith("assistant\n<think>\ndoor 3\n</think>\n\n5<|im_end|>\n")


@pytest.mark.parametrize("num_messages", [1, 3])
def test_the_prompt_of_a_turn_is_a_prefix_of_the_history_that_follows_it(
    num_messages: int,
) -> None:
    prompt = render(TOKENIZER, CONVERSATION[:num_messages], add_generation_prompt=True)
    answered = render(TOKENIZER, CONVERSATION[: num_messages + 1], add_generation_prompt=False)
    whole = render(TOKENIZER, CONVERSATION, add_generation_prompt=False)
    assert answered[: len(prompt)] == prompt
    assert whole[: len(answered)] == answered


def test_prompts_of_the_toy_task_are_short() -> None:
    assert len(render(TOKENIZER, CONVERSATION, add_generation_prompt=False)) < 128

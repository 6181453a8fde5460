import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnfold.gateway.parsing import qwen
from turnfold.gateway.parsing.arguments import parse_arguments
from turnfold.gateway.parsing.detection import UnknownFormat, reply_format_of
from turnfold.gateway.parsing.replies import ParsedReply, Situation, reply_of


def parse(text: str, *, is_open: bool = False) -> ParsedReply:
    return qwen.parse(text, True, is_open)


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_reasoning_content_and_calls_are_told_apart() -> None:
    reply = parse(
        "<think>\nwhere?\n</think>\n\nLooking.\n"
        + call('{"name": "ls", "arguments": {"b": 1, "a": 2}}')
    )
    assert (reply.reasoning, reply.content) == ("where?", "Looking.")
    assert [c.name for c in reply.tool_calls] == ["ls"]
    assert list(reply.tool_calls[0].arguments) == ["b", "a"]


def test_several_calls_keep_their_order() -> None:
    text = "\n".join(call(f'{{"name": "f{i}", "arguments": {{}}}}') for i in range(3))
    reply = parse(text)
    assert [c.name for c in reply.tool_calls] == ["f0", "f1", "f2"]
    assert reply.content == ""


def test_text_between_and_after_calls_is_kept() -> None:
    one = call('{"name": "f", "arguments": {}}')
    assert parse(f"a\n{one}\nb\n{one}\nc").content == "a\nb\nc"


def test_a_string_argument_may_hold_the_closing_marker() -> None:
    reply = parse(call('{"name": "f", "arguments": {"text": "</tool_call>"}}'))
    assert reply.tool_calls[0].arguments == {"text": "</tool_call>"}


def test_values_keep_the_type_the_model_wrote() -> None:
    reply = parse(
        call('{"name": "f", "arguments": {"s": "{\\"a\\":1}", "n": null, "t": "null", "f": 1.0}}')
    )
    assert reply.tool_calls[0].arguments == {"s": '{"a":1}', "n": None, "t": "null", "f": 1.0}


@pytest.mark.field_case("vllm#22885")
@pytest.mark.parametrize("piece_len", [1, 2, 7, 1000])
def test_the_last_braces_of_nested_arguments_are_kept(piece_len: int) -> None:
    arguments = '{"a": {"b": {"c": "}"}}, "d": {}}'
    text = "On it.\n" + call(f'{{"name": "f", "arguments": {arguments}}}')
    parser = qwen.FORMAT.begin(Situation(is_calling_allowed=True))
    pieces = [text[at : at + piece_len] for at in range(0, len(text), piece_len)]
    found = [part for piece in pieces for part in parser.feed(piece)]
    (made,) = reply_of([*found, *parser.end()]).tool_calls
    assert made.arguments == json.loads(arguments)


def test_a_thinking_block_opened_by_the_prompt_is_reasoning() -> None:
    reply = parse("hm\n</think>\n\nyes", is_open=True)
    assert (reply.reasoning, reply.content) == ("hm", "yes")


def test_a_thinking_block_that_never_closes_is_all_reasoning() -> None:
    assert parse("<think>\nhm, and on", is_open=False).reasoning == "hm, and on"


def test_a_call_inside_unclosed_thinking_is_not_lost() -> None:
    reply = parse("<think>\nI will look" + call('{"name": "ls", "arguments": {}}'))
    assert reply.reasoning == "I will look"
    assert [c.name for c in reply.tool_calls] == ["ls"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('{"name": "f", "arguments": {', "bad_json"),
        ("[1]", "not_an_object"),
        ('{"arguments": {}}', "no_name"),
        ('{"name": "f", "arguments": [1]}', "bad_arguments"),
        ('{"name": "f", "arguments": {"x": NaN}}', "bad_arguments"),
        ('{"name": "f", "arguments": {"x": 123456789012345678901234567890}}', "bad_arguments"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "bad_arguments"),
        ('{"name": "f", "arguments": {}} and more', "bad_json"),
    ],
)
def test_a_malformed_call_stays_text_with_its_reason(body: str, reason: str) -> None:
    good, bad = call('{"name": "ok", "arguments": {}}'), call(body)
    text = f"{good}\n{bad}"
    reply = parse(text)
    assert [c.name for c in reply.tool_calls] == ["ok"]
    assert reply.content == bad
    (malformed,) = reply.malformed
    assert malformed.reason == reason
    assert text[malformed.start : malformed.end] == bad


def test_a_call_cut_by_the_length_limit_stays_text() -> None:
    reply = parse('a\n<tool_call>\n{"name": "f", "argum')
    assert reply.tool_calls == ()
    assert reply.content == 'a\n<tool_call>\n{"name": "f", "argum'


@given(st.text(alphabet=st.sampled_from('<>/thinktoolcall_{}":,a \n'), max_size=200))
def test_any_text_can_be_parsed(text: str) -> None:
    for is_open in (False, True):
        parse(text, is_open=is_open)


@pytest.mark.parametrize(
    "piece",
    ["word ", '<tool_call>{"name": "', "<tool_call>", "</think>", '<tool_call>{"name":"f"}'],
)
def test_parsing_time_grows_with_the_text_and_not_its_square(piece: str) -> None:
    def cpu_s(length: int) -> float:
        text = piece * (length // len(piece))
        started = time.process_time()
        parse(text)
        return time.process_time() - started

    small = max(min(cpu_s(40_000) for _ in range(3)), 1e-3)
    assert cpu_s(400_000) < 40 * small


def test_arguments_that_are_no_object_stay_text() -> None:
    assert parse_arguments("[1]") == "[1]"
    assert parse_arguments('{"a": 1') == '{"a": 1'
    assert parse_arguments("") == {}
    assert parse_arguments('{"b": 1, "a": 2}') == {"b": 1, "a": 2}


def test_the_template_tells_the_format() -> None:
    assert reply_format_of("{{ tools }} <tool_call></tool_call>").name == "qwen"
    assert reply_format_of("{{ messages }}").name == "plain"
    assert reply_format_of("{{ messages }}</think>").name == "reasoning"
    assert not reply_format_of("{{ messages }}</think>").has_tools


def test_an_unknown_template_with_tools_is_refused_unless_a_format_is_named() -> None:
    template = "{{ tools }} [TOOL_CALLS]"
    with pytest.raises(UnknownFormat, match="TURNFOLD_REPLY_FORMAT"):
        reply_format_of(template)
    assert reply_format_of(template, "plain").has_tools is False
    with pytest.raises(UnknownFormat, match="hermes-2"):
        reply_format_of(template, "hermes-2")

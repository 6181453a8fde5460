"""Text that comes in pieces gives what the whole text gives, and the work grows with the text."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from turnfold.gateway.parsing.detection import FORMATS
from turnfold.gateway.parsing.parser import Parser
from turnfold.gateway.parsing.replies import (
    ContentText,
    ParsedReply,
    ReasoningSpan,
    ReasoningText,
    ReplyPart,
    Situation,
    reply_of,
)
from turnfold.schemas.messages import Tool

TOOLS: tuple[Tool, ...] = (
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}},
    },
)

COMMON = ["a", " ", "\n", "<", "[", "{", "}", "]", '"', "\\", ":", ",", "é", "<think>", "</think>"]

FRAGMENTS = {
    "qwen": [
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {"n": 1}}',
        '\n<tool_call>\n{"name": "f"}\n</tool_call>',
        "<|im_end|>",
    ],
    "qwen_coder": [
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=n>\n1\n</parameter>",
        "</parameter>",
        '{"name": "f"}',
        "<|im_end|>",
    ],
    "glm": [
        "<tool_call>f",
        "</tool_call>",
        "<arg_key>n</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<|user|>",
    ],
    "minimax": [
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '<invoke name="f">',
        "</invoke>",
        '<parameter name="n">1',
        "</parameter>",
        "[e~[",
    ],
    "deepseek": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```",
        "<｜tool▁call▁end｜>",
    ],
    "mistral": [
        "[TOOL_CALLS]",
        "f[ARGS]{}",
        "f[CALL_ID]123456789[ARGS]{}",
        '[{"name": "f"}, ',
        '{"name": "f"}]',
        "[THINK]",
        "[/THINK]",
        "</s>",
    ],
    "llama": [
        '{"name": "f", "parameters": {}}',
        ";",
        "<|python_tag|>",
        'f.call(a="b")',
        "<|eom_id|>",
    ],
    "gpt_oss": [
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        "<|start|>assistant",
        " to=functions.f",
        "<|channel|>commentary json<|message|>",
        "{}",
        "<|end|>",
        "<|call|>",
    ],
    "reasoning": ["<tool_call>"],
    "plain": ["<tool_call>"],
}


def texts(name: str) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(COMMON + FRAGMENTS[name]), max_size=24).map("".join)


def begin(name: str, situation: Situation) -> Parser:
    parser = FORMATS[name].begin(situation)
    assert isinstance(parser, Parser) or name == "plain"
    return parser  # type: ignore[return-value]


def in_pieces(name: str, text: str, situation: Situation, cuts: list[int]) -> list[ReplyPart]:
    parser = begin(name, situation)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts: list[ReplyPart] = []
    for start, end in pairwise(bounds):
        parts += parser.feed(text[start:end])
    return [*parts, *parser.end()]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None)
@given(data=st.data(), is_open=st.booleans(), is_allowed=st.booleans())
def test_text_in_pieces_gives_the_same_reply(
    name: str, data: st.DataObject, is_open: bool, is_allowed: bool
) -> None:
    text = data.draw(texts(name))
    situation = Situation(is_calling_allowed=is_allowed, is_reasoning_open=is_open, tools=TOOLS)
    whole = FORMATS[name].parse(text, is_allowed, is_open, TOOLS)
    cuts = data.draw(st.lists(st.integers(1, max(1, len(text))), max_size=8))
    assert reply_of(in_pieces(name, text, situation, cuts)) == whole
    assert reply_of(in_pieces(name, text, situation, list(range(len(text))))) == whole
    for malformed in whole.malformed:
        assert 0 <= malformed.start < malformed.end <= len(text)
    if not is_allowed:
        assert (whole.tool_calls, whole.malformed) == ((), ())


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20, deadline=None)
@given(text=st.text(alphabet='<>[]{}|/":,=_ \nthinkTOOLCALSfunctio｜▁', max_size=200))
@example("<|channel|>")
@example("<think>")
@example("[TOOL_CALLS]")
@example('{"name"')
def test_any_text_can_be_read(name: str, text: str) -> None:
    for is_open in (False, True):
        FORMATS[name].parse(text, True, is_open)


def test_text_is_shown_as_it_comes() -> None:
    parser = begin("qwen", Situation())
    assert parser.feed("<think>\nhm, wh") == [ReasoningText(text="hm, wh")]
    assert parser.feed("y?\n</thi") == [ReasoningText(text="y?")]
    assert parser.feed("nk>\n\nIt ") == [
        ReasoningSpan(start=7, end=17),
        ContentText(text="It "),
    ]
    assert parser.feed("is so.<tool_") == [ContentText(text="is so.")]
    assert parser.feed("box>") == [ContentText(text="<tool_box>")]
    assert parser.end() == []


def test_a_call_is_shown_whole_and_in_its_place() -> None:
    parser = begin("qwen", Situation())
    assert parser.feed('A.<tool_call>{"name": "f", "argu') == [ContentText(text="A.")]
    parts = [*parser.feed('ments": {}}</tool_call>B.'), *parser.end()]
    assert [type(part).__name__ for part in parts] == ["CallMade", "ContentText"]
    assert reply_of(parts).content == "\nB."


CODE = "def f(x):\n    return {'a': [x], \"b\": '<tool>'}\n" * 40
JSON = json.dumps({"text": CODE})

GROWING = [
    ("qwen", f"<think>\n{CODE}\n</think>\n\n{CODE}", ""),
    ("qwen", '<tool_call>{"name": "f", "arguments": {"text": "', CODE.replace("\n", "").replace('"', "")),
    ("qwen", "", "<tool_call>"),
    ("qwen", "<think>", "<tool_call>{}"),
    ("qwen", "", '<tool_call>{"a": "'),
    ("qwen", "", f'<tool_call>{{"name": "f", "arguments": {JSON}}}</tool_call>'),
    ("qwen", "", "\n"),
    ("qwen_coder", "<tool_call><function=f><parameter=x>", "</parameter> x"),
    ("qwen_coder", "", "<function=f><parameter=x>"),
    ("qwen_coder", "", f"<function=f><parameter=x>{CODE}</parameter></function>"),
    ("glm", "", "<tool_call>f<arg_key>a</arg_key><arg_value>"),
    ("glm", "", f"<tool_call>f<arg_key>a</arg_key><arg_value>{CODE}</arg_value></tool_call>"),
    ("minimax", "<minimax:tool_call>", '<invoke name="f"><parameter name="x">'),
    ("minimax", "<minimax:tool_call>", f'<invoke name="f"><parameter name="x">{CODE}</parameter></invoke>'),
    ("deepseek", "<｜tool▁calls▁begin｜>", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "'),
    ("deepseek", "<｜tool▁calls▁begin｜>", f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"),
    ("mistral", "[TOOL_CALLS][", f'{{"name": "f", "arguments": {JSON}}}, '),
    ("mistral", "", "[TOOL_CALLS]f[ARGS]{"),
    ("mistral", "[TOOL_CALLS][", "{], "),
    ("llama", "", f'{{"name": "f", "parameters": {JSON}}}; '),
    ("llama", "<|python_tag|>f.call(", 'a="b", '),
    ("llama", '<|python_tag|>f.call(a="', '", b'),
    ("gpt_oss", "", f"<|start|>assistant<|channel|>commentary to=functions.f<|message|>{JSON}<|call|>"),
    ("gpt_oss", "", '<|start|>assistant to=functions.f<|message|>{"a": "b <|end|>'),
    ("gpt_oss", "", "<|channel|>"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "opening", "piece"), GROWING)
@pytest.mark.parametrize("step", [7, 10**9])
def test_the_work_grows_with_the_text_and_not_its_square(
    name: str, opening: str, piece: str, step: int
) -> None:
    def work(length: int) -> int:
        text = opening + (piece or CODE) * (1 + length // len(piece or CODE))
        parser = begin(name, Situation(tools=TOOLS))
        for start in range(0, len(text), step):
            parser.feed(text[start : start + step])
        parser.end()
        return parser.source.work

    small, large = work(4_000), work(32_000)
    assert large < 12 * small
    assert large < 32_000 * 100


def test_a_reply_of_four_thousand_tokens_is_looked_at_a_few_times() -> None:
    text = f"<think>\n{CODE * 4}\n</think>\n\n<tool_call>\n<function=f>\n<parameter=x>\n{CODE * 4}\n</parameter>\n</function>\n</tool_call>"
    parser = begin("qwen_coder", Situation())
    reply = reply_of([*parser.feed(text), *parser.end()])
    assert len(reply.tool_calls) == 1
    assert parser.source.work < 5 * len(text)


def test_no_text_is_an_empty_reply() -> None:
    for reply_format in FORMATS.values():
        assert reply_format.parse("", True, False) == ParsedReply()
        assert reply_format.parse("", True, True) == ParsedReply()

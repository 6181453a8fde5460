"""What each family writes, and what a client sees of it."""

from typing import Any

import pytest

from turnfold.gateway.parsing.detection import FORMATS
from turnfold.gateway.parsing.replies import ParsedReply
from turnfold.schemas.messages import Tool


def tool(name: str, **properties: Any) -> Tool:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (
    tool(
        "write",
        path={"type": "string"},
        text={"type": "string"},
        count={"type": "integer"},
        scale={"type": "number"},
        force={"type": "boolean"},
        options={"type": "object"},
        items={"type": "array"},
        limit={"anyOf": [{"type": "integer"}, {"type": "null"}]},
        anything={},
    ),
    tool("ls"),
)


def parse(name: str, text: str, *, is_allowed: bool = True, is_open: bool = False) -> ParsedReply:
    return FORMATS[name].parse(text, is_allowed, is_open, TOOLS)


def made(reply: ParsedReply) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in reply.tool_calls]


def coder(arguments: str) -> str:
    return f"<tool_call>\n<function=write>\n{arguments}</function>\n</tool_call>"


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


def glm(*pairs: tuple[str, str]) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in pairs
    )
    return f"<tool_call>write\n{values}</tool_call>"


def minimax(*invocations: str) -> str:
    return "\n<minimax:tool_call>\n" + "".join(invocations) + "</minimax:tool_call>"


def invoke(name: str, *pairs: tuple[str, str]) -> str:
    values = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in pairs)
    return f'<invoke name="{name}">\n{values}</invoke>\n'


def deepseek(*calls: tuple[str, str]) -> str:
    each = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


WRITE = ("write", {"text": "x", "path": "a"})
JSON = '{"text": "x", "path": "a"}'


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content"),
    [
        ("qwen", f'<think>\nhm\n</think>\n\nOn it.\n<tool_call>\n{{"name": "write", "arguments": {JSON}}}\n</tool_call>', "hm", "On it."),
        ("qwen_coder", "<think>\nhm\n</think>\n\nOn it.\n\n" + coder(parameter("text", "x") + parameter("path", "a")), "hm", "On it."),
        ("glm", "\n<think>hm</think>\nOn it.\n" + glm(("text", "x"), ("path", "a")), "hm", "On it."),
        ("minimax", "<think>\nhm\n</think>\n\nOn it." + minimax(invoke("write", ("text", "x"), ("path", "a"))), "hm", "On it."),
        ("deepseek", "<think>hm</think>On it." + deepseek(("write", JSON)), "hm", "On it."),
        ("deepseek", f"On it.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", "On it."),
        ("mistral", f'On it.[TOOL_CALLS][{{"name": "write", "arguments": {JSON}, "id": "a1b2c3d4e"}}]', "", "On it."),
        ("mistral", f"On it.[TOOL_CALLS]write[CALL_ID]a1b2c3d4e[ARGS]{JSON}", "", "On it."),
        ("mistral", f"[THINK]hm[/THINK]On it.[TOOL_CALLS]write[ARGS]{JSON}", "hm", "On it."),
        ("mistral", f"[TOOL_CALLS]write{JSON}", "", ""),
        ("llama", f'{{"name": "write", "parameters": {JSON}}}', "", ""),
        ("llama", f'On it.<|python_tag|>{{"name": "write", "parameters": {JSON}}}<|eom_id|>', "", "On it."),
        ("llama", '<|python_tag|>write.call(text="x", path="a")', "", ""),
        ("llama", f'{{"type": "function", "function": {{"name": "write", "parameters": {JSON}}}}}', "", ""),
        ("gpt_oss", f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>On it.<|end|><|start|>assistant to=functions.write<|channel|>commentary json<|message|>{JSON}<|call|>", "hm", "On it."),
        ("gpt_oss", f"<|channel|>commentary to=functions.write <|constrain|>json<|message|>{JSON}", "", ""),
        ("gpt_oss", f" to=functions.write<|channel|>commentary json<|message|>{JSON}<|call|>", "", ""),
    ],
)  # fmt: skip
def test_reasoning_content_and_a_call_are_told_apart(
    name: str, text: str, reasoning: str, content: str
) -> None:
    reply = parse(name, text)
    assert (reply.reasoning, reply.content) == (reasoning, content)
    assert made(reply) == [WRITE]
    assert list(reply.tool_calls[0].arguments) == ["text", "path"]
    assert reply.malformed == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen", '<tool_call>\n{"name": "ls"}\n</tool_call>\n<tool_call>\n{"name": "ls"}\n</tool_call>'),
        ("qwen_coder", "<tool_call>\n<function=ls>\n</function>\n</tool_call>\n<tool_call>\n<function=ls>\n</function>\n</tool_call>"),
        ("qwen_coder", "<function=ls>\n</function>\n</tool_call>\n<function=ls></function>"),
        ("glm", "<tool_call>ls\n</tool_call>\n<tool_call>ls</tool_call>"),
        ("minimax", minimax(invoke("ls"), invoke("ls"))),
        ("deepseek", deepseek(("ls", "{}"), ("ls", "{}"))),
        ("mistral", '[TOOL_CALLS][{"name": "ls", "arguments": {}}, {"name": "ls", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]ls[ARGS]{}[TOOL_CALLS]ls[ARGS]{}"),
        ("llama", '{"name": "ls", "parameters": {}}; {"name": "ls", "parameters": {}}'),
        ("gpt_oss", "<|channel|>commentary to=functions.ls<|message|>{}<|call|><|start|>assistant to=functions.ls<|channel|>commentary<|message|>{}"),
    ],
)  # fmt: skip
def test_several_calls_are_read_and_leave_no_text(name: str, text: str) -> None:
    reply = parse(name, text)
    assert made(reply) == [("ls", {}), ("ls", {})]
    assert (reply.content, reply.malformed) == ("", ())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen_coder", coder("".join(parameter(*pair) for pair in (("text", '{"a": 1}'), ("path", "null"))))),
        ("glm", glm(("text", '{"a": 1}'), ("path", "null"))),
        ("minimax", minimax(invoke("write", ("text", '{"a": 1}'), ("path", "null")))),
    ],
)  # fmt: skip
def test_a_string_parameter_stays_as_it_was_written(name: str, text: str) -> None:
    assert made(parse(name, text)) == [("write", {"text": '{"a": 1}', "path": "null"})]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "1e5", "1e5"),
        ("text", '"quoted"', '"quoted"'),
        ("text", "  indented\n", "  indented\n"),
        ("text", "", ""),
        ("count", "3", 3),
        ("count", "three", "three"),
        ("count", "123456789012345678901234567890", "123456789012345678901234567890"),
        ("scale", "1e5", 100000.0),
        ("scale", "NaN", "NaN"),
        ("force", "true", True),
        ("force", "False", False),
        ("options", '{"z": 1, "a": {"b": null}}', {"z": 1, "a": {"b": None}}),
        ("options", "[1]", "[1]"),
        ("options", "{'a': 1}", "{'a': 1}"),
        ("items", '[1, "b"]', [1, "b"]),
        ("limit", "null", None),
        ("limit", "7", 7),
        ("anything", "7", "7"),
        ("undeclared", "7", "7"),
    ],
)
def test_a_value_has_the_declared_type(key: str, text: str, value: Any) -> None:
    for reply in (
        parse("qwen_coder", coder(parameter(key, text))),
        parse("glm", glm((key, text))),
        parse("minimax", minimax(invoke("write", (key, text)))),
    ):
        assert made(reply) == [("write", {key: value})]
        assert type(reply.tool_calls[0].arguments[key]) is type(value)  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "text", "closing"),
    [
        ("qwen", '<tool_call>{"name": "write", "arguments": {"text": "</tool_call>"}}</tool_call>', "</tool_call>"),
        ("qwen_coder", coder(parameter("text", "a</parameter>b</tool_call>")), "a</parameter>b</tool_call>"),
        ("glm", glm(("text", "</arg_value></tool_call")), "</arg_value></tool_call"),
        ("minimax", minimax(invoke("write", ("text", "</parameter></minimax:tool_call>"))), "</parameter></minimax:tool_call>"),
        ("deepseek", deepseek(("write", '{"text": "<｜tool▁call▁end｜>"}')), "<｜tool▁call▁end｜>"),
        ("mistral", '[TOOL_CALLS]write[ARGS]{"text": "[TOOL_CALLS]"}', "[TOOL_CALLS]"),
        ("llama", '{"name": "write", "parameters": {"text": "<|eot_id|>"}}', "<|eot_id|>"),
        ("gpt_oss", '<|channel|>commentary to=functions.write<|message|>{"text": "<|call|>"}', "<|call|>"),
    ],
)  # fmt: skip
def test_an_argument_may_hold_the_markers_of_its_family(name: str, text: str, closing: str) -> None:
    assert made(parse(name, text)) == [("write", {"text": closing})]


@pytest.mark.parametrize(
    ("name", "good", "bad", "reason", "left"),
    [
        ("qwen", '<tool_call>\n{"name": "ls"}\n</tool_call>', '<tool_call>\n{"name": "ls", \n</tool_call>', "bad_json", None),
        ("qwen", '<tool_call>\n{"name": "ls"}\n</tool_call>', '<tool_call>\n{"name": "ls", "arguments": [1]}\n</tool_call>', "bad_arguments", None),
        ("qwen_coder", "<tool_call>\n<function=ls>\n</function>\n</tool_call>", "<tool_call>\n<function=ls>\nwhat?\n</function>\n</tool_call>", "bad_markup", None),
        ("glm", "<tool_call>ls\n</tool_call>", "<tool_call>ls\n<arg_key>a</arg_key>b\n</tool_call>", "bad_markup", None),
        ("glm", "<tool_call>ls\n</tool_call>", "<tool_call>\n</tool_call>", "no_name", None),
        ("minimax", minimax(invoke("ls")), minimax('<invoke name="ls">what?</invoke>\n').strip(), "bad_markup", '<invoke name="ls">what?</invoke>'),
        ("minimax", minimax(invoke("ls")), "<minimax:tool_call>what?</minimax:tool_call>", "bad_markup", None),
        ("deepseek", deepseek(("ls", "{}")), deepseek(("ls", "{]")), "bad_json", "ls{]"),
        ("mistral", "[TOOL_CALLS]ls[ARGS]{}", "[TOOL_CALLS]ls[ARGS]{]", "bad_json", "ls{]"),
        ("mistral", '[TOOL_CALLS][{"name": "ls"}]', '[TOOL_CALLS][{"name": 1}]', "no_name", '{"name": 1}'),
        ("llama", '<|python_tag|>{"name": "ls"}', "<|python_tag|>print(1)", "bad_markup", "print(1)"),
        ("gpt_oss", "<|start|>assistant<|channel|>commentary to=functions.ls<|message|>{}<|call|>", "<|start|>assistant<|channel|>commentary to=functions.ls<|message|>{]<|call|>", "bad_json", "{]"),
    ],
)  # fmt: skip
@pytest.mark.field_case("renderers#22")
def test_a_malformed_call_degrades_alone(
    name: str, good: str, bad: str, reason: str, left: str | None
) -> None:
    for text in (good + bad, good + bad + good):
        reply = parse(name, text)
        assert {call.name for call in reply.tool_calls} == {"ls"}
        assert len(reply.tool_calls) == text.count(good)
        assert reply.content == (bad if left is None else left)
        (malformed,) = reply.malformed
        assert malformed.reason == reason
        span = text[malformed.start : malformed.end]
        assert span in bad
        assert reply.content[-2:] in span


def test_one_bad_call_in_a_list_leaves_those_around_it() -> None:
    text = '[TOOL_CALLS][{"name": "ls"}, {"name": "a", "arguments": [}}, {"name": "ls"}]'
    reply = parse("mistral", text)
    assert made(reply) == [("ls", {}), ("ls", {})]
    assert [text[bad.start : bad.end] for bad in reply.malformed] == [
        '{"name": "a", "arguments": [}}'
    ]


UNCLOSED = [
    ("qwen", 'On it.\n<tool_call>\n{"name": "write", "arguments": {"text": "a'),
    ("qwen_coder", "On it.\n<tool_call>\n<function=write>\n<parameter=text>\na\n</para"),
    ("qwen_coder", "On it.\n<tool_call>\n<function=write>\n<parameter=text>\na\n</parameter>\n"),
    ("glm", "On it.\n<tool_call>write\n<arg_key>text</arg_key>\n<arg_v"),
    ("minimax", 'On it.\n<minimax:tool_call>\n<invoke name="write">\n<parameter name="text">a'),
    ("deepseek", 'On it.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>{"text'),
    ("mistral", 'On it.[TOOL_CALLS]write[ARGS]{"text": "a'),
    ("llama", 'On it.<|python_tag|>{"name": "write", "parameters": {"te'),
    ("gpt_oss", '<|channel|>final<|message|>On it.<|end|><|start|>assistant<|channel|>commentary to=functions.write<|message|>{"text": "a'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), UNCLOSED)
def test_a_call_cut_by_the_length_limit_is_reported_and_stays_text(name: str, text: str) -> None:
    reply = parse(name, text)
    assert reply.tool_calls == ()
    assert [malformed.reason for malformed in reply.malformed] == ["unclosed"]
    assert reply.malformed[0].end == len(text)
    assert reply.content.startswith("On it.")


@pytest.mark.parametrize(
    ("name", "thought", "call"),
    [
        ("qwen", "<think>\nhm\n", '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'),
        ("qwen_coder", "<think>\nhm\n", "<tool_call>\n<function=ls>\n</function>\n</tool_call>"),
        ("glm", "<think>hm\n", "<tool_call>ls\n</tool_call>"),
        ("minimax", "<think>\nhm\n", minimax(invoke("ls"))),
        ("deepseek", "<think>hm", deepseek(("ls", "{}"))),
        ("mistral", "[THINK]hm", "[TOOL_CALLS]ls[ARGS]{}"),
    ],
)
@pytest.mark.field_case("vllm#39056")
class TestACallInsideTheThinking:
    """The three ways a reply goes on after it."""

    def test_it_is_made_when_the_thinking_never_ends(
        self, name: str, thought: str, call: str
    ) -> None:
        reply = parse(name, thought + call)
        assert made(reply) == [("ls", {})]
        assert (reply.reasoning, reply.content, reply.malformed) == ("hm", "", ())

    def test_it_is_made_when_nothing_follows_the_thinking(
        self, name: str, thought: str, call: str
    ) -> None:
        closing = "[/THINK]" if name == "mistral" else "</think>"
        reply = parse(name, f"{thought}{call}{closing}\n\n")
        assert made(reply) == [("ls", {})]

    def test_it_is_reported_when_the_model_went_on_without_it(
        self, name: str, thought: str, call: str
    ) -> None:
        closing = "[/THINK]" if name == "mistral" else "</think>"
        text = f"{thought}{call}{closing}No."
        reply = parse(name, text)
        assert (reply.reasoning, reply.content, reply.tool_calls) == ("hm", "No.", ())
        (malformed,) = reply.malformed
        assert malformed.reason == "inside_reasoning"
        assert text[malformed.start : malformed.end] in call


def test_a_thought_that_mentions_a_marker_is_only_a_thought() -> None:
    reply = parse("qwen", "<think>\nI use <tool_call> tags.\n</think>\n\nYes.")
    assert (reply.reasoning, reply.content) == ("I use <tool_call> tags.", "Yes.")
    assert reply.malformed == ()


def test_a_rehearsed_call_does_not_swallow_the_end_of_the_thinking() -> None:
    rehearsed = "<tool_call>\n<function=write>\n<parameter=text>\n"
    call = coder(parameter("text", "x"))
    reply = parse("qwen_coder", f"<think>\n{rehearsed}…\n</think>\n\n{call}")
    assert made(reply) == [("write", {"text": "x"})]
    assert reply.reasoning == f"{rehearsed}…"


@pytest.mark.parametrize(
    ("name", "prompt_end"),
    [
        ("qwen", "<|im_start|>assistant\n<think>\n"),
        ("qwen_coder", "<|im_start|>assistant\n<think>\n"),
        ("glm", "<|assistant|><think>"),
        ("minimax", "]~b]ai\n<think>\n"),
        ("deepseek", "<｜Assistant｜><think>"),
        ("reasoning", "<think>\n"),
    ],
)
def test_thinking_opened_by_the_prompt_is_reasoning(name: str, prompt_end: str) -> None:
    reply_format = FORMATS[name]
    assert reply_format.is_reasoning_open(prompt_end)
    assert not reply_format.is_reasoning_open(prompt_end.replace("<think>", "<think></think>"))
    reply = parse(name, "hm\n</think>\n\nYes.", is_open=True)
    assert (reply.reasoning, reply.content.strip()) == ("hm", "Yes.")
    cut = parse(name, "hm, and on", is_open=True)
    assert (cut.reasoning, cut.content) == ("hm, and on", "")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen", "a<|im_end|>\n<|im_start|>b"),
        ("qwen_coder", "a<|endoftext|>b"),
        ("glm", "a<|user|>b<|observation|>"),
        ("minimax", "a[e~[b]~b]"),
        ("deepseek", "a<｜end▁of▁sentence｜>b<｜tool▁sep｜>"),
        ("mistral", "a</s>b[ARGS][TOOL_RESULTS]"),
        ("llama", "a<|eot_id|><|start_header_id|>b<|end_header_id|>"),
        ("gpt_oss", "a<|constrain|>b<|return|>"),
        ("gpt_oss", "<|channel|>final<|message|>a<|message|>b<|endoftext|>"),
    ],
)
def test_control_tokens_never_reach_the_client(name: str, text: str) -> None:
    reply = parse(name, text)
    assert reply.content.replace("\n", "") == "ab"


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "plain"])
def test_calls_are_text_when_they_are_not_allowed(name: str) -> None:
    text = '<|channel|>commentary to=functions.ls<|message|>{"name": "ls", "parameters": {}}'
    for reply in (
        parse(name, f"On it.{text}", is_allowed=False),
        parse(name, '<tool_call>{"name": "ls"}</tool_call>', is_allowed=False),
        parse(name, '{"name": "ls", "parameters": {}}', is_allowed=False),
    ):
        assert reply.tool_calls == ()
        assert reply.malformed == ()
        assert '{"name": "ls"' in reply.content


@pytest.mark.parametrize(
    "text",
    [
        '{"answer": 42}',
        '{"name": "Ada", "born": 1815}',
        "{x} is a set",
        '["name"]',
        '{"city": "Paris", "name": "ls", "parameters": {}}',
    ],
)
def test_llamas_answer_in_json_is_an_answer(text: str) -> None:
    assert parse("llama", text) == ParsedReply(content=text)


def test_llamas_json_that_names_no_offered_tool_is_reported_text() -> None:
    text = '{"name": "rm", "parameters": {}}'
    reply = parse("llama", text)
    assert (reply.content, made(reply)) == (text, [])
    assert [malformed.reason for malformed in reply.malformed] == ["unknown_tool"]


def test_llamas_builtin_arguments_may_hold_quotes() -> None:
    reply = parse("llama", '<|python_tag|>search.call(query="say "hi", twice", n="2")')
    assert made(reply) == [("search", {"query": 'say "hi", twice', "n": "2"})]


def test_gpt_oss_messages_of_one_channel_are_joined_by_a_line_break() -> None:
    text = (
        "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>analysis<|message|>two"
        "<|end|><|start|>assistant<|channel|>commentary<|message|>a<|end|>"
        "<|start|>assistant<|channel|>final<|message|>b"
    )
    reply = parse("gpt_oss", text)
    assert (reply.reasoning, reply.content) == ("one\ntwo", "a\nb")


def test_gpt_oss_call_in_the_analysis_channel_is_a_call() -> None:
    reply = parse("gpt_oss", "<|channel|>analysis to=functions.ls<|message|>{}<|call|>")
    assert made(reply) == [("ls", {})]


def test_gpt_oss_message_without_its_end_is_ended_by_the_next() -> None:
    text = "<|channel|>analysis<|message|>hm<|channel|>final<|message|>Yes."
    reply = parse("gpt_oss", text)
    assert (reply.reasoning, reply.content) == ("hm", "Yes.")


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<|channel|>final\nHello.<|end|>", "final\nHello."),
        ("<|start|>Hello.\nYou.", "Hello.\nYou."),
        ("<|channel|>final<|message|>Hello.<|end|>You.", "Hello.\nYou."),
        ("<|channel|>fin", ""),
    ],
)
def test_gpt_oss_text_without_a_whole_header_is_not_lost(text: str, content: str) -> None:
    assert parse("gpt_oss", text).content == content


def test_qwen_coder_reads_a_call_in_json_too() -> None:
    reply = parse("qwen_coder", '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>')
    assert made(reply) == [("ls", {})]


def test_too_many_malformed_calls_end_the_search_for_calls() -> None:
    text = "<tool_call>x" * 40 + '<tool_call>{"name": "ls"}</tool_call>'
    reply = parse("qwen", text)
    reasons = [malformed.reason for malformed in reply.malformed]
    assert reasons == ["bad_json"] * 32 + ["too_many"]
    assert (reply.content, reply.tool_calls) == (text, ())


def test_a_type_behind_a_reference_counts() -> None:
    parameters: dict[str, Any] = {
        "$defs": {"Size": {"type": "integer"}, "Loop": {"$ref": "#/$defs/Loop"}},
        "properties": {
            "size": {"$ref": "#/$defs/Size"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
            "level": {"enum": [1, 2]},
            "loop": {"$ref": "#/$defs/Loop"},
            "lost": {"$ref": "#/nowhere"},
        },
    }
    tools: tuple[Tool, ...] = (
        {"type": "function", "function": {"name": "write", "parameters": parameters}},
    )
    text = glm(*[(key, "1") for key in parameters["properties"]])
    (call,) = FORMATS["glm"].parse(text, True, False, tools).tool_calls
    assert call.arguments == {"size": 1, "maybe": 1, "level": 1, "loop": "1", "lost": "1"}

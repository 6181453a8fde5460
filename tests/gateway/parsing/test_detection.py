"""Which family a template is taken for."""

from pathlib import Path

import pytest

from turnfold.gateway.parsing.detection import FORMATS, UnknownFormat, reply_format_of

REAL = Path(__file__).parents[3].parent / "shared" / "templates"

needs_real_templates = pytest.mark.skipif(
    not REAL.is_dir(), reason="no real templates beside the checkout"
)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_can_be_named_whatever_the_template_is(name: str) -> None:
    assert reply_format_of("{{ tools }} in an unknown form", name).name == name


def test_a_name_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(UnknownFormat, match=r"'kimi' is not known: expected one of qwen, .*plain"):
        reply_format_of("{{ messages }}", "kimi")


def test_an_unknown_template_with_tools_is_refused_with_what_to_set() -> None:
    with pytest.raises(UnknownFormat, match="TURNFOLD_REPLY_FORMAT to one of qwen, "):
        reply_format_of("{{ tools }}<|tool_calls_section_begin|>")


def test_a_template_that_never_shows_tools_has_none() -> None:
    calls = "{{ message.tool_calls }}<｜tool▁calls▁begin｜><｜tool▁sep｜>"
    assert not reply_format_of(calls).has_tools
    assert reply_format_of(calls + "{{ tools }}").has_tools
    assert reply_format_of(calls, "deepseek").has_tools


@pytest.mark.parametrize(
    "inside",
    ["<function=f><parameter=", "<arg_key><arg_value>", '<invoke name="', "<tool_calls>"],
)
def test_other_calls_in_qwens_tags_are_not_qwens(inside: str) -> None:
    try:
        name = reply_format_of("{{ tools }}<tool_call>" + inside + "</tool_call>").name
    except UnknownFormat:
        return
    assert name in ("qwen_coder", "glm")


@needs_real_templates
@pytest.mark.parametrize(
    "file",
    [
        "llamacpp/MiniMax-M1.jinja",
        "llamacpp/MiniMax-M3.jinja",
        "llamacpp/unsloth-Apriel-1.5.jinja",
        "llamacpp/Kimi-K2-Instruct.jinja",
        "llamacpp/deepseek-ai-DeepSeek-V3.2.jinja",
        "llamacpp/tencent-Hy3.jinja",
        "llamacpp/muse-glimmer.jinja",
        "trl/gemma4.jinja",
        "trl/lfm2_2_5.jinja",
    ],
)
def test_real_templates_of_other_families_are_refused(file: str) -> None:
    with pytest.raises(UnknownFormat):
        reply_format_of((REAL / file).read_text(encoding="utf-8"))


@needs_real_templates
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("llamacpp/deepseek-ai-DeepSeek-V3.1.jinja", "deepseek"),
        ("trl/deepseekv3.jinja", "deepseek"),
        ("trl/llama3.jinja", "plain"),
        ("trl/gemma3.jinja", "plain"),
        ("llamacpp/microsoft-Phi-3.5-mini-instruct.jinja", "plain"),
    ],
)
def test_real_templates_without_tools_have_none(file: str, name: str) -> None:
    reply_format = reply_format_of((REAL / file).read_text(encoding="utf-8"))
    assert (reply_format.name, reply_format.has_tools) == (name, False)

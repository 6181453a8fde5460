"""A render that remembers is the render: same text, or the same refusal, whatever came before."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import nodes

from turnfold.history.errors import RenderError
from turnfold.history.loop_inputs import UnreadableLoop, loop_inputs
from turnfold.history.render import TemplateRenderer
from turnfold.history.render_memo import RenderMemo
from turnfold.history.template_sandbox import template_sandbox
from turnfold.schemas.messages import ChatMessage, Tool, ToolCall

TOKENIZER = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}, unk_token="x"))
TOOL: Tool = {"type": "function", "function": {"name": "read", "parameters": {}}}

PLAIN = """
{%- for message in messages -%}
<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls %}[{{ call.function.name }} {{ call.function.arguments|tojson }}]
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif %}"""

LAST_QUESTION = """
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for message in messages -%}
  <{{ message.role }}>
  {%- if message.role == 'assistant' and loop.index0 > ns.last %}({{ message.reasoning_content }})
  {%- endif -%}
  {{ message.content }}
{%- endfor -%}"""

NEIGHBOURS = """
{%- for message in messages -%}
  {%- if message.role != 'tool' or loop.first or messages[loop.index0 - 1].role != 'tool' -%}
  <{{ message.role }}>
  {%- endif -%}
  {{ message.content }}
  {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<end>{% endif -%}
  {%- if loop.nextitem is defined %}~{{ loop.nextitem.role }}{% endif -%}
{%- endfor -%}"""

STATE = """
{%- macro shown(text) -%}{% set ns.num_shown = ns.num_shown + 1 %}{{ text }}{%- endmacro -%}
{%- set ns = namespace(is_tool=false, num_shown=0, before='') -%}
{%- for message in messages -%}
  {%- set content = message.content|trim -%}
  {%- if message.role == 'tool' and not ns.is_tool %}<results>{% set ns.is_tool = true %}{% endif -%}
  {%- if message.role != 'tool' and ns.is_tool %}</results>{% set ns.is_tool = false %}{% endif -%}
  {{ shown(content) }}#{{ ns.num_shown }}|{{ ns.before }}
  {%- set ns.before = message.role -%}
{%- endfor -%}
{{ ns.num_shown }}{{ ns.is_tool }}"""

COUNTED = """
{%- for message in messages -%}
  {{ loop.index }}/{{ messages|length }}{{ loop.length }} {{ message.content }}
  {%- if message.content == 'bad' %}{{ raise_exception('no') }}{% endif -%}
{%- endfor -%}"""

RENAMED = """
{%- set content = 'outer' -%}
{%- set tail = messages[1:] -%}
{%- for item in tail -%}
  {{ content }}{% set content = item.content %}{{ content }}
  {%- for call in item.tool_calls %}{{ loop.index }}{{ call.function.name }}{% endfor -%}
{%- endfor -%}{{ content }}"""

WITH_TOOLS = """
{%- for tool in tools or [] %}{{ tool|tojson }}{% endfor -%}
{%- for message in messages -%}
  {%- if tools is not none and loop.first %}tools!{% endif -%}{{ message.content }}
{%- endfor -%}"""

TWO_MACROS = """
{%- set ns = namespace(a=0, b=0) -%}
{%- if tools %}{% macro shown(m) %}{% set ns.a = ns.a + 1 %}A{{ m.content }}{% endmacro %}
{%- else %}{% macro shown(m) %}{% set ns.b = ns.b + 1 %}B{{ m.content }}{% endmacro %}{% endif -%}
{%- for message in messages -%}{{ shown(message) }}{{ ns.a }}{{ ns.b }}{%- endfor -%}"""

LISTS = """
{%- set ns = namespace(seen=[]) -%}
{%- for message in messages -%}
  {%- if message.content not in ns.seen %}{{ message.content }}{% endif -%}
  {%- set ns.seen = ns.seen + [message.content] -%}
{%- endfor -%}"""

UNREADABLE = [
    "{% for message in messages %}{{ messages|tojson }}{{ message.content }}{% endfor %}",
    "{% for message in messages %}x{% if message.content == 'a' %}{% break %}{% endif %}{% endfor %}",
    "{% for message in messages %}{{ loop.cycle('a', 'b') }}{{ message.content }}{% endfor %}",
    "{% for a, b in messages|items %}{{ a }}{% endfor %}",
    "{% for message in messages %}{{ ['a', 'b']|random }}{% endfor %}",
    "{% set ns = namespace() %}{% for message in messages %}{% if message.content %}"
    "{% set ns = namespace() %}{% endif %}{% set ns.a = 1 %}x{% endfor %}",
]
READABLE = [
    PLAIN,
    LAST_QUESTION,
    NEIGHBOURS,
    STATE,
    COUNTED,
    RENAMED,
    WITH_TOOLS,
    TWO_MACROS,
    LISTS,
]
TEMPLATES = READABLE + UNREADABLE[:3]


@cache
def renderer(template: str) -> TemplateRenderer:
    return TemplateRenderer(TOKENIZER, template)


def counting_renderer(template: str) -> tuple[TemplateRenderer, list[str]]:
    """A renderer, and a list that gets longer with each round that is written."""
    written: list[str] = []

    def count() -> str:
        written.append("")
        return ""

    counted = re.sub(r"({%- for \w+ in (messages|tail) -%})", r"\1{{ count() }}", template)
    return TemplateRenderer(TOKENIZER, counted, template_options={"count": count}), written


def outcome(rendered: TemplateRenderer, *arguments: Any) -> str:
    try:
        return rendered.render(*arguments)
    except RenderError as error:
        return f"refused: {error}"


def message(content: str, role: str = "user", **fields: Any) -> ChatMessage:
    return ChatMessage(role=role, content=content, **fields)


MESSAGES = st.builds(
    ChatMessage,
    role=st.sampled_from(["user", "assistant", "tool"]),
    content=st.sampled_from(["", "a", "b ", "bad"]),
    reasoning=st.sampled_from(["", "why"]),
    tool_calls=st.lists(
        st.builds(ToolCall, name=st.just("f"), arguments=st.sampled_from([{}, {"a": 1}])),
        max_size=2,
    ).map(tuple),
)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(deadline=None, max_examples=50)
@given(
    messages=st.lists(MESSAGES, min_size=1, max_size=6),
    steps=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans(), st.booleans()), max_size=12
    ),
)
def test_a_remembered_render_is_the_render(
    template: str,
    messages: list[ChatMessage],
    steps: list[tuple[int, int, bool, bool]],
) -> None:
    """Parts of one conversation in any order, so that rounds move, end, and come again."""
    rendered, memo = renderer(template), RenderMemo()
    for start, stop, has_tools, opens in steps:
        part, tools = messages[start:stop] or messages, [TOOL] if has_tools else None
        plain = outcome(rendered, part, tools, opens)
        assert outcome(rendered, part, tools, opens, memo) == plain


@pytest.mark.parametrize("template", [t for t in READABLE if t not in (COUNTED, LISTS)])
def test_a_growing_conversation_is_written_once(template: str) -> None:
    rendered, written = counting_renderer(template)
    memo, num_loops = RenderMemo(), template.count("in messages -%}") + template.count("in tail")
    messages = [message(f"m{i}", "tool" if i % 3 == 2 else "user") for i in range(40)]
    for end in range(1, 41):
        rendered.render(messages[:end], [TOOL], True, memo)
    # Each as the last one, and once more when another follows.
    assert len(written) <= num_loops * 3 * 40


@pytest.mark.parametrize("template", UNREADABLE)
def test_a_loop_of_which_the_inputs_cannot_be_told_is_refused(template: str) -> None:
    parsed = template_sandbox().parse(template)
    [loop] = parsed.find_all(nodes.For)
    with pytest.raises(UnreadableLoop):
        loop_inputs(loop, parsed)


def test_inputs_are_the_message_its_neighbours_and_what_was_set_before() -> None:
    parsed = template_sandbox().parse(STATE)
    [loop] = parsed.find_all(nodes.For)
    assert loop_inputs(loop, parsed).sets == (
        ("ns", "before"), ("ns", "is_tool"), ("ns", "num_shown"),
    )  # fmt: skip
    parsed = template_sandbox().parse(PLAIN)
    [loop, _] = parsed.find_all(nodes.For)
    assert list(map(str, loop_inputs(loop, parsed).reads)) == [str(nodes.Name("message", "load"))]


def test_equal_messages_that_are_other_objects_are_written_anew() -> None:
    rendered, written = counting_renderer(PLAIN)
    memo, same = RenderMemo(), [message("a")]
    for asked in ([message("a")], [message("a")], same, same, same):
        assert rendered.render(asked, None, True, memo).strip() == "<user>a<assistant>"
    assert len(written) == 3


def test_true_and_one_are_told_apart() -> None:
    rendered, memo = renderer(PLAIN), RenderMemo()
    for value in (1, True, 1.0):
        calls = (ToolCall(name="f", arguments={"a": value}),)
        asked = [message("", "assistant", tool_calls=calls)]
        assert rendered.render(asked, None, False, memo) == rendered.render(asked, None, False)


def test_a_memo_stays_as_large_as_its_conversation() -> None:
    rendered, memo = renderer(PLAIN), RenderMemo()
    for start in range(2_000):
        part = [message(f"m{start + i}") for i in range(3)]
        rendered.render(part, [{**TOOL, "number": start}], True, memo)
    kept = (memo._forms, memo._numbers, memo._written, memo._surroundings)
    assert all(len(part) < 300 for part in kept)


def test_an_id_that_is_used_again_is_no_input_again() -> None:
    """Messages that are forgotten leave ids behind, which the next ones may get."""
    rendered, memo = renderer(PLAIN), RenderMemo()
    chance = random.Random(0)
    for number in range(3_000):
        part = [message(f"{number}-{i}") for i in range(chance.randint(1, 4))]
        assert rendered.render(part, None, False, memo) == rendered.render(part, None, False)


@pytest.mark.parametrize(
    "read",
    [
        "message.__class__", "message.items.__globals__", "'{0.__class__}'.format(message)",
        "message.update({'a': 1})", "ns.__init__", "loop.__class__", "ns._Namespace__attrs",
        "message.get('role')", "message.nothing", "ns.nothing", "ns.f('x')", "loop.nothing",
    ],
)  # fmt: skip
def test_the_quick_sandbox_gives_what_the_sandbox_of_transformers_gives(read: str) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    template = "{% set ns = namespace(a=none, f='{}'.format) %}{% for message in messages %}"
    template += "{{ " + read + " }}{{ ns.a }}{{ message.role }}{{ loop.last }}{% endfor %}"
    messages = [{"role": "user", "content": "x"}]

    def text(compiled: Any) -> str:
        try:
            return str(compiled.render(messages=messages))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    quick = template_sandbox().from_string(template)
    assert text(quick) == text(_compile_jinja_template(template))

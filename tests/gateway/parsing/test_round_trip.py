"""What a template writes for a message is read back as that message.

The small templates here write as those of each family do. Where real ones lie beside the checkout,
in `../shared/templates`, they are used as well.
"""

import datetime
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from turnfold.gateway.parsing.detection import reply_format_of
from turnfold.gateway.parsing.replies import ReplyFormat
from turnfold.history.render import TemplateRenderer
from turnfold.schemas.messages import ChatMessage, Tool, ToolCall

REAL = Path(__file__).parents[3].parent / "shared" / "templates"

PROPERTIES: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "path": {"type": "string"},
    "count": {"type": "integer"},
    "scale": {"type": "number"},
    "force": {"type": "boolean"},
    "options": {"type": "object"},
    "items": {"type": "array"},
    "limit": {"type": ["integer", "null"]},
}


def tool(name: str, properties: dict[str, Any]) -> Tool:
    parameters = {"type": "object", "properties": properties}
    function = {"name": name, "description": "what it does", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = (tool("write", PROPERTIES), tool("ls", {}))

JSON_CALL = '{"name": {{ c.function.name|tojson }}, "arguments": {{ c.function.arguments|tojson }}}'

SMALL = {
    "qwen": """
{%- if tools %}{{ tools|tojson }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\n' }}{% endif %}{{ '<tool_call>\n' }}"""
    + JSON_CALL
    + """{{ '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "qwen_coder": """
{%- if tools %}{{ tools|tojson }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{%- if m.content and loop.first %}{{ '\n' }}{% endif %}
{{- '\n<tool_call>\n<function=' + c.function.name + '>\n' }}
{%- for k, v in c.function.arguments|items %}
{{- '<parameter=' + k + '>\n' }}
{{- v|tojson if v is mapping or (v is sequence and v is not string) else v|string }}
{{- '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}""",
    "glm": """
{%- if tools %}{{ tools|tojson }}{% endif %}
{%- for m in messages %}{{ '<|' + m.role + '|>' }}
{%- if m.role == 'assistant' %}{{ '\n<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}
{{- '\n' + m.content if m.content }}
{%- for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name + '\n' }}
{%- for k, v in c.function.arguments|items %}
{{- '<arg_key>' + k + '</arg_key>\n<arg_value>' }}{{ v if v is string else v|tojson }}
{{- '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    "minimax": """
{%- if tools %}{{ tools|tojson }}{% endif %}
{%- for m in messages %}{{ ']~b]' + m.role + '\n' }}
{%- if m.role == 'assistant' %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}
{{- m.content }}
{%- if m.tool_calls %}{{ '\n<minimax:tool_call>\n' }}
{%- for c in m.tool_calls %}{{ '<invoke name="' + c.function.name + '">\n' }}
{%- for k, v in c.function.arguments|items %}
{{- '<parameter name="' + k + '">' }}{{ v if v is string else v|tojson }}{{ '</parameter>\n' }}
{%- endfor %}{{ '</invoke>\n' }}{% endfor %}{{ '</minimax:tool_call>' }}{% endif %}
{{- '[e~[\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ ']~b]assistant\n<think>\n' }}{% endif %}""",
    "deepseek": """
{%- if tools %}{{ tools|tojson }}{% endif %}
{%- for m in messages %}{{ '<｜' + m.role + '｜>' }}
{%- if m.role == 'assistant' %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}
{{- m.content }}
{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}
{%- for c in m.tool_calls %}{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' }}
{{- c.function.arguments|tojson + '<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}
{%- endif %}{{ '<｜end▁of▁sentence｜>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜assistant｜><think>' }}{% endif %}""",
    "mistral": """
{%- if tools %}{{ tools|tojson }}{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- else %}{% if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments|tojson }}{% endfor %}
{{- '</s>' }}{% endif %}{% endfor %}""",
    "mistral list": """
{%- if tools %}{{ tools|tojson }}{% endif %}
{%- for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}
{%- for c in m.tool_calls %}"""
    + JSON_CALL
    + """{{ ', ' if not loop.last }}{% endfor %}{{ ']</s>' }}
{%- else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}""",
    "llama": """
{%- if tools %}{{ '"parameters": ' + tools|tojson }}{% endif %}
{%- for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if m.tool_calls %}{%- set c = m.tool_calls[0].function %}
{{- '{"name": "' + c.name + '", "parameters": ' + c.arguments|tojson + '}' }}
{%- else %}{{ m.content }}{% endif %}{{ '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "gpt_oss": """
{%- if tools %}{{ tools|tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- else %}
{%- if m.reasoning_content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}{% endif %}
{%- if m.content %}
{{- '<|start|>assistant<|channel|>' + ('commentary' if m.tool_calls else 'final') }}
{{- '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '<|start|>assistant to=functions.' + c.function.name + '<|channel|>commentary json<|message|>' }}
{{- c.function.arguments|tojson + '<|call|>' }}{% endfor %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}""",
}

STOPS = (
    "<|im_end|>", "</s>", "<|eot_id|>", "<|return|>", "<|call|>", "<|end|>", "[e~[",
    "<｜end▁of▁sentence｜>", "<|endoftext|>", "<|end_of_text|>",
)  # fmt: skip


class Sampled(NamedTuple):
    """A message as a model would have sampled it."""

    text: str
    is_reasoning_open: bool


def renderer_of(template: str) -> TemplateRenderer:
    return TemplateRenderer(
        tokenizers.Tokenizer(tokenizers.models.BPE()),
        template,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        today=datetime.date(2026, 1, 1),
    )


def sampled(renderer: TemplateRenderer, reply_format: ReplyFormat, message: ChatMessage) -> Sampled:
    """The template's text of the message behind the generation prompt, without the stop token."""
    asked = [ChatMessage(role="user", content="please")]
    prompt = renderer.render(asked, TOOLS, True)
    full = renderer.render([*asked, message], TOOLS, False)
    is_open = reply_format.is_reasoning_open(prompt)
    if not full.startswith(prompt):
        # The prompt opens a thinking block that the template leaves out, or closes, in history.
        prompt = prompt.rstrip().removesuffix("<think>")
        assert full.startswith(prompt)
        is_open = full.startswith("</think>", len(prompt))
    text = full[len(prompt) :].rstrip("\n")
    for stop in STOPS:
        text = text.removesuffix(stop)
    return Sampled(text, is_open)


def assert_read_back(template: str, message: ChatMessage) -> None:
    reply_format = reply_format_of(template)
    text, is_open = sampled(renderer_of(template), reply_format, message)
    reply = reply_format.parse(text, True, is_open, TOOLS)
    assert reply.malformed == ()
    assert (reply.reasoning, reply.content) == (message.reasoning, message.content)
    assert reply.tool_calls == message.tool_calls
    for read, written in zip(reply.tool_calls, message.tool_calls, strict=True):
        assert list(read.arguments) == list(written.arguments)


PLAIN = st.text(alphabet="ab é\n<>{}[]\"'", min_size=1, max_size=30).map(str.strip).filter(bool)
STRINGS = PLAIN | st.sampled_from(
    ["", "null", "1e5", "true", '"quoted"', '{"a": 1}', " indented\n", "\n", "a\\nb", "</parameter>",
     "</tool_call>", "</arg_value>", "<think>", "[TOOL_CALLS]", "<|call|>", "<tool_call>{}", "None"]
)  # fmt: skip
NUMBERS = st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not math.isnan(x))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | NUMBERS | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=6,
)
BY_KEY: dict[str, st.SearchStrategy[Any]] = {
    "text": STRINGS,
    "path": STRINGS,
    "count": st.integers(-(2**63), 2**63 - 1),
    "scale": NUMBERS,
    "force": st.booleans(),
    "options": st.dictionaries(PLAIN, VALUES, max_size=3),
    "items": st.lists(VALUES, max_size=3),
    "limit": st.none() | st.integers(-5, 5),
}


@st.composite
def arguments(draw: st.DrawFn) -> dict[str, Any]:
    keys = draw(st.lists(st.sampled_from(sorted(BY_KEY)), unique=True, max_size=5))
    return {key: draw(BY_KEY[key]) for key in keys}


CALLS = arguments().map(lambda given_: ToolCall(name="write", arguments=given_))


@st.composite
def messages(draw: st.DrawFn, name: str) -> ChatMessage:
    """A message that the family can write at all."""
    calls = draw(st.lists(CALLS, max_size=1 if name == "llama" else 3))
    has_text_beside_calls = name not in ("llama", "mistral list")
    content = draw(PLAIN) if has_text_beside_calls or not calls else ""
    reasoning = draw(PLAIN) if name not in ("llama", "mistral list") else ""
    return ChatMessage(
        role="assistant", content=content, reasoning=reasoning, tool_calls=tuple(calls)
    )


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_message_is_read_back(name: str, data: st.DataObject) -> None:
    assert_read_back(SMALL[name], data.draw(messages(name)))


def test_each_small_template_is_known_for_its_family() -> None:
    for name, template in SMALL.items():
        assert reply_format_of(template).name == name.split()[0]
        assert reply_format_of(template).has_tools


NASTY = ToolCall(
    name="write",
    arguments={
        "text": 'print("</tool_call>")\n<parameter=x>é\n',
        "path": "null",
        "count": 3,
        "scale": 1.5,
        "force": True,
        "options": {"z": 1, "a": [1, None, {"b": "c"}]},
        "items": [1, "b"],
    },
)
LS = ToolCall(name="ls", arguments={})

MESSAGES = {
    "text": ChatMessage(role="assistant", content="One line.\nTwo lines."),
    "call": ChatMessage(role="assistant", tool_calls=(NASTY,)),
    "text and call": ChatMessage(role="assistant", content="On it.", tool_calls=(NASTY,)),
    "two calls": ChatMessage(role="assistant", tool_calls=(NASTY, LS)),
    "thinking": ChatMessage(role="assistant", reasoning="hm, where?\nthere", content="Yes."),
    "all": ChatMessage(role="assistant", reasoning="hm", content="On it.", tool_calls=(NASTY, LS)),
}

ALL = tuple(MESSAGES)
WITHOUT_THINKING = ("text", "call", "text and call", "two calls")
NO_TEXT_BESIDE_CALLS = ("text", "call", "two calls")
ONE_BARE_CALL = ("text", "call")

REAL_TEMPLATES = {
    "llamacpp/Qwen-Qwen2.5-7B-Instruct.jinja": ("qwen", WITHOUT_THINKING),
    "llamacpp/Qwen-Qwen3-0.6B.jinja": ("qwen", ALL),
    "trl/qwen3.jinja": ("qwen", ALL),
    "trl/qwen3_training.jinja": ("qwen", ALL),
    "trl/qwen3_instruct_2507.jinja": ("qwen", WITHOUT_THINKING),
    "derived/qwen3_thinking_2507.jinja": ("qwen", ALL),
    "miles/qwen3_thinking_2507_and_next_fixed.jinja": ("qwen", ALL),
    "llamacpp/Qwen3-Coder.jinja": ("qwen_coder", WITHOUT_THINKING),
    "vllm/tool_chat_template_qwen3coder.jinja": ("qwen_coder", WITHOUT_THINKING),
    "llamacpp/Qwen3.5-4B.jinja": ("qwen_coder", ALL),
    "trl/qwen3_6.jinja": ("qwen_coder", ALL),
    "trl/qwen3_8.jinja": ("qwen_coder", ALL),
    "trl/nemotron_3_nano.jinja": ("qwen_coder", ALL),
    "trl/glm4moe.jinja": ("glm", ALL),
    "llamacpp/GLM-4.6.jinja": ("glm", ALL),
    "llamacpp/GLM-4.7-Flash.jinja": ("glm", ALL),
    "llamacpp/MiniMax-M2.jinja": ("minimax", ALL),
    "miles/minimax_m25_fixed.jinja": ("minimax", ALL),
    "llamacpp/deepseek-ai-DeepSeek-V3.1.jinja": ("deepseek", WITHOUT_THINKING),
    "llamacpp/mistralai-Mistral-Nemo-Instruct-2407.jinja": ("mistral", NO_TEXT_BESIDE_CALLS),
    "llamacpp/Mistral-Small-3.2-24B-Instruct-2506.jinja": ("mistral", NO_TEXT_BESIDE_CALLS),
    "llamacpp/unsloth-mistral-Devstral-Small-2507.jinja": ("mistral", WITHOUT_THINKING),
    "llamacpp/mistralai-Ministral-3-14B-Reasoning-2512.jinja": ("mistral", WITHOUT_THINKING),
    "llamacpp/meta-llama-Llama-3.1-8B-Instruct.jinja": ("llama", ONE_BARE_CALL),
    "llamacpp/meta-llama-Llama-3.2-3B-Instruct.jinja": ("llama", ONE_BARE_CALL),
    "llamacpp/meta-llama-Llama-3.3-70B-Instruct.jinja": ("llama", ONE_BARE_CALL),
    "llamacpp/openai-gpt-oss-120b.jinja": ("gpt_oss", ("text", "call", "thinking")),
}
"""Family of each, and the messages that the template writes whole: many leave the thinking out."""


@pytest.mark.skipif(not REAL.is_dir(), reason="no real templates beside the checkout")
@pytest.mark.parametrize("file", REAL_TEMPLATES)
def test_real_templates_are_known_and_read_back(file: str) -> None:
    name, cases = REAL_TEMPLATES[file]
    template = (REAL / file).read_text(encoding="utf-8")
    assert reply_format_of(template).name == name
    for case in cases:
        assert_read_back(template, MESSAGES[case])


@pytest.mark.skipif(not REAL.is_dir(), reason="no real templates beside the checkout")
def test_gpt_oss_writes_text_beside_a_call_as_analysis() -> None:
    template = (REAL / "llamacpp/openai-gpt-oss-120b.jinja").read_text(encoding="utf-8")
    reply_format = reply_format_of(template)
    text, _ = sampled(renderer_of(template), reply_format, MESSAGES["text and call"])
    reply = reply_format.parse(text, True, False, TOOLS)
    assert (reply.reasoning, reply.content, reply.tool_calls) == ("On it.", "", (NASTY,))

"""Healing with a real byte-level tokenizer and a template that takes old reasoning back."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from turnfold.history.errors import RenderError
from turnfold.history.render import TemplateRenderer
from turnfold.history.template_facts import template_facts
from turnfold.schemas.messages import ChatMessage, ToolCall

SYSTEM = ChatMessage(role="system", content="You are a helpful assistant.")
CALL = ToolCall(name="get_weather", arguments={"city": "Paris", "days": 3}, id="call_1")
CALL_TEXT = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
)


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def assistant(text: str = "", calls: tuple[ToolCall, ...] = (), reasoning: str = "") -> ChatMessage:
    return ChatMessage(role="assistant", content=text, tool_calls=calls, reasoning=reasoning)


def tool(text: str) -> ChatMessage:
    return ChatMessage(role="tool", content=text, tool_call_id="call_1")


def test_opening_and_closers_are_learnt_from_the_template(bpe: TemplateRenderer) -> None:
    facts = template_facts(bpe)
    assert facts.opening == "<|im_start|>assistant\n"
    assert facts.closers == {bpe.encode("<|im_end|>")[0]}


@pytest.mark.field_case("verl#6501")
@pytest.mark.parametrize("closer", ["<|im_end|>", "", "<|im_end|>\n"])
@pytest.mark.parametrize("is_split", [False, True])
def test_spliced_prompt_reads_as_the_template_renders(
    bpe: TemplateRenderer, converse: Any, split: Any, closer: str, is_split: bool
) -> None:
    chat = converse(bpe)
    said = [SYSTEM, user("Find the weather")]
    reply = assistant("Hello there", (CALL,))
    chat.turn(said, split(bpe, "Hello there\n" + CALL_TEXT + closer, lambda _: is_split), reply)
    said += [reply, tool("sunny")]
    plan = chat.turn(said, "The weather is sunny.<|im_end|>", assistant("The weather is sunny."))
    assert bpe.decode(plan.prompt_ids) == bpe.render(said, None, True)
    assert plan.num_renders == 1
    assert plan.continuity == ("healed" if is_split else "extended")
    assert len(chat.rows()) == 1


@pytest.mark.parametrize("closer", ["<|im_end|>", "", "<|im_end|>\n"])
@pytest.mark.parametrize(
    "written",
    [
        CALL_TEXT.replace(": ", ":").replace(", ", ","),
        CALL_TEXT.replace("\n", ""),
        "<think>\n\n</think>\n\n" + CALL_TEXT,
        CALL_TEXT + "\n",
        "Hello\n\n" + CALL_TEXT,
    ],
)
def test_call_written_in_another_form_is_closed_once(
    bpe: TemplateRenderer, converse: Any, written: str, closer: str
) -> None:
    chat = converse(bpe)
    said = [SYSTEM, user("Find the weather")]
    reply = assistant("Hello" if written.startswith("Hello") else "", (CALL,))
    chat.turn(said, written + closer, reply)
    plan = chat.turn([*said, reply, tool("sunny")], "It is sunny.<|im_end|>")
    after = bpe.decode(plan.prompt_ids).removeprefix(bpe.render(said, None, True) + written)
    assert after == (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert plan.continuity == "healed"
    assert plan.num_renders == 2
    # The named token is the first one that the template does not show.
    shown, at = bpe.render([*said, reply, tool("sunny")], None, True), plan.divergence.token_index
    assert shown.startswith(bpe.decode(plan.prompt_ids[:at]))
    assert not shown.startswith(bpe.decode(plan.prompt_ids[: at + 1]))


def test_tool_result_that_looks_like_call_syntax_is_not_cut(
    bpe: TemplateRenderer, converse: Any
) -> None:
    chat = converse(bpe)
    said = [SYSTEM, user("Find the weather")]
    reply = assistant("", (CALL,))
    for number, answer in enumerate(("}", "</tool_call>", "<|im_end|>", "}}\n</tool_call>")):
        chat.turn(said, CALL_TEXT.replace(": ", ":") + "<|im_end|>", reply)
        said = [*said, reply, tool(answer)]
        tail = bpe.decode(chat.plan(said).prompt_tail.array)
        assert tail == (
            f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        ), number
    assert len(chat.rows()) == 1


def test_repeated_short_messages_are_told_apart_where_replies_are_shown_otherwise(
    bpe: TemplateRenderer, converse: Any
) -> None:
    """The same question and answer again and again, after a reply that the template shortens."""
    chat = converse(bpe)
    said = [user("hello")]
    reply = assistant("ok", reasoning="The user is there")
    chat.turn(said, "<think>\nThe user is there\n</think>\n\nok<|im_end|>", reply)
    for _ in range(4):
        said = [*said, reply, user("hello")]
        reply = assistant("ok")
        plan = chat.turn(said, "ok<|im_end|>", reply)
        text = bpe.decode(plan.prompt_ids)
        assert text.count("hello") == len(said) // 2 + 1
        assert text.count("<|im_end|>") == text.count("<|im_start|>") - 1
    assert len(chat.rows()) == 1


@pytest.mark.field_case("verl#6854")
def test_reasoning_that_the_template_takes_back_is_kept(
    bpe: TemplateRenderer, converse: Any
) -> None:
    chat = converse(bpe)
    said = [SYSTEM, user("hello")]
    for question in ("thanks", "weather"):
        reply = assistant("Hello there.", reasoning="The user is there")
        chat.turn(said, "<think>\nThe user is there\n</think>\n\nHello there.<|im_end|>", reply)
        said = [*said, reply, user(question)]
    chat.turn(said, "It is sunny.<|im_end|>")
    assert chat.continuities() == ["first", "healed", "healed"]
    assert chat.causes() == [None, "template_rewrote_history", "template_rewrote_history"]
    assert len(chat.rows()) == 1
    assert bpe.decode(chat.session.sequences.prompt("t2")).count("The user is there") == 2


def test_reasoning_within_a_tool_loop_extends(bpe: TemplateRenderer, converse: Any) -> None:
    chat = converse(bpe)
    said = [SYSTEM, user("Find the weather")]
    reply = assistant("", (CALL,), "read the weather")
    chat.turn(said, f"<think>\nread the weather\n</think>\n\n{CALL_TEXT}<|im_end|>", reply)
    chat.turn([*said, reply, tool("sunny")], "Sunny.<|im_end|>")
    assert chat.continuities() == ["first", "extended"]


@pytest.mark.field_case("verl#6854")
def test_tree_mode_tells_what_the_template_took_back(bpe: TemplateRenderer, converse: Any) -> None:
    chat = converse(bpe, mode="tree")
    said = [SYSTEM, user("hello")]
    reply = assistant("Hello there.", reasoning="The user is there")
    chat.turn(said, "<think>\nThe user is there\n</think>\n\nHello there.<|im_end|>", reply)
    plan = chat.turn([*said, reply, user("thanks")], "Yes.<|im_end|>")
    assert (plan.continuity, plan.divergence.cause) == ("forked", "template_rewrote_history")
    assert plan.shared_len == chat.session.sequences.prompt_length("t0")


def test_output_cut_inside_a_character_is_kept(bpe: TemplateRenderer, converse: Any) -> None:
    chat = converse(bpe)
    cut = bpe.encode("Hello Zü").tolist()[:-1]
    chat.turn([user("hello")], cut, assistant("Hello Z"))
    plan = chat.turn([user("hello"), assistant("Hello Z"), user("thanks")], "Yes.<|im_end|>")
    start = len(bpe.encode(bpe.render([user("hello")], None, True)))
    assert plan.prompt_ids.tolist()[start : start + len(cut)] == cut
    assert bpe.decode(plan.prompt_tail.array).startswith("<|im_end|>\n<|im_start|>user\nthanks")


def test_empty_output_is_closed(bpe: TemplateRenderer, converse: Any) -> None:
    chat = converse(bpe)
    chat.turn([user("hello")], [], assistant(""))
    said = [user("hello"), assistant(""), user("thanks")]
    plan = chat.turn(said, "Yes.<|im_end|>")
    assert bpe.decode(plan.prompt_ids) == bpe.render(said, None, True)


def test_reply_that_is_a_prefix_of_a_mark_is_closed_with_the_whole_mark(
    bpe: TemplateRenderer, converse: Any
) -> None:
    chat = converse(bpe)
    chat.turn([user("hello")], "a <", assistant("a <"))
    said = [user("hello"), assistant("a <"), user("thanks")]
    plan = chat.turn(said, "Yes.<|im_end|>")
    assert plan.prompt_ids.tolist() == bpe.encode(bpe.render(said, None, True)).tolist()


def variant(bpe: TemplateRenderer, old: str, new: str) -> TemplateRenderer:
    """The renderer with a part of its template replaced."""
    template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    assert old in template
    return TemplateRenderer(bpe._tokenizer, template.replace(old, new))


def test_line_break_that_a_template_adds_later_is_no_reset(
    bpe: TemplateRenderer, converse: Any
) -> None:
    """Hermes writes a line break after a tool result once another message follows it."""
    old = "'\\n</tool_response>' }}"
    renderer = variant(bpe, old, old + "{{- '' if loop.last else '\\n' }}")
    chat = converse(renderer)
    said = [SYSTEM, user("Find the weather"), assistant("", (CALL,)), tool("sunny")]
    chat.turn(said[:2], CALL_TEXT + "<|im_end|>", said[2])
    chat.turn(said, "It is sunny.<|im_end|>")
    plan = chat.turn([*said, assistant("It is sunny."), user("thanks")], "Yes.<|im_end|>")
    assert (plan.continuity, plan.divergence.cause) == ("healed", "template_rewrote_history")
    assert renderer.decode(plan.prompt_tail.array) == (
        "\n<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(chat.rows()) == 1


def test_call_that_the_template_does_not_show_is_kept(bpe: TemplateRenderer, converse: Any) -> None:
    renderer = variant(bpe, "message.tool_calls or []", "[]")
    chat = converse(renderer)
    said = [SYSTEM, user("Find the weather")]
    chat.turn(said, CALL_TEXT + "<|im_end|>", assistant("", (CALL,)))
    plan = chat.turn([*said, assistant("", (CALL,)), user("sunny")], "It is sunny.<|im_end|>")
    assert plan.continuity == "healed"
    assert renderer.decode(plan.prompt_tail.array) == (
        "\n<|im_start|>user\nsunny<|im_end|>\n<|im_start|>assistant\n"
    )


MOVING = (
    "{%- for m in messages if m.role != 'system' %}<|im_start|>"
    "{%- if loop.last %}{{ messages[0].content }} {% endif %}{{ m.content }}<|im_end|>"
    "{%- endfor %}"
)
"""Shows the system text in the last message, as Mistral's templates do."""


@pytest.mark.parametrize("closer", ["<|im_end|>", ""])
def test_system_text_that_moves_stays_and_is_repeated_where_the_template_writes_it(
    bpe: TemplateRenderer, converse: Any, closer: str
) -> None:
    chat = converse(TemplateRenderer(bpe._tokenizer, MOVING))
    chat.turn([SYSTEM, user("hello")], "Hello there" + closer, assistant("Hello there"))
    said = [SYSTEM, user("hello"), assistant("Hello there"), user("thanks")]
    plan = chat.turn(said, "Yes<|im_end|>")
    assert (plan.continuity, plan.divergence.cause) == ("healed", "template_rewrote_history")
    assert plan.divergence.message_index == 0
    assert chat.renderer.decode(plan.prompt_ids) == (
        f"<|im_start|>{SYSTEM.content} hello<|im_end|>Hello there<|im_end|>"
        f"<|im_start|>{SYSTEM.content} thanks<|im_end|>"
    )
    # What is appended is the end of the template's own render, whole.
    assert chat.renderer.render(said, None, True).endswith(
        chat.renderer.decode(plan.prompt_tail.array)
    )
    assert len(chat.rows()) == 1


def test_new_message_that_the_template_shows_before_the_reply_only_is_a_reset(
    bpe: TemplateRenderer, converse: Any
) -> None:
    """Behind the saved tokens the model would never see it."""
    template = (
        "{%- for m in messages if m.role != 'assistant' %}<|im_start|>{{ m.content }}{% endfor %}"
        "{%- for m in messages if m.role == 'assistant' %}<|im_end|>{{ m.content }}{% endfor %}"
    )
    chat = converse(TemplateRenderer(bpe._tokenizer, template))
    chat.turn([user("hello")], "<|im_end|>Hello there", assistant("Hello there"))
    said = [user("hello"), assistant("Hello there"), user("thanks")]
    plan = chat.turn(said, "<|im_end|>Yes")
    assert (plan.continuity, plan.divergence.cause) == ("reset", "template_rewrote_history")
    assert chat.renderer.decode(plan.prompt_ids) == chat.renderer.render(said, None, True)


def test_system_text_that_moves_begins_a_segment_where_the_template_is_followed(
    bpe: TemplateRenderer, converse: Any
) -> None:
    chat = converse(TemplateRenderer(bpe._tokenizer, MOVING), rewrites="follow")
    chat.turn([SYSTEM, user("hello")], "Hello there<|im_end|>")
    said = [SYSTEM, user("hello"), assistant("Hello there"), user("thanks")]
    plan = chat.turn(said, "Yes<|im_end|>")
    assert (plan.continuity, plan.divergence.cause) == ("reset", "template_rewrote_history")
    assert chat.renderer.decode(plan.prompt_ids) == chat.renderer.render(said, None, True)


def test_following_the_template_leaves_reasoning_out_where_it_does(
    bpe: TemplateRenderer, converse: Any
) -> None:
    """A new user message begins a segment without the old reasoning; a tool loop goes on."""
    chat = converse(bpe, rewrites="follow")
    said = [SYSTEM, user("Find the weather")]
    thinking = "<think>\nread the weather\n</think>\n\n"
    reply = assistant("", (CALL,), "read the weather")
    chat.turn(said, f"{thinking}{CALL_TEXT}<|im_end|>", reply)
    said = [*said, reply, tool("sunny")]
    chat.turn(said, "Sunny.<|im_end|>", assistant("Sunny."))
    said = [*said, assistant("Sunny."), user("thanks")]
    plan = chat.turn(said, "Yes.<|im_end|>", assistant("Yes."))
    assert bpe.decode(plan.prompt_ids) == bpe.render(said, None, True)
    chat.turn([*said, assistant("Yes."), user("hello")], "Hello<|im_end|>")
    assert chat.continuities() == ["first", "extended", "reset", "extended"]
    assert chat.causes() == [None, None, "template_rewrote_history", None]
    assert len(chat.rows()) == 2


@pytest.mark.field_case("NeMo RL#3931")
@pytest.mark.parametrize("rewrites", ["keep", "follow"])
@pytest.mark.parametrize("mode", ["linear", "tree"])
def test_rows_show_each_reply_behind_the_context_it_was_sampled_in(
    bpe: TemplateRenderer, converse: Any, mode: str, rewrites: str
) -> None:
    """Old thinking is in the row exactly where it was before the model; no setting cuts it later."""
    chat = converse(bpe, mode=mode, rewrites=rewrites)
    said, given = [SYSTEM, user("hello")], list[list[int]]()
    for question in ("thanks", "weather", "sunny"):
        reply = assistant("Hello there.", reasoning="The user is there")
        plan = chat.turn(
            said, "<think>\nThe user is there\n</think>\n\nHello there.<|im_end|>", reply
        )
        given.append([*plan.prompt_ids.tolist(), *chat.session.sequences.output(f"t{len(given)}")])
        said = [*said, reply, user(question)]
    rows = [ids for ids, _ in chat.rows()]
    assert all(any(row[: len(ids)] == ids for row in rows) for ids in given)
    assert sum(sum(mask) for _, mask in chat.rows()) == sum(
        len(event.output_ids) for event in chat.events
    )
    assert len(rows) == (1 if (mode, rewrites) == ("linear", "keep") else 3)


def test_other_closing_marks_begin_no_segment_where_the_template_is_followed(
    bpe: TemplateRenderer, converse: Any
) -> None:
    """gpt-oss stops with <|return|>, and the template closes the same reply with <|end|> later."""
    chat = converse(bpe, rewrites="follow")
    chat.turn([user("hello")], "Hello there</tool_call>", assistant("Hello there"))
    plan = chat.turn([user("hello"), assistant("Hello there"), user("thanks")], "Yes.<|im_end|>")
    assert plan.continuity == "healed"


def test_text_that_the_template_shows_behind_the_results_of_a_call_stands_once(
    bpe: TemplateRenderer, converse: Any
) -> None:
    """Gemma shows a call, its result, and then the text that the model wrote beside the call."""
    template = (
        "{%- for m in messages %}"
        "{%- if m.role == 'assistant' and m.tool_calls %}<|im_start|>"
        "<tool_call>{{ m.tool_calls[0].function.arguments | tojson }}</tool_call>"
        "{%- for t in messages if t.role == 'tool' %}<think>{{ t.content }}</think>{% endfor %}"
        "{{ m.content }}<|im_end|>"
        "{%- elif m.role != 'tool' %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}"
        "{%- endfor %}{{ '<|im_start|>' if add_generation_prompt }}"
    )
    chat = converse(TemplateRenderer(bpe._tokenizer, template))
    said, reply = [SYSTEM, user("hello")], assistant("I read files.", (CALL,))
    call = '<tool_call>{"city": "Paris", "days": 3}</tool_call>'
    chat.turn(said, f"I read files.{call}<|im_end|>", reply)
    plan = chat.turn([*said, reply, tool("sunny")], "Yes<|im_end|>")
    text = chat.renderer.decode(plan.prompt_ids)
    assert text.count("I read files.") == 1
    assert text.endswith(f"I read files.{call}<|im_end|><think>sunny</think><|im_end|><|im_start|>")
    assert plan.continuity == "healed"


def test_template_error_names_what_the_template_said() -> None:
    renderer = TemplateRenderer(
        Tokenizer(models.BPE()), "{{ raise_exception('roles must alternate') }}"
    )
    with pytest.raises(RenderError, match="TemplateError: roles must alternate"):
        renderer.render([user("hello")], None, True)


def test_template_prints_the_given_date_and_reads_no_clock() -> None:
    template = "{{ strftime_now('%d %B %Y') }}"
    dated = TemplateRenderer(Tokenizer(models.BPE()), template, today=datetime.date(2026, 1, 2))
    assert dated.render([user("hello")], None, True) == "02 January 2026"
    undated = TemplateRenderer(Tokenizer(models.BPE()), template)
    with pytest.raises(RenderError, match="no `today` was given"):
        undated.render([user("hello")], None, True)


def test_messages_reach_the_template_in_the_shape_of_the_chat_api() -> None:
    renderer = TemplateRenderer(Tokenizer(models.BPE()), "{{ messages | tojson }}")
    raw = ToolCall(name="run", arguments="ls -la", id="call_2")
    messages = [assistant("", (CALL, raw), "why"), tool("sunny")]
    assert renderer.render(messages, None, False) == (
        '[{"role": "assistant", "content": "", "tool_calls": ['
        '{"id": "call_1", "type": "function", "function": '
        '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}}, '
        '{"id": "call_2", "type": "function", "function": '
        '{"name": "run", "arguments": {"_raw": "ls -la"}}}], "reasoning_content": "why"}, '
        '{"role": "tool", "content": "sunny", "tool_call_id": "call_1"}]'
    )


def test_message_that_is_a_call_alone_has_null_content_where_the_template_asks_for_it() -> None:
    """DeepSeek's templates show the calls of a message only where its content is null."""
    asking = "{% if messages[0]['content'] is none %}{{ messages[0].tool_calls[0].id }}{% endif %}"
    renderer = TemplateRenderer(Tokenizer(models.BPE()), asking)
    assert renderer.render([assistant("", (CALL,))], None, False) == "call_1"
    assert renderer.render([assistant("so", (CALL,))], None, False) == ""
    assert renderer.render([assistant("")], None, False) == ""


def test_arguments_are_text_where_the_template_joins_them_to_text() -> None:
    joining = "{{ 'call ' + messages[0]['tool_calls'][0]['function']['arguments'] + '!' }}"
    renderer = TemplateRenderer(Tokenizer(models.BPE()), joining)
    raw = ToolCall(name="run", arguments="ls -la", id="call_2")
    assert renderer.render([assistant("", (CALL,))], None, False) == (
        'call {"city": "Paris", "days": 3}!'
    )
    assert renderer.render([assistant("", (raw,))], None, False) == "call ls -la!"


def test_call_ids_are_shortened_for_templates_that_demand_nine_characters() -> None:
    template = (
        "{% if messages[1].tool_call_id | length != 9 %}{{ raise_exception('length') }}{% endif %}"
        "{{ messages | tojson }}"
    )
    renderer = TemplateRenderer(Tokenizer(models.BPE()), template)
    rendered = renderer.render([assistant("", (CALL,)), tool("sunny")], None, False)
    [call_id, answered] = [part.split('"')[0] for part in rendered.split('id": "')[1:]]
    assert call_id == answered
    assert len(call_id) == 9
    assert call_id.isalnum()


@pytest.mark.field_case("AReaL#582")
def test_tree_parent_goes_by_tokens_though_the_messages_match(
    bpe: TemplateRenderer, converse: Any
) -> None:
    """A client that leaves reasoning out continues the turn in messages, not in tokens."""
    chat = converse(bpe, mode="tree")
    said = [SYSTEM, user("Find the weather")]
    text = f"<think>\nread the weather\n</think>\n\n{CALL_TEXT}<|im_end|>"
    chat.turn(said, text, assistant("", (CALL,), "read the weather"))
    plan = chat.turn([*said, assistant("", (CALL,)), tool("sunny")], "Sunny.<|im_end|>")
    assert (plan.continuity, plan.divergence.cause) == ("forked", "reasoning_dropped")
    assert plan.shared_len == chat.session.sequences.prompt_length("t0")
    assert len(chat.rows()) == 2


@pytest.mark.field_case("trl#6361")
def test_reasoning_opened_by_the_generation_prompt_stays_inside_its_block(
    bpe: TemplateRenderer, converse: Any
) -> None:
    """The opening ends with <think>, so the sampled text holds the closing marker only."""
    opened = variant(
        bpe,
        "add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}",
        "add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n<think>\\n' }}",
    )
    assert template_facts(opened).opening == "<|im_start|>assistant\n<think>\n"
    chat = converse(opened)
    said = [SYSTEM, user("Find the weather")]
    reply = assistant("", (CALL,), "read the weather")
    chat.turn(said, f"read the weather\n</think>\n\n{CALL_TEXT}<|im_end|>", reply)
    said = [*said, reply, tool("sunny")]
    plan = chat.turn(said, "I know\n</think>\n\nSunny.<|im_end|>", assistant("Sunny."))
    assert opened.decode(plan.prompt_ids) == opened.render(said, None, True)
    said = [*said, assistant("Sunny."), user("thanks")]
    plan = chat.turn(said, "I know\n</think>\n\nSunny.<|im_end|>", assistant("Sunny."))
    text = opened.decode(plan.prompt_ids)
    assert text.count("<think>") == 3
    assert text.count("</think>") == 2
    assert len(chat.rows()) == 1


def test_closing_mark_that_a_template_leaves_out_later_is_no_reset(
    bpe: TemplateRenderer, converse: Any
) -> None:
    """Bielik closes a tool result only while it is the last message."""
    old = "{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}"
    renderer = variant(bpe, old, "{{- '<|im_end|>\\n' if loop.last }}")
    chat = converse(renderer)
    said = [SYSTEM, user("Find the weather"), assistant("", (CALL,)), tool("sunny")]
    chat.turn(said[:2], CALL_TEXT + "<|im_end|>", said[2])
    chat.turn(said, "It is sunny.<|im_end|>")
    said = [*said, assistant("It is sunny."), user("thanks")]
    plan = chat.turn(said, "Yes.<|im_end|>")
    assert (plan.continuity, plan.divergence.cause) == ("healed", "template_rewrote_history")
    assert renderer.decode(plan.prompt_tail.array) == (
        "\n<|im_start|>user\nthanks<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(chat.rows()) == 1


def test_reply_that_a_tool_result_opens_otherwise_is_no_reset(
    bpe: TemplateRenderer, converse: Any
) -> None:
    """DeepSeek-V3.2 opens the reply to a tool result with other marks than the one to a user."""
    old = "add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}"
    opening = (
        "{{- '<think></think>' if messages[-1].role == 'tool' else '<|im_start|>assistant\\n' }}"
    )
    renderer = variant(bpe, old, f"add_generation_prompt %}}\n    {opening}")
    chat = converse(renderer)
    said = [SYSTEM, user("Find the weather"), assistant("", (CALL,)), tool("sunny")]
    chat.turn(said[:2], CALL_TEXT + "<|im_end|>", said[2])
    chat.turn(said, "It is sunny.<|im_end|>")
    plan = chat.turn([*said, assistant("It is sunny."), user("thanks")], "Yes.<|im_end|>")
    assert (plan.continuity, len(chat.rows())) == ("healed", 1)


def test_opening_of_a_template_that_always_writes_it_is_learnt(bpe: TemplateRenderer) -> None:
    unasked = variant(bpe, "{%- if add_generation_prompt %}", "{%- if true %}")
    # What two questions begin alike is no part of it.
    assert template_facts(unasked).opening == "assistant\n"


def test_tool_result_that_the_template_shortens_later_stays_as_the_model_saw_it(
    bpe: TemplateRenderer, converse: Any
) -> None:
    shortened = "(message.content if loop.last else message.content[:3])"
    renderer = variant(bpe, "message.content + '\\n</tool", f"{shortened} + '\\n</tool")
    chat = converse(renderer)
    said = [SYSTEM, user("Find the weather"), assistant("", (CALL,)), tool("sunny")]
    chat.turn(said[:2], CALL_TEXT + "<|im_end|>", said[2])
    chat.turn(said, "It is sunny.<|im_end|>")
    plan = chat.turn([*said, assistant("It is sunny."), user("thanks")], "Yes.<|im_end|>")
    assert (plan.continuity, plan.divergence.cause) == ("healed", "template_rewrote_history")
    assert plan.divergence.message_index == 3
    assert renderer.decode(plan.prompt_ids).count("sunny") == 2
    assert len(chat.rows()) == 1


def test_equal_tool_results_are_told_apart_where_only_the_last_is_closed(
    bpe: TemplateRenderer, converse: Any
) -> None:
    old = "{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}"
    renderer = variant(bpe, old, "{{- '<|im_end|>\\n' if loop.last }}")
    chat = converse(renderer)
    said = [SYSTEM, user("Find the weather")]
    for _ in range(4):
        chat.turn(said, CALL_TEXT + "<|im_end|>", assistant("", (CALL,)))
        said = [*said, assistant("", (CALL,)), tool("sunny")]
    assert "reset" not in chat.continuities()
    assert len(chat.rows()) == 1

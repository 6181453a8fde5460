"""Healing with the toy model: every prompt written out in ids."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from turnfold.history.canonical import CosmeticRules
from turnfold.history.errors import NonlinearHistory
from turnfold.history.session import Session
from turnfold.schemas.events import Divergence
from turnfold.schemas.messages import ChatMessage, ToolCall

Q1 = [213, 149]
Q2 = [213, 150]
Q3 = [213, 151]


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def assistant(text: str, **fields: Any) -> ChatMessage:
    return ChatMessage(role="assistant", content=text, **fields)


def system(text: str) -> ChatMessage:
    return ChatMessage(role="system", content=text)


def tool(text: str) -> ChatMessage:
    return ChatMessage(role="tool", content=text)


def write(call_id: str = "", **arguments: Any) -> tuple[ToolCall, ...]:
    return (ToolCall(name="write", arguments=arguments, id=call_id),)


def test_first_turn_is_the_plain_render(chat: Any) -> None:
    plan = chat.turn([user("q1")], [2001])
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12]
    assert (plan.continuity, plan.parent_turn_id, plan.shared_len) == ("first", None, 0)
    assert plan.new_messages == (user("q1"),)


@pytest.mark.field_case("rllm#272")
def test_drifting_reply_keeps_its_sampled_tokens(chat: Any) -> None:
    chat.turn([user("q1")], [2001, 2002])
    plan = chat.turn([user("q1"), assistant("bc"), user("q2")], [2003, 2004, 2005])
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12, 2001, 2002, 13, 10, *Q2, 11, 12]
    assert plan.prompt_tail.tolist() == [13, 10, *Q2, 11, 12]
    assert (plan.parent_turn_id, plan.shared_len, plan.shared_messages) == ("t0", 7, 2)
    assert plan.new_messages == (user("q2"),)
    assert plan.continuity == "healed"
    assert plan.divergence.cause == "retokenized"
    assert plan.divergence.token_index == 5
    [(ids, mask)] = chat.rows()
    assert len(ids) == 16
    assert mask == [0] * 5 + [1, 1] + [0] * 6 + [1, 1, 1]


def test_tree_mode_takes_the_drift_as_a_fork(toy: Any, converse: Any) -> None:
    chat = converse(toy, mode="tree")
    chat.turn([user("q1")], [2001, 2002])
    plan = chat.turn([user("q1"), assistant("bc"), user("q2")], [2003, 2004, 2005])
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12, 198, 199, 13, 10, *Q2, 11, 12]
    assert (plan.parent_turn_id, plan.shared_len, plan.shared_messages) == ("t0", 5, 2)
    assert plan.continuity == "forked"
    assert (plan.divergence.cause, plan.divergence.token_index) == ("retokenized", 5)
    assert [(len(ids), sum(mask)) for ids, mask in chat.rows()] == [(7, 2), (16, 3)]


def test_tree_mode_extends_when_nothing_drifts(toy: Any, converse: Any) -> None:
    chat = converse(toy, mode="tree")
    chat.turn([user("q1")], [198, 199, 13])
    plan = chat.turn([user("q1"), assistant("bc"), user("q2")], [198])
    assert (plan.continuity, plan.divergence, plan.shared_len) == ("extended", None, 8)
    assert len(chat.rows()) == 1


def test_canonical_reply_extends_without_healing(chat: Any) -> None:
    chat.turn([user("q1")], [198, 199, 13])
    plan = chat.turn([user("q1"), assistant("bc"), user("q2")], [198])
    assert (plan.continuity, plan.divergence) == ("extended", None)


@pytest.mark.parametrize("output", [[2001], [2001, 13]])
def test_closer_stands_once_whether_the_stop_token_was_kept_or_trimmed(
    chat: Any, output: list[int]
) -> None:
    chat.turn([user("q1")], output)
    plan = chat.turn([user("q1"), assistant("b"), user("q2")], [2002])
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12, 2001, 13, 10, *Q2, 11, 12]


def test_closer_stands_once_after_whitespace_that_the_parser_stripped(chat: Any) -> None:
    chat.turn([user("q1")], [2001, 132, 13], reply=assistant("b"))
    plan = chat.turn([user("q1"), assistant("b"), user("q2")], [2002])
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12, 2001, 132, 13, 10, *Q2, 11, 12]
    assert plan.num_renders == 2


def test_three_turns_of_drift_make_one_row(chat: Any) -> None:
    said = [user("q1")]
    for question in ("q2", "q3", "q4"):
        chat.turn(said, [2001])
        said += [chat.replies[-1], user(question)]
    [(ids, mask)] = chat.rows()
    assert (len(ids), sum(mask)) == (20, 3)
    assert chat.continuities() == ["first", "healed", "healed"]


def test_reordered_arguments_are_healed(chat: Any) -> None:
    output = chat.renderer.encode('<write {"path": "a", "text": "b"}>').tolist()
    reply = assistant("", tool_calls=write(path="a", text="b"))
    chat.turn([user("q1")], output, reply)
    sent_back = assistant("", tool_calls=write("call_9", text="b", path="a"))
    plan = chat.turn([user("q1"), sent_back, tool("ok")], [2001])
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12, *output, 13, 14, 211, 207, 15, 12]
    assert plan.continuity == "healed"
    assert plan.divergence.cause == "tool_arguments_reordered"
    assert plan.divergence.message_index == 1
    assert len(chat.rows()) == 1


def test_reordered_arguments_fork_a_tree(toy: Any, converse: Any) -> None:
    chat = converse(toy, mode="tree")
    output = chat.renderer.encode('<write {"path": "a", "text": "b"}>').tolist()
    chat.turn([user("q1")], output, assistant("", tool_calls=write(path="a", text="b")))
    sent_back = assistant("", tool_calls=write(text="b", path="a"))
    plan = chat.turn([user("q1"), sent_back, tool("ok")], [2001])
    assert (plan.continuity, plan.divergence.cause) == ("forked", "tool_arguments_reordered")
    # Messages that differ to the letter are stored again, so the event tells what was rendered.
    assert (plan.shared_messages, plan.new_messages) == (1, (sent_back, tool("ok")))
    assert len(chat.rows()) == 2


def test_arguments_written_in_another_spacing_keep_the_sampled_call(chat: Any) -> None:
    output = chat.renderer.encode('<write {"path":"a"}>a❩').tolist()
    chat.turn([user("q1")], output, assistant("", tool_calls=write(path="a")))
    plan = chat.turn([user("q1"), chat.replies[-1], tool("ok")], [2001])
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12, *output, 14, 211, 207, 15, 12]
    assert (plan.continuity, plan.divergence.cause) == ("healed", "reply_reformatted")


TOOLS = [
    {"type": "function", "function": {"name": "read", "parameters": {}}},
    {"type": "function", "function": {"name": "write", "parameters": {}}},
]


def test_other_tools_are_a_reset(chat: Any) -> None:
    chat.turn([user("q1")], [2001], tools=TOOLS)
    plan = chat.turn([user("q1"), assistant("b"), user("q2")], [2002], tools=TOOLS[:1])
    assert (plan.continuity, plan.divergence.cause) == ("reset", "tools_changed")
    assert plan.tools == (TOOLS[0],)
    assert chat.session.tools("t1") == (TOOLS[0],)


def test_reordered_tools_are_the_same_tools(chat: Any) -> None:
    chat.turn([user("q1")], [2001], tools=TOOLS)
    plan = chat.turn([user("q1"), assistant("b"), user("q2")], [2002], tools=TOOLS[::-1])
    assert (plan.continuity, plan.shared_len, plan.tools) == ("healed", 6, None)


@pytest.mark.parametrize(
    ("edited", "cause", "at"),
    [
        ([user("q9"), assistant("b"), user("q2")], "content_edited", 0),
        ([user("q1"), assistant("z"), user("q2")], "content_edited", 1),
        ([user("q1"), user("q2")], "content_edited", 1),
    ],
)
def test_edited_history_is_rendered_as_it_came_and_healed_from_there(
    chat: Any, edited: list[ChatMessage], cause: str, at: int
) -> None:
    chat.turn([user("q1")], [2001])
    plan = chat.turn(edited, [2002])
    assert (
        plan.prompt_ids.tolist()
        == chat.renderer.encode(chat.renderer.render(edited, None, True)).tolist()
    )
    assert plan.continuity == "reset"
    assert (plan.divergence.cause, plan.divergence.message_index) == (cause, at)
    plan = chat.turn([*edited, assistant("c"), user("q3")], [2003])
    assert (plan.continuity, plan.parent_turn_id) == ("healed", "t1")
    assert [sum(mask) for _, mask in chat.rows()] == [1, 2]


def test_policy_error_refuses_an_edited_history(toy: Any, converse: Any) -> None:
    chat = converse(toy, nonlinear="error")
    chat.turn([user("q1")], [2001])
    with pytest.raises(NonlinearHistory, match="content_edited at message 0") as error:
        chat.turn([user("q9"), assistant("b"), user("q2")], [2002])
    assert error.value.divergence.cause == "content_edited"
    assert len(chat.session) == 1


def test_policy_passthrough_stops_healing_for_the_session(toy: Any, converse: Any) -> None:
    chat = converse(toy, nonlinear="passthrough")
    said = [user("q9"), assistant("b"), user("q2")]
    chat.turn([user("q1")], [2001])
    chat.turn(said, [2002])
    plan = chat.turn([*said, assistant("c"), user("q3")], [2003])
    assert chat.continuities() == ["first", "passthrough", "passthrough"]
    assert plan.prompt_ids.tolist()[-8:] == [12, 199, 13, 10, *Q3, 11, 12]
    assert [event.divergence is not None for event in chat.events] == [False, True, False]


def test_history_that_ends_with_the_reply_opens_the_next_one(chat: Any) -> None:
    chat.turn([user("q1")], [2001])
    plan = chat.turn([user("q1"), assistant("b")], [2002])
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12, 2001, 13, 12]


def test_retry_of_the_first_turn_repeats_its_prompt(chat: Any) -> None:
    chat.turn([user("q1")], [2001])
    plan = chat.turn([user("q1")], [2002])
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12]
    assert (plan.continuity, plan.parent_turn_id, plan.shared_len) == ("forked", "t0", 5)
    assert (plan.shared_messages, plan.new_messages, plan.divergence) == (1, (), None)
    assert chat.session.prompt_messages("t1") == [user("q1")]
    assert [(len(ids), sum(mask)) for ids, mask in chat.rows()] == [(6, 1), (6, 1)]


@pytest.mark.field_case("miles#1714")
def test_retried_turn_continues_the_parent_of_the_first_attempt(chat: Any) -> None:
    asked = [user("q1"), assistant("b"), user("q2")]
    chat.turn([user("q1")], [2001])
    first = chat.turn(asked, [2002])
    again = chat.turn(asked, [2003])
    assert again.prompt_ids.tolist() == first.prompt_ids.tolist()
    assert (again.parent_turn_id, again.shared_len, again.continuity) == ("t0", 6, "forked")
    assert again.num_renders == 0
    plan = chat.turn([*asked, assistant("d"), user("q3")], [2004])
    assert plan.parent_turn_id == "t2"
    assert plan.prompt_ids.tolist()[:6] == [10, *Q1, 11, 12, 2001]
    # The abandoned attempt is a leaf that nothing continues.
    assert [t for t in chat.session if not chat.session.sequences.is_continued(t)] == ["t1", "t3"]


def test_two_agents_under_one_key_heal_along_their_own_branches(chat: Any) -> None:
    agents = {"M": [system("M"), user("q1")], "X": [system("X"), user("q1")]}
    for question in ("q2", "q3", "q4"):
        for said in agents.values():
            chat.turn(said, [2001])
            said += [chat.replies[-1], user(question)]
    assert [(len(ids), sum(mask)) for ids, mask in chat.rows()] == [(23, 3), (23, 3)]
    assert chat.continuities() == ["first", "first", "healed", "healed", "healed", "healed"]


@pytest.mark.field_case("AReaL#1666")
def test_parallel_calls_from_one_parent_are_continued_each_on_its_own(chat: Any) -> None:
    chat.turn([user("q1")], [2001])
    base = [user("q1"), assistant("b")]
    for number, question in enumerate(("q2", "q3", "q4")):
        chat.turn([*base, user(question)], [2010 + number])
    for number, question in enumerate(("q2", "q3", "q4")):
        said = [*base, user(question), chat.replies[1 + number], user("q5")]
        plan = chat.turn(said, [2020])
        assert plan.parent_turn_id == f"t{1 + number}"
    assert [sum(mask) for _, mask in chat.rows()] == [3, 2, 2]
    assert chat.continuities()[1:] == ["healed", "forked", "forked", *["healed"] * 3]


def test_template_that_rewrites_the_beginning_keeps_the_saved_tokens(
    counting_toy: Any, converse: Any
) -> None:
    """It writes the number of messages first; the model goes on with the number that it saw."""
    chat = converse(counting_toy)
    chat.turn([user("q1")], [2001])
    plan = chat.turn([user("q1"), assistant("b"), user("q2")], [2002])
    # "1:" stays, though the template writes "3:" now.
    assert plan.prompt_ids.tolist() == [149, 158, 10, *Q1, 11, 12, 2001, 13, 10, *Q2, 11, 12]
    assert plan.continuity == "healed"
    assert plan.divergence == Divergence(
        cause="template_rewrote_history", message_index=0, token_index=0
    )
    assert plan.num_renders == 2
    assert len(chat.rows()) == 1


def test_policy_follow_begins_a_segment_where_the_template_rewrites(
    counting_toy: Any, converse: Any
) -> None:
    chat = converse(counting_toy, rewrites="follow", nonlinear="error")
    chat.turn([user("q1")], [2001])
    said = [user("q1"), assistant("b"), user("q2")]
    plan = chat.turn(said, [2002])
    full = counting_toy.encode(counting_toy.render(said, None, True))
    assert plan.prompt_ids.tolist() == full.tolist()
    assert plan.continuity == "reset"
    assert plan.divergence == Divergence(cause="template_rewrote_history", token_index=0)
    assert len(chat.rows()) == 2


def test_stripped_content_is_healed(chat: Any) -> None:
    output = chat.renderer.encode("  Hello there. \n").tolist()
    chat.turn([user("q1")], [*output, 13])
    plan = chat.turn([user("q1"), assistant("Hello there."), user("q2")], [2001])
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12, *output, 13, 10, *Q2, 11, 12]
    assert (plan.continuity, plan.divergence.cause) == ("healed", "whitespace")


def test_dropped_reasoning_is_healed(chat: Any) -> None:
    chat.turn([user("q1")], [2001, 2002], reply=assistant("c", reasoning="b"))
    plan = chat.turn([user("q1"), assistant("c"), user("q2")], [2003])
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12, 2001, 2002, 13, 10, *Q2, 11, 12]
    assert (plan.continuity, plan.divergence.cause) == ("healed", "reasoning_dropped")
    assert chat.session.history("t1")[1].reasoning == "b"


def test_edited_reasoning_is_a_reset(chat: Any) -> None:
    chat.turn([user("q1")], [2001, 2002], reply=assistant("c", reasoning="b"))
    plan = chat.turn([user("q1"), assistant("c", reasoning="no"), user("q2")], [2003])
    assert (plan.continuity, plan.divergence.cause) == ("reset", "content_edited")
    assert plan.divergence.message_index == 1


def test_null_and_empty_content_are_one(chat: Any) -> None:
    chat.turn([user("q1")], [2001], reply=assistant("", tool_calls=write(path="a")))
    plan = chat.turn([user("q1"), assistant("", tool_calls=write(path="a")), tool("ok")], [2002])
    assert plan.parent_turn_id == "t0"


@pytest.mark.field_case("OpenPipe ART#904")
def test_new_text_never_merges_with_saved_text(toy: Any, converse: Any) -> None:
    """A tokenizer that has a token for two line breaks keeps the saved one and the new one apart."""

    class Merging(type(toy)):  # type: ignore[misc]
        def encode(self, text: str) -> Any:
            return super().encode(text.replace("\n\n", chr(271 - 100)))

        def decode(self, ids: Any) -> str:
            return str(super().decode(ids)).replace(chr(271 - 100), "\n\n")

        def render(
            self, messages: Any, tools: Any, add_generation_prompt: bool, memo: Any = None
        ) -> str:
            return str(super().render(messages, tools, add_generation_prompt)).replace("a❩", "\n")

    chat = converse(Merging())
    chat.turn([user("q1")], [2001, 110], reply=assistant("b\n"))
    plan = chat.turn([user("q1"), assistant("b\n"), user("q2")], [2002])
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12, 2001, 110, 110, 10, *Q2, 11, 12]


def test_divergence_says_where_in_messages_and_tokens_it_begins(chat: Any) -> None:
    """t0 is tokens 0 to 5 asked and 6 sampled; t1 is message 2, asked at 7, and message 3, at 13."""
    said = [user("q1"), assistant("b", tool_calls=write(path="a", text="x")), user("q2")]
    chat.turn(said[:1], [2001], said[1])
    chat.turn(said, [102, 2002], reply=assistant("\nc"))
    later = [assistant("\nc"), user("q3")]
    [call] = said[1].tool_calls
    assert isinstance(call.arguments, dict)
    turned = msgspec.structs.replace(call, arguments=dict(reversed(call.arguments.items())))
    reordered = assistant("b", tool_calls=(turned,))
    plan = chat.plan([said[0], reordered, said[2], *later])
    assert plan.divergence == Divergence(
        cause="tool_arguments_reordered", message_index=1, token_index=5
    )
    start = chat.session.sequences.prompt_length("t1")
    stripped = chat.plan([*said, assistant("c"), user("q3")])
    assert stripped.divergence == Divergence(cause="whitespace", message_index=3, token_index=start)
    assert stripped.shared_len == start + 2


def test_compaction_that_keeps_the_latest_turn_is_named(chat: Any) -> None:
    said = [system("M"), user("q1")]
    for question in ("q2", "q3"):
        chat.turn(said, [2001])
        said += [chat.replies[-1], user(question)]
    plan = chat.plan([system("M"), user("a summary"), *said[3:]])
    assert (plan.continuity, plan.divergence.cause) == ("reset", "compaction")
    assert plan.divergence.message_index == 1


def test_compaction_is_named(chat: Any) -> None:
    said = [system("M"), user("q1")]
    for question in ("q2", "q3"):
        chat.turn(said, [2001])
        said += [chat.replies[-1], user(question)]
    plan = chat.turn([system("M"), user("a summary")], [2002])
    assert (plan.continuity, plan.divergence.cause) == ("reset", "compaction")
    assert plan.shared_messages <= 1


def test_removed_message_and_changed_system_are_named(chat: Any) -> None:
    said = [system("M"), user("q1"), assistant("x"), user("q2")]
    chat.turn(said, [2001])
    later = [assistant("b"), user("q3")]
    removed = chat.plan([system("M"), user("q2"), *later])
    assert (removed.divergence.cause, removed.divergence.message_index) == ("message_removed", 1)
    changed = chat.plan([system("N"), *said[1:], *later])
    assert (changed.divergence.cause, changed.divergence.message_index) == ("system_changed", 0)


def test_rolled_back_history_forks_from_the_earlier_turn(chat: Any) -> None:
    said = [user("q1")]
    for question in ("q2", "q3"):
        chat.turn(said, [2001])
        said += [chat.replies[-1], user(question)]
    chat.turn(said, [2001])
    plan = chat.turn([user("q1"), assistant("b"), user("q9")], [2002])
    assert (plan.parent_turn_id, plan.continuity) == ("t0", "forked")


def test_fast_path_takes_one_render_and_a_rewritten_reply_two(chat: Any) -> None:
    chat.turn([user("q1")], [2001, 13])
    assert chat.plan([user("q1"), assistant("b"), user("q2")]).num_renders == 1
    chat.turn([user("q9")], [2001, 110, 13], reply=assistant("b"))
    assert chat.plan([user("q9"), assistant("b"), user("q2")]).num_renders == 2


def test_foreign_assistant_messages_in_the_prompt_are_context(chat: Any) -> None:
    said = [user("q1"), assistant("x"), user("q2")]
    chat.turn(said, [2001])
    plan = chat.turn([*said, assistant("b"), user("q1"), assistant("y"), user("q3")], [2002])
    assert plan.parent_turn_id == "t0"
    assert len(chat.rows()) == 1
    assert sum(chat.rows()[0][1]) == 2


def test_text_dropped_beside_a_call_is_healed(chat: Any) -> None:
    """Some agents keep the calls of such a message only; what was sampled stays."""
    output = chat.renderer.encode('so<write {"path": "a"}>').tolist()
    calls = write(path="a")
    chat.turn([user("q1")], output, assistant("so", tool_calls=calls))
    said = [user("q1"), assistant("", tool_calls=calls), tool("ok")]
    plan = chat.turn(said, [2001])
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12, *output, 13, 14, 211, 207, 15, 12]
    assert (plan.continuity, plan.divergence.cause) == ("healed", "text_dropped")
    assert plan.divergence.message_index == 1
    assert chat.session.history("t1")[1].content == "so"
    chat.turn([*said, chat.replies[-1], user("q2")], [2002])
    assert chat.continuities()[2] == "healed"
    assert len(chat.rows()) == 1


@pytest.mark.parametrize(
    ("text", "name"), [("no", "write"), ("", "delete"), ("", "")], ids=["text", "call", "no call"]
)
def test_message_whose_text_or_call_is_another_one_is_a_reset(
    chat: Any, text: str, name: str
) -> None:
    chat.turn([user("q1")], [2001], assistant("so", tool_calls=write(path="a")))
    calls = (ToolCall(name=name, arguments={"path": "a"}),) if name else ()
    plan = chat.turn([user("q1"), assistant(text, tool_calls=calls), tool("ok")], [2002])
    assert (plan.continuity, plan.divergence.cause) == ("reset", "content_edited")
    assert plan.divergence.message_index == 1


def test_answers_that_differ_in_their_text_alone_are_told_apart(chat: Any) -> None:
    calls = write(path="a")
    for number, text in enumerate(("so", "well")):
        chat.turn([user("q1")], [2001 + number], assistant(text, tool_calls=calls))
    for number, text in enumerate(("so", "well")):
        plan = chat.plan([user("q1"), assistant(text, tool_calls=calls), tool("ok")])
        assert plan.parent_turn_id == f"t{number}"
    # Where the text is gone, the latest answer is the likely one.
    plan = chat.plan([user("q1"), assistant("", tool_calls=calls), tool("ok")])
    assert plan.parent_turn_id == "t1"


def test_text_beside_a_call_counts_where_the_rules_say_so(toy: Any, converse: Any) -> None:
    strict = CosmeticRules(is_dropped_call_text_cosmetic=False)
    chat = converse(toy, session=Session("s1", "r1", strict))
    chat.turn([user("q1")], [2001], assistant("so", tool_calls=write(path="a")))
    plan = chat.turn([user("q1"), assistant("", tool_calls=write(path="a")), tool("ok")], [2002])
    assert (plan.continuity, plan.divergence.cause) == ("reset", "text_dropped")


def test_edit_behind_a_stored_turn_forks_there_and_says_what_was_edited(chat: Any) -> None:
    """An old tool result was shortened: what stands before it keeps its sampled tokens."""
    said = [user("q1"), assistant("", tool_calls=write(path="a"))]
    chat.turn(said[:1], '<write {"path": "a"}>', said[1])
    chat.turn([*said, tool("long")], [2001])
    edited = [*said, tool("cut"), assistant("b"), user("q2")]
    plan = chat.turn(edited, [2002])
    assert (plan.continuity, plan.parent_turn_id) == ("forked", "t0")
    assert plan.shared_len == chat.session.sequences.length("t0")
    assert (plan.divergence.cause, plan.divergence.message_index) == ("content_edited", 2)
    assert [sum(mask) for _, mask in chat.rows()][1:] == [1]
    plan = chat.turn([*edited, assistant("c"), user("q3")], [2003])
    assert (plan.continuity, plan.parent_turn_id) == ("healed", "t2")


@pytest.mark.field_case("NeMo RL#3063")
def test_episode_of_thirty_turns_survives_one_edited_message(chat: Any) -> None:
    said = [user("q0")]
    for number in range(30):
        chat.turn(said, [2001])
        said = [*said, chat.replies[-1], user(f"q{number + 1}")]
        if number == 16:
            said[-3] = user("other")
    found = chat.rows()
    assert [sum(mask) for _, mask in found] == [17, 13]
    assert chat.continuities().count("forked") == 1
    assert chat.causes()[17] == "content_edited"


@pytest.mark.field_case("prime-rl#2975")
def test_shared_turns_of_three_branches_are_trained_once(chat: Any) -> None:
    said = [user("q1")]
    for question in ("q2", "q3"):
        chat.turn(said, [2001])
        said = [*said, chat.replies[-1], user(question)]
    for number, question in enumerate(("x", "y", "z")):
        chat.turn([*said[:-1], user(question)], [2010 + number])
    found = chat.rows()
    assert [sum(mask) for _, mask in found] == [3, 1, 1]
    # The shared outputs are context in the other two, and the same tokens.
    shared = chat.session.sequences.full("t1").tolist()
    assert all(ids[: len(shared)] == shared for ids, _ in found)


@pytest.mark.field_case("SkyRL#570")
def test_closing_mark_that_the_model_did_not_sample_is_masked(chat: Any) -> None:
    chat.turn([user("q1")], [2001])
    chat.turn([user("q1"), assistant("b"), user("q2")], [2002, 13])
    [(ids, mask)] = chat.rows()
    assert [(i, m) for i, m in zip(ids, mask, strict=True) if i in (13, 2001, 2002)] == [
        (2001, 1),
        (13, 0),
        (2002, 1),
        (13, 1),
    ]


@pytest.mark.field_case("miles#784")
def test_stop_mark_that_opens_the_next_message_stands_once(toy: Any, converse: Any) -> None:
    """GLM closes a reply with the mark of whoever speaks next."""

    class Unclosed(type(toy)):  # type: ignore[misc]
        def render(
            self, messages: Any, tools: Any, add_generation_prompt: bool, memo: Any = None
        ) -> str:
            text = super().render(messages, tools, add_generation_prompt)
            return str(text).replace("a❩", "")

    chat = converse(Unclosed())
    chat.turn([user("q1")], [2001, 14], reply=assistant("b"))
    plan = chat.turn([user("q1"), assistant("b"), tool("ok")], [2002, 10], reply=assistant("c"))
    assert plan.prompt_ids.tolist() == [10, *Q1, 11, 12, 2001, 14, 211, 207, 15, 12]
    # The mark was for a tool, but a user spoke.
    chat = converse(Unclosed())
    chat.turn([user("q1")], [2001, 14], reply=assistant("b"))
    plan = chat.turn([user("q1"), assistant("b"), user("q2")], [2002])
    assert plan.prompt_ids.tolist()[:7] == [10, *Q1, 11, 12, 2001, 14]
    assert plan.prompt_ids.tolist()[-4:] == [*Q2, 11, 12]

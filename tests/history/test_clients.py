"""Property tests: whatever a client does to the history without changing its meaning, it heals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turnfold.history.session import Session
from turnfold.schemas.messages import ChatMessage, ToolCall

MUTATIONS: dict[str, Callable[[ChatMessage], ChatMessage]] = {
    "faithful": lambda reply: reply,
    "keys reordered": lambda reply: msgspec.structs.replace(
        reply, tool_calls=tuple(_reordered(call) for call in reply.tool_calls)
    ),
    "arguments as text": lambda reply: msgspec.structs.replace(
        reply, tool_calls=tuple(_as_text(call) for call in reply.tool_calls)
    ),
    "arguments as spaced text": lambda reply: msgspec.structs.replace(
        reply, tool_calls=tuple(_as_text(call, indent=2) for call in reply.tool_calls)
    ),
    "stripped": lambda reply: msgspec.structs.replace(reply, content=reply.content.strip()),
    "reasoning dropped": lambda reply: msgspec.structs.replace(reply, reasoning=""),
    "text beside a call dropped": lambda reply: (
        msgspec.structs.replace(reply, content="") if reply.tool_calls else reply
    ),
    "ids replaced": lambda reply: msgspec.structs.replace(
        reply, tool_calls=tuple(msgspec.structs.replace(c, id="other") for c in reply.tool_calls)
    ),
}


def _reordered(call: ToolCall) -> ToolCall:
    assert isinstance(call.arguments, dict)
    return msgspec.structs.replace(call, arguments=dict(reversed(call.arguments.items())))


def _as_text(call: ToolCall, indent: int = 0) -> ToolCall:
    written = msgspec.json.encode(call.arguments).decode()
    if indent:
        written = msgspec.json.format(written, indent=indent)
    return msgspec.structs.replace(call, arguments=written)


def system(text: str) -> ChatMessage:
    return ChatMessage(role="system", content=text)


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


@st.composite
def replies(draw: st.DrawFn) -> tuple[str, ChatMessage]:
    """What a model writes, and how it is parsed: reasoning, text and a call, each or none."""
    reasoning = draw(st.sampled_from(["", "The user is there"]))
    content = draw(st.sampled_from(["", "Hello there", " Hello there \n"]))
    has_call = draw(st.booleans())
    spaced = draw(st.booleans())
    arguments = {"city": draw(st.sampled_from(["Paris", "Zürich"])), "days": 3}
    text = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    text += content
    calls: tuple[ToolCall, ...] = ()
    if has_call:
        written = msgspec.json.encode(arguments).decode()
        written = written.replace(":", ": ").replace(",", ", ") if spaced else written
        text += "\n" if content else ""
        text += f'<tool_call>\n{{"name": "get_weather", "arguments": {written}}}\n</tool_call>'
        calls = (ToolCall(name="get_weather", arguments=arguments, id=f"call_{draw(st.uuids())}"),)
    text += draw(st.sampled_from(["<|im_end|>", ""]))
    reply = ChatMessage(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
    return text, reply


steps = st.lists(
    st.tuples(
        st.sampled_from(["continue", "continue", "continue", "retry", "roll back"]),
        st.integers(0, 1),
        st.sampled_from(sorted(MUTATIONS)),
        replies(),
        st.integers(0, 7),
    ),
    min_size=1,
    max_size=8,
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=steps)
def test_two_agents_that_mutate_retry_and_roll_back_never_lose_a_token(
    bpe: Any, converse: Any, split: Any, steps: list[Any]
) -> None:
    chat = converse(bpe)
    # Per agent: the next request, and the turn whose reply it ends with.
    requests: dict[int, list[tuple[list[ChatMessage], str | None]]] = {
        0: [([system("You are a helpful assistant."), user("hello")], None)],
        1: [([system("Find the weather"), user("hello")], None)],
    }
    for number, (action, agent, mutation, (text, reply), seed) in enumerate(steps):
        opened = requests[agent]
        said, parent = opened[-1]
        if action == "retry" and len(opened) > 1:
            said, parent = opened[-2]
        elif action == "roll back":
            said, parent = opened[seed % len(opened)]
        ids = split(bpe, text, lambda index, seed=seed: (index + seed) % 3 == 0)
        plan = chat.turn(said, ids, reply)
        _check(chat, plan, parent)
        answer = "tool" if reply.tool_calls else "user"
        next_message = ChatMessage(role=answer, content=f"text {number}")
        opened.append(([*said, MUTATIONS[mutation](reply), next_message], f"t{number}"))
    _check_fold(chat)


def _check(chat: Any, plan: Any, parent: str | None) -> None:
    sequences = chat.session.sequences
    assert plan.continuity in ("first", "extended", "healed", "forked"), plan
    if parent is None:
        assert plan.continuity in ("first", "forked")
        return
    # Two attempts may have got the same answer; then no one can tell which of them is continued.
    session = chat.session
    continued = session.history(plan.parent_turn_id)
    assert session.chain(continued, None) == session.chain(session.history(parent), None)
    saved = sequences.full(plan.parent_turn_id).tolist()
    assert plan.prompt_ids.tolist()[: len(saved)] == saved
    assert plan.continuity != "first"
    tail = chat.renderer.decode(plan.prompt_ids[len(saved) :])
    assert tail.endswith("<|im_end|>\n<|im_start|>assistant\n")
    # One closing mark for the reply, one for each message after it.
    whole = chat.renderer.decode(plan.prompt_ids)
    assert whole.count("<|im_end|>") == whole.count("<|im_start|>") - 1


def _check_fold(chat: Any) -> None:
    """The fold of the events, doubled or not, is the session that served the turns."""
    doubled = Session("s1", "r1")
    for event in chat.events:
        assert doubled.apply(event)
        assert not doubled.apply(event)
    served = chat.session
    assert list(doubled) == list(served)
    for turn_id in served:
        assert doubled.history(turn_id) == served.history(turn_id)
        assert doubled.sequences.spans(turn_id) == served.sequences.spans(turn_id)
        assert doubled.sequences.full(turn_id).tolist() == served.sequences.full(turn_id).tolist()
        history = served.history(turn_id)
        assert doubled.lookup(history, None) == served.lookup(history, None)


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(conversation=st.lists(st.tuples(replies(), st.sampled_from(sorted(MUTATIONS))), max_size=6))
def test_uninterrupted_conversation_is_one_row(
    bpe: Any, converse: Any, split: Any, conversation: list[Any]
) -> None:
    chat = converse(bpe)
    said = [user("hello")]
    for number, ((text, reply), mutation) in enumerate(conversation):
        chat.turn(said, split(bpe, text, lambda index: index % 2 == 0), reply)
        role = "tool" if reply.tool_calls else "user"
        said = [*said, MUTATIONS[mutation](reply), ChatMessage(role=role, content=f"{number}")]
    # An output of no tokens is no reason to train, so it makes no row of its own either.
    assert len(chat.rows()) <= 1
    assert set(chat.continuities()) <= {"first", "extended", "healed"}


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(conversation=st.lists(st.tuples(replies(), st.sampled_from(sorted(MUTATIONS))), max_size=5))
def test_tree_mode_gives_the_engine_what_the_client_sent(
    bpe: Any, converse: Any, split: Any, conversation: list[Any]
) -> None:
    chat = converse(bpe, mode="tree")
    said = [user("hello")]
    for number, ((text, reply), mutation) in enumerate(conversation):
        plan = chat.turn(said, split(bpe, text, lambda index: index % 2 == 0), reply)
        assert bpe.decode(plan.prompt_ids) == bpe.render(said, None, True)
        assert chat.session.prompt_messages(f"t{number}") == said
        role = "tool" if reply.tool_calls else "user"
        said = [*said, MUTATIONS[mutation](reply), ChatMessage(role=role, content=f"{number}")]
    assert "reset" not in chat.continuities()
    _check_fold(chat)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edited=st.integers(0, 4), num_turns=st.integers(1, 4))
def test_edited_message_breaks_the_history_at_its_own_turn(
    toy: Any, converse: Any, edited: int, num_turns: int
) -> None:
    chat = converse(toy)
    said = [user("q0")]
    for number in range(num_turns):
        chat.turn(said, [2001])
        said = [*said, chat.replies[-1], user(f"q{number + 1}")]
    index = edited % (len(said) - 1)
    changed = [*said]
    changed[index] = msgspec.structs.replace(said[index], content="edited")
    plan = chat.turn(changed, [2002])
    # Turn t of the session ends with message 2t + 1, so all turns before the edit still stand.
    survivor = index // 2 - 1
    if survivor >= 0:
        assert (plan.continuity, plan.parent_turn_id) in (
            ("forked", f"t{survivor}"),
            ("healed", f"t{survivor}"),
        )
    else:
        assert plan.continuity == "reset"
        assert (plan.divergence.cause, plan.divergence.message_index) == ("content_edited", index)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    conversation=st.lists(
        st.tuples(replies(), st.sampled_from(sorted(MUTATIONS))), min_size=3, max_size=5
    ),
    has_system=st.booleans(),
    num_kept=st.integers(0, 1),
)
def test_compaction_begins_one_row_and_the_conversation_goes_on_there(
    bpe: Any,
    converse: Any,
    split: Any,
    conversation: list[Any],
    has_system: bool,
    num_kept: int,
) -> None:
    """A summary takes the place of all turns, or of all but the latest."""
    chat = converse(bpe)
    head = [system("You are a helpful assistant.")] if has_system else []
    said = [*head, user("hello")]
    for number, ((text, reply), mutation) in enumerate(conversation):
        chat.turn(said, split(bpe, text, lambda index: index % 2 == 0), reply)
        role = "tool" if reply.tool_calls else "user"
        said = [*said, MUTATIONS[mutation](reply), ChatMessage(role=role, content=f"{number}")]
    compacted = [*head, user("what was said so far"), *said[len(said) - 1 - 2 * num_kept :]]
    plan = chat.turn(compacted, "Hello there<|im_end|>")
    if has_system or num_kept:
        assert (plan.continuity, plan.divergence.cause) == ("reset", "compaction")
        assert plan.divergence.message_index == len(head)
    else:
        # Nothing in it says that it is not the first request of another agent.
        assert (plan.continuity, plan.divergence) == ("first", None)
    assert bpe.decode(plan.prompt_ids) == bpe.render(compacted, None, True)
    later = chat.turn([*compacted, chat.replies[-1], user("thanks")], "Yes<|im_end|>")
    assert later.parent_turn_id == f"t{len(conversation)}"
    assert len(chat.rows()) <= 2
    _check_fold(chat)

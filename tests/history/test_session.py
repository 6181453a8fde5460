"""The fold of a session and the lookup of the turn that a request continues."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest

from turnfold.history.canonical import CosmeticRules, canonical_message
from turnfold.history.divergence import Difference
from turnfold.history.errors import HistoryError
from turnfold.history.session import Match, Session
from turnfold.schemas.events import TurnCompleted
from turnfold.schemas.messages import ChatMessage, Tool, ToolCall
from turnfold.schemas.wire import Logprobs, TokenIds


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def assistant(text: str = "", call_id: str = "", **fields: Any) -> ChatMessage:
    calls = (ToolCall(name="f", arguments={"a": 1}, id=call_id),) if call_id else ()
    return ChatMessage(role="assistant", content=text, tool_calls=calls, **fields)


def turn(
    turn_id: str,
    messages: list[ChatMessage],
    reply: ChatMessage | None,
    parent: str | None = None,
    shared: tuple[int, int] = (0, 0),
    tools: tuple[Tool, ...] | None = None,
) -> TurnCompleted:
    """`shared` is (tokens, messages); the prompt tail is one token, and so is the output."""
    return TurnCompleted(
        rollout_id="r7",
        event_id=f"e-{turn_id}",
        session_id="s1",
        turn_id=turn_id,
        parent_turn_id=parent,
        shared_len=shared[0],
        prompt_tail=TokenIds.of([1]),
        output_ids=TokenIds.of([2]),
        logprobs=Logprobs.of([-0.1]),
        num_prompt_tokens=shared[0] + 1,
        shared_messages=shared[1],
        new_messages=tuple(messages),
        reply=reply,
        tools=tools,
    )


def folded(*events: TurnCompleted, rules: CosmeticRules = CosmeticRules()) -> Session:
    session = Session("s1", "r7", rules)
    for event in events:
        session.apply(event)
    return session


TWO_TURNS = (
    turn("t0", [user("q1")], assistant("r1")),
    turn("t1", [user("q2")], assistant("r2"), "t0", (2, 2)),
)


def test_history_is_rebuilt_from_parent_and_new_messages() -> None:
    session = folded(*TWO_TURNS)
    assert session.prompt_messages("t1") == [user("q1"), assistant("r1"), user("q2")]
    assert session.history("t1") == [user("q1"), assistant("r1"), user("q2"), assistant("r2")]


def test_lookup_finds_the_deepest_stored_history() -> None:
    session = folded(*TWO_TURNS)
    said = [user("q1"), assistant("r1"), user("q2"), assistant("r2"), user("q3")]
    assert session.lookup(said, None) == Match("t1", 4)
    assert session.lookup([*said[:2], user("q9")], None) == Match("t0", 2)
    assert session.lookup([user("q1")], None) is None
    assert session.lookup([user("q9"), *said[1:]], None) is None


@pytest.mark.parametrize("num_branches", [1, 200])
def test_lookup_reads_the_request_once_whatever_the_number_of_branches(
    num_branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    branches = [
        turn(f"t{number}", [user(f"q{number}")], assistant("r"), "root", (2, 2))
        for number in range(num_branches)
    ]
    session = folded(turn("root", [user("q")], assistant("r")), *branches)
    read: list[ChatMessage] = []

    def canonical(message: ChatMessage, rules: CosmeticRules) -> bytes:
        read.append(message)
        return canonical_message(message, rules)

    monkeypatch.setattr("turnfold.history.canonical.canonical_message", canonical)
    said = [user("q"), assistant("r"), user("q0"), assistant("r"), user("next")]
    assert session.lookup(said, None) == Match("t0", 4)
    assert read == said


def test_lookup_says_what_was_cosmetic() -> None:
    session = folded(turn("t0", [user("q1")], assistant(" r1", reasoning="why")))
    match = session.lookup([user("q1"), assistant("r1"), user("q2")], None)
    assert match == Match(
        "t0", 2, (Difference(1, "whitespace"), Difference(1, "reasoning_dropped"))
    )


def test_lookup_among_equal_answers_goes_by_call_ids_then_by_the_latest() -> None:
    session = folded(
        turn("t0", [user("q1")], assistant(call_id="call_a")),
        turn("t1", [], assistant(call_id="call_b"), "t0", (1, 1)),
        turn("t2", [], assistant(call_id="call_c"), "t0", (1, 1)),
    )
    for call_id, turn_id in (("call_b", "t1"), ("call_a", "t0"), ("", "t2")):
        reply = assistant(call_id=call_id or "call_z")
        found = session.lookup([user("q1"), reply, user("q2")], None)
        assert found is not None
        assert found.turn_id == turn_id


def test_lookup_prefers_an_answer_that_nothing_continues_yet() -> None:
    session = folded(
        turn("t0", [user("q1")], assistant("r1")),
        turn("t1", [], assistant("r1"), "t0", (1, 1)),
        turn("t2", [user("q2")], assistant("r2"), "t1", (3, 2)),
    )
    found = session.lookup([user("q1"), assistant("r1"), user("q9")], None)
    assert found is not None
    assert found.turn_id == "t0"


def test_other_tools_hide_a_history() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    session = folded(turn("t0", [user("q1")], assistant("r1"), tools=(tool,)))
    said = [user("q1"), assistant("r1"), user("q2")]
    assert session.lookup(said, None) is None
    assert session.lookup(said, [tool]) == Match("t0", 2)


def test_turn_with_other_tools_than_its_parent_is_found_under_its_own() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    session = folded(
        turn("t0", [user("q1")], assistant("r1")),
        turn("t1", [user("q2")], assistant("r2"), "t0", (1, 2), tools=(tool,)),
    )
    said = [user("q1"), assistant("r1"), user("q2"), assistant("r2"), user("q3")]
    assert session.lookup(said, [tool]) == Match("t1", 4)
    assert session.lookup(said, None) == Match("t0", 2)


def test_strict_rules_do_not_heal() -> None:
    stored = turn("t0", [user("q1")], assistant("r1 ", reasoning="why"))
    said = [user("q1"), assistant("r1", reasoning="why"), user("q2")]
    strict = CosmeticRules(is_edge_whitespace_cosmetic=False)
    assert folded(stored, rules=strict).lookup(said, None) is None
    assert folded(stored).lookup(said, None) is not None


def test_retried_request_is_known() -> None:
    session = folded(*TWO_TURNS)
    assert session.retried([user("q1")], None) == "t0"
    assert session.retried([user("q1"), assistant("r1 "), user("q2")], None) == "t1"
    assert session.retried([user("q1"), assistant("r1")], None) is None


def test_turn_without_messages_counts_in_tokens_only() -> None:
    session = folded(turn("t0", [], None))
    assert len(session) == 1
    assert session.sequences.full("t0").tolist() == [1, 2]
    assert session.lookup([user("q1")], None) is None


def test_redelivered_turn_changes_nothing() -> None:
    session = folded(*TWO_TURNS, *TWO_TURNS)
    assert list(session) == ["t0", "t1"]
    assert session.lookup(
        [user("q1"), assistant("r1"), user("q2"), assistant("r2")], None
    ) == Match("t1", 4)


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (
            turn("t3", [], None, "t9", (2, 0)),
            "rollout r7, turn t3: parent t9 is not in this session",
        ),
        (
            turn("t3", [], None, "t0", (2, 3)),
            "rollout r7, turn t3: shared_messages: expected 0 to 2, got 3",
        ),
        (turn("t3", [], None, None, (0, 1)), "shared_messages: expected 0 to 0, got 1"),
        (turn("t3", [], None, "t0", (3, 2)), "shared_len: expected at most 2"),
    ],
)
def test_contradiction_is_refused_and_changes_nothing(event: TurnCompleted, problem: str) -> None:
    session = folded(*TWO_TURNS)
    with pytest.raises(HistoryError) as error:
        session.apply(event)
    assert problem in str(error.value)
    assert list(session) == list(session.sequences) == ["t0", "t1"]


def test_messages_are_stored_once() -> None:
    session = Session("s1")
    parent, tokens, count = None, 0, 0
    for number in range(100):
        event = turn(f"t{number}", [user("q")], assistant("r"), parent, (tokens, count))
        session.apply(event)
        parent, tokens, count = f"t{number}", tokens + 2, count + 2
    assert sum(len(item.own) for item in session._turns.values()) == 200
    assert sum(len(item.digests) for item in session._turns.values()) == 300
    assert len(session.history("t99")) == 200


def test_memory_of_a_session_is_linear_in_its_final_tokens(bpe: Any, converse: Any) -> None:
    """Twice the turns take twice the memory, though every request repeats the whole history."""
    _bytes_of_session(converse(bpe), 4)  # imports, and what is learnt of the template
    used = {num_turns: _bytes_of_session(converse(bpe), num_turns) for num_turns in (20, 40, 80)}
    assert used[80] - used[40] < 1.3 * 2 * (used[40] - used[20])


def _bytes_of_session(chat: Any, num_turns: int) -> int:
    said = [ChatMessage(role="user", content="hello")]
    words = "read files and answer the question of the user " * 10
    tracemalloc.start()
    try:
        for number in range(num_turns):
            chat.turn(said, f"The weather in Paris is sunny, {number}.<|im_end|>")
            question = ChatMessage(role="user", content=f"{words}{number}")
            said = [*said, chat.replies[-1], question]
        assert len(chat.rows()) == 1
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()

"""Token sequences: rebuilt from deltas, shared by parent links, found by exact prefix."""

from __future__ import annotations

from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnfold.history.errors import HistoryError
from turnfold.history.sequences import Prefix, Span, TokenStore
from turnfold.schemas.events import TurnCompleted, VersionSpan
from turnfold.schemas.wire import Logprobs, TokenIds


def turn(
    turn_id: str,
    tail: list[int],
    output: list[int],
    parent: str | None = None,
    shared: int = 0,
    **changed: Any,
) -> TurnCompleted:
    fields: dict[str, Any] = {
        "rollout_id": "r7",
        "event_id": f"e-{turn_id}",
        "session_id": "s1",
        "turn_id": turn_id,
        "parent_turn_id": parent,
        "shared_len": shared,
        "prompt_tail": TokenIds.of(tail),
        "output_ids": TokenIds.of(output),
        "logprobs": Logprobs.of([-0.1] * len(output)),
        "num_prompt_tokens": shared + len(tail),
    }
    return TurnCompleted(**{**fields, **changed})


def store(*turns: TurnCompleted) -> TokenStore:
    sequences = TokenStore("r7")
    for event in turns:
        sequences.add(event)
    return sequences


def ids(*tokens: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.array(tokens, dtype=np.uint32)


def test_clean_extension_is_rebuilt_from_its_parent() -> None:
    sequences = store(turn("t0", [1, 2], [3, 4]), turn("t1", [5], [6], "t0", 4))
    assert sequences.full("t1").tolist() == [1, 2, 3, 4, 5, 6]
    assert sequences.prompt("t1").tolist() == [1, 2, 3, 4, 5]
    assert sequences.output("t1").tolist() == [6]
    assert sequences.is_extension("t1")
    assert sequences.is_continued("t0")
    assert not sequences.is_continued("t1")


def test_fork_inside_a_parent_keeps_only_its_head() -> None:
    sequences = store(
        turn("t0", [1, 2], [3, 4]), turn("t1", [5], [6], "t0", 4), turn("t2", [9], [7], "t1", 2)
    )
    assert sequences.full("t2").tolist() == [1, 2, 9, 7]
    assert not sequences.is_extension("t2")
    assert sequences.children("t1") == ("t2",)


def test_spans_say_who_put_each_token_there() -> None:
    sequences = store(turn("t0", [1, 2], [3, 4]), turn("t1", [5], [6], "t0", 4))
    assert sequences.spans("t1") == (
        Span("t0", 0, 2, False),
        Span("t0", 2, 4, True),
        Span("t1", 4, 5, False),
        Span("t1", 5, 6, True),
    )


def test_spans_of_a_fork_inside_an_output_end_where_it_forks() -> None:
    sequences = store(turn("t0", [1], [2, 3]), turn("t1", [9], [4], "t0", 2))
    assert sequences.spans("t1") == (
        Span("t0", 0, 1, False),
        Span("t0", 1, 2, True),
        Span("t1", 2, 3, False),
        Span("t1", 3, 4, True),
    )


def test_whole_prompt_without_parent_finds_its_longest_prefix() -> None:
    sequences = store(turn("t0", [1, 2], [3]), turn("t1", [1, 2, 3, 4], [5]))
    assert sequences.parent("t1") == Prefix("t0", 3)
    assert sequences.is_extension("t1")
    assert sequences.full("t1").tolist() == [1, 2, 3, 4, 5]


def test_branches_share_the_parent_that_they_repeat() -> None:
    sequences = store(
        turn("t0", [1], [2]), turn("t1", [1, 2, 30], [40]), turn("t2", [1, 2, 31], [41])
    )
    assert sequences.parent("t1") == sequences.parent("t2") == Prefix("t0", 2)
    assert sequences.children("t0") == ("t1", "t2")


def test_clean_branch_extends_the_parent_that_a_drifted_one_did_not() -> None:
    sequences = store(turn("t0", [1], [2]), turn("t1", [1, 9, 3], [4]), turn("t2", [1, 2, 5], [6]))
    assert sequences.parent("t1") == Prefix("t0", 1)
    assert sequences.parent("t2") == Prefix("t0", 2)
    assert [turn_id for turn_id in sequences if sequences.is_extension(turn_id)] == ["t2"]


def test_unrelated_prompt_has_no_parent() -> None:
    sequences = store(turn("t0", [1, 2], [9]), turn("t1", [3, 4], [8]))
    assert sequences.parent("t1") is None


def test_long_drift_is_found_at_the_token_where_it_begins() -> None:
    sequences = store(turn("t0", [1, 2], [9] * 1500), turn("t1", [1, 2, 8, 3], [7]))
    assert sequences.parent("t1") == Prefix("t0", 2)
    assert sequences.full("t1").tolist() == [1, 2, 8, 3, 7]
    assert sequences.length("t0") == 1502


def test_whole_sequence_wins_over_an_inner_point_of_equal_length() -> None:
    sequences = store(turn("t0", [1, 2], [3]), turn("t1", [4], [5], "t0", 2))
    sequences.add(turn("t2", [], [3, 6], "t0", 2))
    assert sequences.longest_prefix(ids(1, 2, 3, 9)) == Prefix("t0", 3)


def test_latest_of_equal_sequences_is_the_prefix() -> None:
    sequences = store(turn("t0", [1], [2]), turn("t1", [], [2], "t0", 1))
    assert sequences.longest_prefix(ids(1, 2, 3)) == Prefix("t1", 2)


def test_redelivered_turn_changes_nothing() -> None:
    again = turn("t1", [5], [6], "t0", 4)
    sequences = store(turn("t0", [1, 2], [3, 4]), again)
    assert sequences.add(again) is False
    assert sequences.add(turn("t0", [1, 2], [3, 4])) is False
    assert list(sequences) == ["t0", "t1"]
    assert sequences.children("t0") == ("t1",)


def test_redelivered_turn_whose_parent_was_found_changes_nothing() -> None:
    again = turn("t1", [1, 2, 3, 4], [5])
    sequences = store(turn("t0", [1, 2], [3]), again)
    assert sequences.add(again) is False


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        (turn("t3", [5], [6], "t9", 4), "rollout r7, turn t3: parent t9 is not in this rollout"),
        (turn("t3", [5], [6], "t3", 1), "rollout r7, turn t3: parent t3 is not in this rollout"),
        (turn("t3", [5], [6], "t0", 5), "shared_len: expected at most 4, the length of parent t0"),
        (turn("t3", [5], [6], None, 2), "shared_len: expected 0 for a turn without parent, got 2"),
        (
            turn("t3", [5], [6], "t0", 4, num_prompt_tokens=6),
            "num_prompt_tokens: expected 5 (shared_len 4 + 1 in prompt_tail), got 6",
        ),
        (
            turn("t3", [5], [6], logprobs=Logprobs.of([])),
            "logprobs: expected 1, one per output token, got 0",
        ),
        (turn("t0", [1, 2], [3, 5]), "rollout r7, turn t0: was recorded before with other tokens"),
    ],
)
def test_contradiction_names_rollout_turn_and_what_was_expected(
    event: TurnCompleted, problem: str
) -> None:
    sequences = store(turn("t0", [1, 2], [3, 4]))
    with pytest.raises(HistoryError) as error:
        sequences.add(event)
    assert problem in str(error.value)
    assert list(sequences) == ["t0"]


def test_memory_is_that_of_the_final_tokens() -> None:
    sequences = TokenStore()
    parent: str | None = None
    shared = 0
    for number in range(200):
        sequences.add(turn(f"t{number}", [1] * 50, [2] * 50, parent, shared))
        parent, shared = f"t{number}", shared + 100
    held = sum(node.own.nbytes for node in sequences._nodes.values())
    assert held == 200 * 100 * 4


def test_thirty_turns_with_one_that_does_not_continue_make_one_fork() -> None:
    """Turn 17 drifted; the turns before it stay one sequence and the ones after it another."""
    sequences = TokenStore()
    history: list[int] = []
    for number in range(30):
        prompt = [*history[:40], 77, *history[41:], 1] if number == 17 else [*history, 1]
        sequences.add(turn(f"t{number}", prompt, [2, 3]))
        history = [*prompt, 2, 3]
    assert sequences.parent("t17") == Prefix("t13", 40)
    leaves = [turn_id for turn_id in sequences if not sequences.is_continued(turn_id)]
    assert leaves == ["t16", "t29"]


tokens = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20), tokens, tokens), max_size=12))
def test_any_tree_of_deltas_gives_the_sequences_of_a_plain_copy(
    steps: list[tuple[int, int, list[int], list[int]]],
) -> None:
    sequences, plain = TokenStore(), dict[str, list[int]]()
    for number, (pick, cut, tail, output) in enumerate(steps):
        turn_id = f"t{number}"
        parent = f"t{pick % number}" if number else None
        shared = cut % (len(plain[parent]) + 1) if parent else 0
        plain[turn_id] = (plain[parent][:shared] if parent else []) + tail + output
        sequences.add(turn(turn_id, tail, output, parent, shared))
    for turn_id, expected in plain.items():
        assert sequences.full(turn_id).tolist() == expected
        spans = sequences.spans(turn_id)
        assert [t for s in spans for t in expected[s.start : s.stop]] == expected


@given(st.lists(st.tuples(tokens, tokens), max_size=10), tokens)
def test_longest_prefix_is_that_of_comparing_every_sequence(
    prompts: list[tuple[list[int], list[int]]], wanted: list[int]
) -> None:
    sequences = store(*(turn(f"t{n}", p, o) for n, (p, o) in enumerate(prompts)))

    def shared(full: list[int]) -> int:
        pairs = zip(full, wanted, strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(full), len(wanted)))

    best = max((shared(p + o) for p, o in prompts), default=0)
    found = sequences.longest_prefix(ids(*wanted))
    assert (found.shared_len if found else 0) == best
    assert found is None or sequences.full(found.turn_id).tolist()[:best] == wanted[:best]


@pytest.mark.field_case("NeMo RL#3485")
def test_token_has_no_data_that_only_a_later_turn_could_fill_in() -> None:
    """Of a sampled token only its id, logprob and policy version are kept, known as it is sampled.

    Expert routes of the last token of a turn would be known at the next turn's prefill only.
    """
    arrays = (TokenIds, Logprobs)
    hints = get_type_hints(TurnCompleted)
    per_token = {name for name, hint in hints.items() if hint in arrays}
    assert per_token == {"prompt_tail", "output_ids", "logprobs"}
    assert hints["policy_versions"] == tuple[VersionSpan, ...]

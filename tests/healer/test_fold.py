"""The fold of one rollout: duplicates, late events and events that cannot be right."""

from typing import Any

import pytest

from turnfold.healer.fold import FoldedTurn, RolloutState, fold, fold_all
from turnfold.schemas.events import Event, VersionSpan
from turnfold.schemas.messages import ChatMessage
from turnfold.schemas.testing import aborted, finished, revised, started, turn, turn_failed
from turnfold.schemas.wire import Logprobs, TokenIds


def folded(*events: Event) -> RolloutState:
    return fold_all(enumerate((started("r1"), *events)))


def damaged(**fields: Any) -> RolloutState:
    return folded(turn("r1", "t0", **{"prompt": [1, 2], "output": [3, 4], **fields}))


def kinds(state: RolloutState) -> list[str]:
    return [problem.kind for problem in state.problems]


def only_turn(state: RolloutState) -> FoldedTurn:
    (found,) = state.turns.values()
    return found


@pytest.mark.field_case("prime-rl#2794")
def test_a_turn_is_kept_without_its_messages() -> None:
    message = ChatMessage(role="user", content="a long text")
    state = folded(turn("r1", "t0", prompt=[1], output=[2], new_messages=(message,), reply=message))
    assert only_turn(state).output_ids == TokenIds.of([2]).data
    assert "a long text" not in repr(state)


def test_a_redelivered_event_changes_nothing_but_the_count() -> None:
    events: list[Event] = [turn("r1", "t0", prompt=[1], output=[2]), turn_failed("r1", "t1")]
    once, twice = folded(*events), folded(*events, *events)
    assert twice.num_duplicates == 2
    assert (twice.turns, twice.num_failed_turns) == (once.turns, once.num_failed_turns)


def test_a_turn_published_again_under_a_new_event_id_is_a_duplicate() -> None:
    again = turn("r1", "t0", prompt=[1], output=[2], event_id="another", at=9.0)
    state = folded(turn("r1", "t0", prompt=[1], output=[2]), again)
    assert (state.num_duplicates, kinds(state)) == (1, [])


def test_a_turn_published_again_with_other_tokens_is_a_conflict_and_the_first_counts() -> None:
    again = turn("r1", "t0", prompt=[1], output=[9], event_id="another")
    state = folded(turn("r1", "t0", prompt=[1], output=[2]), again)
    assert kinds(state) == ["turn_conflict"]
    assert only_turn(state).output_ids == TokenIds.of([2]).data
    assert "turn t0" in state.problems[0].detail


def test_the_first_terminal_event_counts_and_later_ones_are_late() -> None:
    late = turn("r1", "t0", prompt=[1], output=[2])
    state = folded(aborted("r1", reason="deadline"), finished("r1"), late)
    assert state.terminal == aborted("r1", reason="deadline")
    assert (state.num_late, state.turns) == (2, {})


def test_a_second_start_with_the_same_settings_is_a_duplicate() -> None:
    state = folded(started("r1", event_id="other", at=3.0))
    assert (state.num_duplicates, kinds(state)) == (1, [])


def test_a_second_start_with_another_group_is_a_conflict() -> None:
    state = folded(started("r1", group_id="g2", event_id="other"))
    assert kinds(state) == ["start_conflict"]
    assert "'g2'" in state.problems[0].detail


@pytest.mark.parametrize(
    ("fields", "kind", "said"),
    [
        ({"num_prompt_tokens": 3}, "counts_differ", "a tail of 2 tokens do not make the 3"),
        ({"shared_len": -1, "num_prompt_tokens": 0}, "counts_differ", "shared_len -1"),
        ({"prompt": []}, "prompt_empty", "at least one prompt token"),
        ({"logprobs": [-0.5]}, "logprobs_differ", "each of 2 output tokens, got 1"),
        ({"logprobs": []}, "logprobs_differ", "got 0"),
    ],
)
def test_a_turn_whose_counts_cannot_be_right_is_not_used(
    fields: dict[str, Any], kind: str, said: str
) -> None:
    state = damaged(**fields)
    assert kinds(state) == [kind]
    assert said in state.problems[0].detail
    assert "rollout r1, turn t0" in state.problems[0].detail
    assert only_turn(state).untrusted == kind
    assert state.problem_at(1) == state.problems[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_logprob_that_is_not_finite_keeps_the_turn_as_context(value: float) -> None:
    state = damaged(logprobs=Logprobs.of([-0.5, value]).tolist())
    assert kinds(state) == ["logprobs_not_finite"]
    assert "output token 1" in state.problems[0].detail
    assert (only_turn(state).untrusted, only_turn(state).untrained) == ("", "logprobs_not_finite")


@pytest.mark.parametrize(
    "spans", [[(0, 1)], [(1, 2)], [(0, 1), (0, 2)], [(0, 0), (0, 2)], [(0, 3)]]
)
def test_version_spans_that_do_not_cover_the_output_keep_the_turn_as_context(
    spans: list[tuple[int, int]],
) -> None:
    versions = tuple(VersionSpan(policy_version=1, start=s, end=e) for s, e in spans)
    state = damaged(policy_versions=versions)
    assert kinds(state) == ["versions_do_not_cover"]
    assert only_turn(state).untrained == "versions_do_not_cover"


def test_a_reward_revised_twice_counts_two_revisions_and_a_redelivery_none() -> None:
    state = folded(finished("r1"), revised("r1", reward=0.5), revised("r1", reward=0.25))
    again = fold(state, revised("r1", reward=0.25), 9)
    assert (state.revision, again.revision, again.num_duplicates) == (2, 2, 1)
    assert again.last_offset == 3


def test_a_reward_is_not_revised_before_the_end() -> None:
    state = folded(revised("r1", reward=0.5))
    assert (kinds(state), state.revision) == (["not_finished"], 0)


def test_an_aborted_rollout_has_no_reward_to_revise() -> None:
    state = folded(aborted("r1", reason="deadline"), revised("r1", reward=0.5))
    assert (kinds(state), state.revision) == (["was_aborted"], 0)
    assert "deadline" in state.problems[0].detail


def test_a_revised_reward_must_be_finite() -> None:
    state = folded(finished("r1"), revised("r1", reward=float("nan")))
    assert (kinds(state), state.revision) == (["reward_not_finite"], 0)

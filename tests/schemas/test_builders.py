"""The builders that tests of ours and of our users are written with."""

import pytest

from turnfold.schemas import codec
from turnfold.schemas.testing import RolloutScript, row, started, task, trajectory, turn
from turnfold.schemas.topics import MAX_MESSAGE_BYTES, Topics
from turnfold.schemas.trajectories import TurnSpan


def test_equal_calls_give_equal_bytes() -> None:
    for make in (started, lambda: turn("r", "t", prompt=[1], output=[2]), trajectory, task):
        assert codec.encode(make()) == codec.encode(make())


def test_a_turn_leaves_the_shared_tokens_to_its_parent() -> None:
    event = turn("r1", "t1", prompt=[1, 2, 3, 4, 5], output=[6], parent="t0", shared_len=4)
    assert (event.parent_turn_id, event.shared_len) == ("t0", 4)
    assert event.prompt_tail.tolist() == [5]
    assert event.num_prompt_tokens == 5


def test_a_script_delta_encodes_as_the_gateway_does() -> None:
    script = RolloutScript("r1", group_id="g7")
    script.turn("t0", [1, 2], [3, 4])
    extended = script.turn("t1", [1, 2, 3, 4, 5], [6], parent="t0")
    forked = script.turn("t2", [1, 2, 3, 9], [7], parent="t0")
    script.finish(0.5)
    assert (extended.shared_len, extended.prompt_tail.tolist()) == (4, [5])
    assert (forked.shared_len, forked.prompt_tail.tolist()) == (3, [9])
    assert script.sequence("t1") == [1, 2, 3, 4, 5, 6]
    assert [type(event).__name__ for event in script.events] == [
        "RolloutStarted",
        "TurnCompleted",
        "TurnCompleted",
        "TurnCompleted",
        "RolloutFinished",
    ]


def test_any_field_can_be_given_by_name() -> None:
    assert started("r1", event_id="e9", attempt=2).event_id == "e9"
    assert turn("r1", "t0", prompt=[1], output=[], num_prompt_tokens=7).num_prompt_tokens == 7
    with pytest.raises(TypeError, match="no_such_field"):
        started("r1", no_such_field=1)


def test_a_row_has_a_span_for_each_run_of_trained_tokens() -> None:
    made = row([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])
    assert [(span.start, span.end) for span in made.turns] == [(1, 3), (4, 5)]
    assert made.turns[0] == TurnSpan(turn_id="t0", start=1, end=3)
    assert made.num_trained == 3
    assert made.logprobs.tolist() == [0, -0.5, -0.5, 0, -0.5]


def test_a_trajectory_has_a_balanced_ledger() -> None:
    made = trajectory("r1", rows=[row([1, 2], [0, 1]), row([3, 4, 5], [0, 1, 1])])
    assert made.ledger.is_balanced
    assert made.ledger.num_trained == 3
    assert made.num_tokens == 5


def test_topics_carry_the_namespace_and_let_a_long_turn_pass() -> None:
    topics = Topics(namespace="lab")
    specs = {spec.name: spec for spec in topics.specs(num_partitions=3)}
    assert specs["lab.events"].num_partitions == 3
    assert specs["lab.batches"].num_partitions == 1
    assert specs["lab.policies"].config["cleanup.policy"] == "compact"
    assert specs["lab.events"].config["retention.ms"] == "-1"
    limits = {spec.config["max.message.bytes"] for spec in specs.values()}
    assert limits == {str(MAX_MESSAGE_BYTES)}

"""Two sets of trajectories, by rollout, turn and token."""

import msgspec

from turnfold.healer.fold import fold_all
from turnfold.healer.rows import trajectory as folded
from turnfold.replay.diff.comparison import Comparison, Results, compare
from turnfold.replay.diff.tokens import token_lines
from turnfold.schemas.events import HistoryMode
from turnfold.schemas.testing import RolloutScript
from turnfold.schemas.trajectories import Trajectory
from turnfold.schemas.wire import TokenIds


def with_a_retry(rollout_id: str, mode: HistoryMode) -> Trajectory:
    script = RolloutScript(rollout_id)
    script.turn("t0", [1, 2], [3])
    script.turn("given-up", [1, 2, 3, 4], [8, 8], parent="t0")
    script.turn("t1", [1, 2, 3, 4], [5], parent="t0")
    script.turn("t2", [1, 2, 3, 4, 5, 6], [7], parent="t1")
    script.finish(1.0)
    state = fold_all(enumerate(script.events))
    return folded(state, topic="turnfold.events", partition=0, mode=mode)


def compared(left: list[Trajectory], right: list[Trajectory]) -> Comparison:
    sides = Results(), Results()
    for results, trajectories in zip(sides, (left, right), strict=True):
        for trajectory in trajectories:
            results.add(trajectory)
    return compare(*sides)


def test_what_a_mode_trains_more_is_counted_by_where_it_was_before() -> None:
    found = compared([with_a_retry("r1", "linear")], [with_a_retry("r1", "tree")])
    assert found.moved == {("dropped (orphan)", "trained"): 2}
    assert found.left.num_trained + 2 == found.right.num_trained
    (change,) = found.changes
    assert "rows 1 → 2" in change.lines
    assert "turn given-up: dropped (orphan) → trained, 2 tokens" in change.lines


def test_a_reward_that_changed_is_the_only_difference_shown() -> None:
    one = with_a_retry("r1", "linear")
    other = msgspec.structs.replace(one, reward=0.25)
    found = compared([one], [other])
    assert found.changes[0].lines == ("reward 1 → 0.25",)
    assert found.num_reward_changes == 1
    assert (found.left.mean_reward, found.right.mean_reward) == (1.0, 0.25)
    assert token_lines(one, other) == []


def test_the_place_in_the_log_and_the_name_of_the_mode_are_no_difference() -> None:
    one = with_a_retry("r1", "linear")
    moved = msgspec.structs.replace(one.source, topic="copy.events", first_offset=7)
    assert compared([one], [msgspec.structs.replace(one, source=moved)]).is_same
    assert compared([one], [msgspec.structs.replace(one, history_mode="tree")]).is_same


def test_the_newest_revision_of_a_rollout_counts() -> None:
    one = with_a_retry("r1", "linear")
    newer = msgspec.structs.replace(one, revision=1, reward=0.5)
    assert compared([newer, one], [newer]).is_same


def test_rollouts_of_one_side_are_listed() -> None:
    found = compared([with_a_retry("a", "linear")], [with_a_retry("b", "linear")])
    assert (found.only_left, found.only_right, found.num_same) == (["a"], ["b"], 0)


def test_tokens_are_compared_in_rows_that_end_with_the_same_turn() -> None:
    one = with_a_retry("r1", "linear")
    changed = msgspec.structs.replace(one.rows[0], token_ids=TokenIds.of([1, 2, 3, 4, 5, 6, 9]))
    lines = token_lines(one, msgspec.structs.replace(one, rows=(changed,)))
    assert lines == ["row 0 | row 0, ends with turn t2: 1 of 7 tokens differ, first at 6: 7 → 9"]


def test_a_row_that_only_one_side_has_is_described() -> None:
    lines = token_lines(with_a_retry("r1", "linear"), with_a_retry("r1", "tree"))
    assert "only right: row 0 of 6 tokens, trains t0 [2, 3), given-up [4, 6)" in lines

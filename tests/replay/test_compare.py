"""What a replay says about trajectories that are not as the log gives them."""

import msgspec

from turnfold.healer.rows import FOLD_VERSION
from turnfold.replay.compare import Leftover, Written, combined_digest, explain
from turnfold.schemas import codec
from turnfold.schemas.testing import row, trajectory


def written_once(*rollout_ids: str) -> Written:
    written = Written()
    for rollout_id in rollout_ids:
        made = trajectory(rollout_id)
        written.add((rollout_id, 0), codec.digest(made), made.source)
    return written


def test_equal_bytes_are_no_difference() -> None:
    written = written_once("r1")
    assert written.difference_to(("r1", 0), codec.digest(trajectory("r1"))) is None
    assert written.leftovers() == written.doubled() == []


def test_other_bytes_a_missing_and_a_doubled_trajectory_are_differences() -> None:
    written = written_once("r1", "r2", "r2")
    differences = [
        written.difference_to(("r1", 0), codec.digest(trajectory("r1", reward=0.5))),
        written.difference_to(("r3", 0), codec.digest(trajectory("r3"))),
        *written.doubled(),
        *(leftover.difference for leftover in written.leftovers()),
    ]
    assert [str(difference) for difference in differences] == [
        "rollout r1: the trajectory in the log has other bytes",
        "rollout r3: finished in the log, but no trajectory was written",
        "rollout r2: was written more than once",
        "rollout r2: was written, but its events are not in the log",
    ]


def test_what_another_version_of_the_fold_wrote_is_no_difference_but_a_missing_one_is() -> None:
    written, made = Written(), trajectory("r1")
    written.add(("r1", 0), "other", made.source, fold_version=FOLD_VERSION - 1)
    assert written.difference_to(("r1", 0), codec.digest(made)) is None
    assert written.of_other_versions == {("r1", 0): FOLD_VERSION - 1}
    assert written.difference_to(("r2", 0), codec.digest(made)) is not None


def test_a_trajectory_is_unfounded_unless_its_events_came_too_late_to_be_read() -> None:
    reached, ends = {0: 10, 1: 5}, {0: 20, 1: 5}
    found = {
        (partition, offset): Leftover(("r1", 0), partition, offset).is_unfounded(reached, ends)
        for partition, offset in [(0, 9), (0, 10), (0, 19), (0, 20), (1, 4), (1, 5), (2, 0)]
    }
    assert [place for place, is_unfounded in found.items() if not is_unfounded] == [
        (0, 10),
        (0, 19),
    ]


def test_a_difference_is_explained_down_to_the_token() -> None:
    written = trajectory("r1", rows=[row([1, 2, 13], [0, 1, 1]), row([1, 2], [0, 1])])
    rebuilt = msgspec.structs.replace(
        written,
        reward=0.5,
        rows=(row([1, 2, 198], [0, 1, 1]), row([1, 2, 3], [0, 1, 0], [0, -0.25, 0])),
    )
    assert explain(written, rebuilt) == [
        "reward: written 1.0, rebuilt 0.5",
        "row 0: token 2: written 13, rebuilt 198",
        "row 1: token count: written 2, rebuilt 3",
        "row 1: mask count: written 2, rebuilt 3",
        "row 1: logprob 1: written -0.5, rebuilt -0.25",
    ]


def test_a_missing_row_is_explained() -> None:
    written = trajectory("r1", rows=[row([1, 2], [0, 1])])
    rebuilt = msgspec.structs.replace(written, rows=())
    assert explain(written, rebuilt) == ["rows: written 1, rebuilt 0"]


def test_the_digest_of_many_does_not_depend_on_their_order() -> None:
    one, other = {("a", 0): "1", ("b", 0): "2"}, {("b", 0): "2", ("a", 0): "1"}
    assert combined_digest(one) == combined_digest(other)
    assert combined_digest(one) != combined_digest({**one, ("a", 1): "1"})

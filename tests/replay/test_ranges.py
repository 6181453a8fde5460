"""Parts of a log: what the texts of the options mean, and which rollouts a part holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnfold.log.records import Record
from turnfold.replay.ranges import END, between, intersection, moment, offset_ranges
from turnfold.replay.rebuild import Selection
from turnfold.schemas import codec
from turnfold.schemas.errors import UserError
from turnfold.schemas.events import Event
from turnfold.schemas.testing import finished, started


def test_offsets_include_both_ends_and_may_be_open() -> None:
    assert offset_ranges(["0:100-200", "1:50-", "2:-7"]) == {
        0: range(100, 201),
        1: range(50, END),
        2: range(8),
    }


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["100-200"], "expected PARTITION:FIRST-LAST"),
        (["0:9-3"], "the first is after the last"),
        (["0:1-2", "0:4-5"], "partition 0 is named twice"),
    ],
)
def test_offsets_that_make_no_sense_are_refused(texts: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        offset_ranges(texts)


@pytest.mark.parametrize(
    "text",
    ["1790000000", "2026-09-21T14:13:20Z", "2026-09-21 16:13:20+02:00", "2026-09-21T14:13:20"],
)
def test_a_moment_means_the_same_in_every_notation(text: str) -> None:
    assert moment(text) == 1790000000.0


def test_what_is_no_time_is_refused_with_an_example() -> None:
    with pytest.raises(UserError, match=r"'yesterday': expected Unix seconds or ISO 8601"):
        moment("yesterday")


def test_a_time_range_ends_before_its_end() -> None:
    assert between({0: 3, 1: 8}, {0: 5, 1: 2}) == {0: range(3, 5), 1: range(8, 8)}
    assert between({0: 3}, None) == {0: range(3, END)}


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_an_intersection_holds_what_both_hold(a: int, b: int, c: int, d: int) -> None:
    found = intersection({0: range(a, b), 1: range(5)}, {0: range(c, d), 2: range(5)})
    assert found.keys() == {0}
    assert set(found[0]) == set(range(a, b)) & set(range(c, d))


def record(offset: int, event: Event) -> Record:
    return Record(
        topic="turnfold.events",
        partition=0,
        offset=offset,
        key=event.rollout_id.encode(),
        value=codec.encode(event),
        timestamp=0.0,
    )


def held(selection: Selection) -> list[int]:
    """Offsets of the events of three rollouts of two runs that a selection holds."""
    log: list[Event] = [
        started("r0", group_id="g0", run_id="one"),
        started("r1", group_id="g1", run_id="one"),
        finished("r0"),
        started("r2", group_id="g1", run_id="two"),
        finished("r1"),
        finished("r2"),
    ]
    return [n for n, event in enumerate(log) if selection.holds_event(record(n, event))]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (Selection(), [0, 1, 2, 3, 4, 5]),
        (Selection(["r1"]), [1, 4]),
        (Selection(["r0"], ["g1"]), [0, 1, 2, 3, 4, 5]),
        (Selection(runs=["two"]), [3, 5]),
        (Selection(groups=["g1"], runs=["one"]), [1, 4]),
        (Selection(offsets={0: range(1, 3)}), [1, 4]),
        (Selection(["r0"], offsets={0: range(1, 3)}), []),
        (Selection(offsets={1: range(9)}), []),
    ],
)
def test_a_selection_holds_whole_rollouts_by_their_start(
    selection: Selection, expected: list[int]
) -> None:
    assert held(selection) == expected

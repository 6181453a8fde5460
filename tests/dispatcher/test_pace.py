"""How many groups may be dispatched."""

from __future__ import annotations

from typing import Any

import pytest

from turnfold.dispatcher.pace import num_admissible
from turnfold.schemas.run import RunConfig


def admissible(max_staleness: int, **numbers: Any) -> int:
    config = RunConfig(groups_per_batch=4, max_staleness=max_staleness)
    return num_admissible(config, **{"num_cut": 0, "num_outstanding": 0, **numbers})


def test_nothing_is_dispatched_before_an_engine_serves_version_zero() -> None:
    assert admissible(3, served_version=None) == 0


@pytest.mark.parametrize(
    ("max_staleness", "served", "cut", "outstanding", "expected"),
    [
        (0, 0, 0, 0, 4),  # one batch
        (0, 0, 0, 3, 1),
        (0, 0, 4, 0, 0),  # batch 1 is cut: wait until it is trained and served
        (0, 1, 4, 0, 4),
        (1, 0, 0, 0, 8),  # two batches
        (1, 0, 4, 4, 0),
        (1, 1, 4, 4, 4),
        (2, 5, 28, 3, 1),
    ],
)
def test_seats_are_those_of_the_batches_within_the_staleness_bound(
    max_staleness: int, served: int, cut: int, outstanding: int, expected: int
) -> None:
    got = admissible(max_staleness, served_version=served, num_cut=cut, num_outstanding=outstanding)
    assert got == expected


def test_a_version_that_goes_back_admits_nothing_and_not_less_than_nothing() -> None:
    assert admissible(0, served_version=0, num_cut=8) == 0


def test_no_group_is_dispatched_that_only_a_batch_after_the_last_could_take() -> None:
    assert admissible(9, served_version=0, num_batches=3) == 12
    assert admissible(9, served_version=0, num_cut=8, num_outstanding=3, num_batches=3) == 1


@pytest.mark.parametrize(
    ("served", "cut", "outstanding", "overtaken", "expected"),
    [
        (0, 0, 0, 0, 8),  # the next batch and one more, of the 20 seats of the bound
        (1, 4, 4, 0, 4),
        (1, 4, 4, 3, 7),  # three slow groups do not hold up quick ones
        (1, 4, 20, 20, 0),  # but have their seats
    ],
)
def test_seats_beyond_the_lookahead_are_for_overtaken_groups(
    served: int, cut: int, outstanding: int, overtaken: int, expected: int
) -> None:
    got = admissible(
        4,
        served_version=served,
        num_cut=cut,
        num_outstanding=outstanding,
        lookahead=1,
        num_overtaken=overtaken,
    )
    assert got == expected

"""Places of groups against a plain list, in any order of moves and times."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from turnfold.assembler.listing import COMPLETE, Listing, Place

DEADLINES = st.sampled_from([COMPLETE, 1.0, 2.0, 3.0, float("inf"), None])
STEPS = st.lists(
    st.tuples(st.integers(0, 5), DEADLINES, st.sampled_from([0.0, 1.0, 2.0, 2.5, 9.0]))
)


@given(steps=STEPS)
def test_groups_are_listed_where_their_place_and_the_time_say(steps: Any) -> None:
    listing = Listing()
    places: dict[int, Place] = {}
    for number, deadline, now in steps:
        old = places.pop(number, None)
        new = None if deadline is None else (deadline, (0, number, f"g{number}"))
        listing.move(old, new)
        if new is not None:
            places[number] = new
        listed = list(places.values())
        complete = sorted(order for at, order in listed if at == COMPLETE)
        late = sorted(order for at, order in listed if COMPLETE < at <= now)
        running = sorted(place for place in listed if place[0] > now)
        assert list(listing.complete()) == complete
        assert list(listing.overdue(now)) == late
        assert list(listing.running(now)) == running
        assert listing.num_complete == len(complete)
        finite = [at for at, _ in running if at < float("inf")]
        assert listing.next_deadline(now) == min(finite, default=None)

"""Which groups are complete, which still run, and which are past their deadline. Pure.

Groups are named by their place, so that listing one costs a search and no scan:

    complete    by order                     all rollouts have ended
    running     by deadline                  not complete, before their deadline
    overdue     by order                     not complete, past it
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Any

Order = tuple[int, int, str]
"""Sorts groups: the dispatched ones by dispatch index, then foreign ones by name."""

Place = tuple[float, Order]
"""Where a group is listed: its deadline, or COMPLETE; then its order."""

COMPLETE = -math.inf


class Listing:
    """The places of all listed groups.

    listing = Listing()
    listing.move(None, (50.0, (0, 3, "g3")))            dispatched
    listing.move((50.0, (0, 3, "g3")), (COMPLETE, …))   complete
    listing.move((COMPLETE, …), None)                   decided on

    `now` only moves groups between running and overdue: any `now` may follow any other.
    """

    def __init__(self) -> None:
        self._complete: list[Order] = []
        self._running: list[Place] = []
        self._overdue: list[Order] = []
        self._deadlines: dict[Order, float] = {}
        """Of the overdue ones."""
        self._now = -math.inf
        """The time that running and overdue are divided at."""

    @property
    def num_complete(self) -> int:
        return len(self._complete)

    def move(self, old: Place | None, new: Place | None) -> None:
        """List a group at another place; None is not listed."""
        if old is not None:
            self._remove(old)
        if new is not None:
            self._add(new)

    def complete(self) -> Iterator[Order]:
        return iter(self._complete)

    def overdue(self, now: float) -> Iterator[Order]:
        self._divide_at(now)
        return iter(self._overdue)

    def running(self, now: float) -> Iterator[Place]:
        """By deadline, the next one first."""
        self._divide_at(now)
        return iter(self._running)

    def next_deadline(self, now: float) -> float | None:
        """When the next group closes that is neither complete nor overdue; None without one."""
        self._divide_at(now)
        if not self._running or math.isinf(self._running[0][0]):
            return None
        return self._running[0][0]

    def _add(self, place: Place) -> None:
        deadline, order = place
        if deadline == COMPLETE:
            insort(self._complete, order)
        elif deadline <= self._now:
            insort(self._overdue, order)
            self._deadlines[order] = deadline
        else:
            insort(self._running, place)

    def _remove(self, place: Place) -> None:
        deadline, order = place
        if deadline == COMPLETE:
            _remove(self._complete, order)
        elif deadline <= self._now:
            _remove(self._overdue, order)
            del self._deadlines[order]
        else:
            _remove(self._running, place)

    def _divide_at(self, now: float) -> None:
        if now > self._now:
            end = bisect_right(self._running, now, key=lambda place: place[0])
            if end:
                late = {order: deadline for deadline, order in self._running[:end]}
                del self._running[:end]
                self._deadlines |= late
                self._overdue = sorted(self._deadlines)
        elif now < self._now:
            early = [(d, order) for order, d in self._deadlines.items() if d > now]
            self._running = sorted(self._running + early)
            for _, order in early:
                del self._deadlines[order]
            self._overdue = sorted(self._deadlines)
        self._now = now


def _remove(places: list[Any], place: Any) -> None:
    index = bisect_left(places, place)
    assert places[index : index + 1] == [place], f"{place} is not listed"
    del places[index]

"""How many groups may be dispatched now. Pure.

A group dispatched while the engines serve version v is sampled by v or newer. In batch b it is at
most b - 1 - v versions old, so it must go into a batch with b <= v + max_staleness + 1. Up to and
including that batch there are

    seats = (v + max_staleness + 1) * groups_per_batch

of which every group in a batch takes one, and every group in flight will take one. A dropped group
gives its seat back. With max_staleness 0 and groups_per_batch 2:

    v = 0   2 seats: dispatch 2 groups, then wait for batch 1 to be trained and served
    v = 1   4 seats, 2 of them taken by batch 1: dispatch 2 more
"""

from __future__ import annotations

from turnfold.schemas.run import RunConfig


def num_admissible(
    config: RunConfig,
    *,
    served_version: int | None,
    num_cut: int,
    num_outstanding: int,
    num_batches: int | None = None,
    lookahead: int | None = None,
    num_overtaken: int = 0,
) -> int:
    """Groups that may be dispatched now.

    `num_cut` groups are in batches; `num_outstanding` are dispatched and neither in a batch nor
    dropped; `served_version` None means that no engine is ready. `num_batches` ends the run: no
    group is dispatched that could only go into a later batch.

    `lookahead` keeps data fresh: with every seat taken at once, groups that have ended queue for
    max_staleness batches. Only groups for `lookahead` batches beyond the next are in flight; the
    seats beyond are for the `num_overtaken` of the outstanding groups that are older than a group
    in a batch.
    """
    if served_version is None:
        return 0
    last_batch = served_version + config.max_staleness + 1
    if num_batches is not None:
        last_batch = min(last_batch, num_batches)
    seats = last_batch * config.groups_per_batch - num_cut - num_outstanding
    if lookahead is not None:
        next_batches = (served_version + lookahead + 1) * config.groups_per_batch
        seats = min(seats, next_batches - num_cut - (num_outstanding - num_overtaken))
    return max(0, seats)

"""Which row goes into which optimizer step, on which rank: decided by configuration, not by rows.

A batch of any number of rows takes `num_mini_batches x num_epochs` optimizer steps. Rows of a group
(and so of a rollout) stay in one mini-batch, every mini-batch holds the same number of groups, and
no-op rows fill up to a size that verl can cut into equal parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnfold.schemas.errors import UserError
from turnfold.schemas.wire import Wire
from turnfold.trainer.placement import Bins, spread, swap_down

NOOP_TOKENS = 2
"""Length of a no-op row: one token of context and one that is not trained."""


class PlanError(UserError):
    """A configuration or a batch that the fixed schedule cannot hold; the text says the remedy."""


class PlanRow(Wire, frozen=True, kw_only=True):
    """What planning needs to know of a row."""

    group_id: str
    num_tokens: int


class Schedule(Wire, frozen=True, kw_only=True):
    """Sizes of an update, the same for every batch of a run."""

    num_mini_batches: int
    num_epochs: int = 1
    num_ranks: int = 1
    """Data-parallel ranks."""
    rollouts_per_mini_batch: int
    """Configured rollouts of a mini-batch, by which its loss is divided (the verl name is
    global_batch_size)."""
    max_row_tokens: int
    """Token budget of a micro-batch; a longer row cannot be trained."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps of every batch."""
        return self.num_mini_batches * self.num_epochs

    @property
    def row_multiple(self) -> int:
        """The number of rows handed to verl is a multiple of this."""
        return self.num_mini_batches * self.num_ranks

    def rows_per_step(self, num_rows: int) -> int:
        """Rows of one mini-batch over all ranks. Raises PlanError when rows were not padded."""
        if num_rows % self.row_multiple:
            raise PlanError(
                f"{num_rows} rows do not divide into {self.num_mini_batches} mini-batches x "
                f"{self.num_ranks} ranks: pad them with no-op rows to "
                f"{_next_multiple(num_rows, self.row_multiple)} first"
            )
        return num_rows // self.num_mini_batches


class Plan(Wire, frozen=True, kw_only=True):
    """The rows in the order in which verl gets them.

        rank 0: [mini-batch 0][mini-batch 1]   rank 1: [mini-batch 0][mini-batch 1]

    Contiguous parts of equal size: rank r takes the r-th part, and slice j of it is mini-batch j.
    """

    schedule: Schedule
    order: tuple[int | None, ...]
    """Row index, or None for a no-op row."""
    num_rows: int

    @property
    def num_padding(self) -> int:
        return len(self.order) - self.num_rows

    @property
    def num_steps(self) -> int:
        return self.schedule.num_steps

    def rank(self, rank: int) -> tuple[int | None, ...]:
        """All rows of one rank."""
        size = len(self.order) // self.schedule.num_ranks
        return self.order[rank * size : (rank + 1) * size]

    def slice(self, rank: int, mini_batch: int) -> tuple[int | None, ...]:
        """Rows of one rank in one mini-batch."""
        size = len(self.order) // self.schedule.row_multiple
        return self.rank(rank)[mini_batch * size : (mini_batch + 1) * size]

    def mini_batch(self, mini_batch: int) -> tuple[int | None, ...]:
        """Rows of one mini-batch over all ranks."""
        ranks = range(self.schedule.num_ranks)
        return tuple(row for rank in ranks for row in self.slice(rank, mini_batch))


def schedule(
    *,
    groups_per_batch: int,
    groups_per_mini_batch: int,
    group_size: int,
    num_epochs: int,
    num_ranks: int,
    max_row_tokens: int,
) -> Schedule:
    """The schedule of a configuration. Raises PlanError with reason and remedy.

    64 groups, 16 a mini-batch, 2 ranks: 4 mini-batches, rows padded to a multiple of 8.
    """
    if groups_per_batch < 1 or groups_per_mini_batch < 1 or num_epochs < 1 or num_ranks < 1:
        raise PlanError(
            f"groups_per_batch {groups_per_batch}, ppo_mini_batch_size {groups_per_mini_batch}, "
            f"ppo_epochs {num_epochs}, ranks {num_ranks}: expected each to be at least 1"
        )
    if groups_per_batch % groups_per_mini_batch:
        divisors = [d for d in range(1, groups_per_batch + 1) if groups_per_batch % d == 0]
        raise PlanError(
            f"{groups_per_batch} groups a batch do not divide into mini-batches of "
            f"{groups_per_mini_batch}: set actor_rollout_ref.actor.ppo_mini_batch_size to one of "
            f"{', '.join(map(str, divisors))}"
        )
    return Schedule(
        num_mini_batches=groups_per_batch // groups_per_mini_batch,
        num_epochs=num_epochs,
        num_ranks=num_ranks,
        rollouts_per_mini_batch=groups_per_mini_batch * group_size,
        max_row_tokens=max_row_tokens,
    )


def plan(rows: Sequence[PlanRow], schedule: Schedule) -> Plan:
    """Place every row once. The number of optimizer steps does not depend on `rows`.

    1. Groups over mini-batches: the same number of groups in each (they share one loss divisor),
       and of those assignments one whose largest mini-batch has few rows, because every mini-batch
       is padded to the largest. Then tokens are balanced without making that one larger.
    2. Rows of a mini-batch, no-op rows among them, over ranks by tokens.

    Rows handed over: num_mini_batches x k, where k is the rows of the largest mini-batch rounded up
    to a multiple of num_ranks. Groups of equal row counts reach the next multiple of
    num_mini_batches x num_ranks: 513 one-row groups, 1 mini-batch, 2 ranks → 514. Unequal groups
    may need more: at most (largest - smallest group) rows in each mini-batch above the mean.

    Raises PlanError for a row longer than the token budget.
    """
    _check_rows(rows, schedule)
    groups = _groups(rows)
    bins = _groups_to_mini_batches(rows, groups, schedule)
    mini_batches = [[row for g in things for row in groups[g]] for things in bins]
    size = _next_multiple(max(map(len, mini_batches), default=1) or 1, schedule.num_ranks)
    slices = [_rows_to_ranks(rows, members, size, schedule.num_ranks) for members in mini_batches]
    order = [row for r in range(schedule.num_ranks) for ranks in slices for row in ranks[r]]
    assert len(order) % schedule.row_multiple == 0
    assert sorted(row for row in order if row is not None) == list(range(len(rows)))
    return Plan(schedule=schedule, order=tuple(order), num_rows=len(rows))


def _check_rows(rows: Sequence[PlanRow], schedule: Schedule) -> None:
    for index, row in enumerate(rows):
        if row.num_tokens > schedule.max_row_tokens:
            raise PlanError(
                f"row {index} of group {row.group_id} has {row.num_tokens} tokens, the budget is "
                f"{schedule.max_row_tokens}: raise actor_rollout_ref.actor."
                "ppo_max_token_len_per_gpu, or lower TURNFOLD_MAX_ROW_TOKENS so that such rollouts "
                "are left out of batches"
            )


def _groups(rows: Sequence[PlanRow]) -> list[list[int]]:
    """Row indices by group, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group_id, []).append(index)
    return list(groups.values())


def _groups_to_mini_batches(
    rows: Sequence[PlanRow], groups: Sequence[Sequence[int]], schedule: Schedule
) -> Bins:
    """Groups of each mini-batch; the counts differ by one where the groups do not divide."""
    count = schedule.num_mini_batches
    empty = _next_multiple(len(groups), count) - len(groups)
    num_rows = [len(group) for group in groups] + [0] * empty
    num_tokens = [sum(rows[row].num_tokens for row in group) for group in groups] + [0] * empty
    bins = spread(list(zip(num_rows, num_tokens, strict=True)), count)
    bins = swap_down(bins, num_rows)
    largest = max((sum(num_rows[g] for g in things) for things in bins), default=0)
    limit = _next_multiple(largest, schedule.num_ranks)
    bins = swap_down(bins, num_tokens, limited=num_rows, limit=limit)
    return [[g for g in things if g < len(groups)] for things in bins]


def _rows_to_ranks(
    rows: Sequence[PlanRow], members: Sequence[int], size: int, num_ranks: int
) -> list[list[int | None]]:
    """The rows of a mini-batch by rank, shortest first, no-op rows last."""
    padded: list[int | None] = [*members, *[None] * (size - len(members))]
    tokens = [NOOP_TOKENS if row is None else rows[row].num_tokens for row in padded]
    bins = swap_down(spread([(n,) for n in tokens], num_ranks), tokens)
    return [
        [padded[i] for i in sorted(things, key=lambda i: (padded[i] is None, tokens[i], i))]
        for things in bins
    ]


def _next_multiple(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple

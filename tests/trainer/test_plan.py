from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnfold.trainer.placement import spread, swap_down
from turnfold.trainer.plan import PlanError, PlanRow, Schedule, plan, schedule


def sizes(*groups: int, tokens: int = 10) -> list[PlanRow]:
    """Rows of groups with these many rows each."""
    return [
        PlanRow(group_id=f"g{g}", num_tokens=tokens)
        for g, num_rows in enumerate(groups)
        for _ in range(num_rows)
    ]


def make(mini_batches: int, ranks: int = 1, epochs: int = 1) -> Schedule:
    return Schedule(
        num_mini_batches=mini_batches,
        num_epochs=epochs,
        num_ranks=ranks,
        rollouts_per_mini_batch=8,
        max_row_tokens=1000,
    )


@pytest.mark.field_case("SkyRL#1483")
@pytest.mark.parametrize("num_rows", [512, 1536])
def test_one_mini_batch_is_one_step_for_any_number_of_rows(num_rows: int) -> None:
    assert plan(sizes(*[1] * num_rows), make(1)).num_steps == 1


@pytest.mark.field_case("awslabs art#131")
def test_900_rows_in_3_mini_batches_and_2_epochs_are_6_steps_of_300_rows() -> None:
    planned = plan(sizes(*[1] * 900), make(3, epochs=2))
    assert planned.num_steps == 6
    assert [len(planned.mini_batch(j)) for j in range(3)] == [300, 300, 300]
    assert planned.num_padding == 0


def test_301_rows_for_3_mini_batches_are_refused_until_they_are_padded() -> None:
    with pytest.raises(PlanError, match=r"301 rows do not divide .* no-op rows to 303"):
        make(3).rows_per_step(301)
    assert make(3).rows_per_step(303) == 101


@pytest.mark.field_case("rllm#506")
@pytest.mark.parametrize(
    ("num_rows", "mini_batches", "ranks", "padded"),
    [(513, 1, 2, 514), (270, 4, 2, 272), (601, 3, 4, 612), (1, 1, 8, 8), (298, 1, 4, 300)],
)
def test_padding_reaches_the_next_multiple_of_mini_batches_and_ranks(
    num_rows: int, mini_batches: int, ranks: int, padded: int
) -> None:
    assert len(plan(sizes(*[1] * num_rows), make(mini_batches, ranks)).order) == padded


@pytest.mark.field_case("rllm#630")
def test_298_rows_on_4_ranks_pad_to_300_and_not_to_384() -> None:
    planned = plan(sizes(*[1] * 298), make(1, ranks=4))
    assert (len(planned.order), planned.num_steps) == (300, 1)
    assert planned.schedule.rollouts_per_mini_batch == make(1).rollouts_per_mini_batch


@pytest.mark.field_case("agent-lightning#287")
@pytest.mark.field_case("NeMo RL#3910")
def test_all_rows_of_a_rollout_are_in_one_mini_batch_and_padding_comes_after_they_are_known() -> (
    None
):
    rows = sizes(*[1, 7, 2, 5, 3, 6, 1, 4])
    planned = plan(rows, make(4, ranks=2))
    homes = [{rows[i].group_id for i in planned.mini_batch(j) if i is not None} for j in range(4)]
    assert sorted(g for home in homes for g in home) == [f"g{g}" for g in range(8)]
    assert len(planned.order) == 4 * 8  # 29 rows, the fullest mini-batch has 8


def test_64_groups_in_mini_batches_of_16_are_4_mini_batches() -> None:
    found = schedule(
        groups_per_batch=64,
        groups_per_mini_batch=16,
        group_size=8,
        num_epochs=1,
        num_ranks=2,
        max_row_tokens=100,
    )
    assert (found.num_mini_batches, found.row_multiple) == (4, 8)
    assert found.rollouts_per_mini_batch == 128


def test_a_batch_of_one_mini_batch_on_4_ranks_pads_to_a_multiple_of_4() -> None:
    found = schedule(
        groups_per_batch=16,
        groups_per_mini_batch=16,
        group_size=1,
        num_epochs=1,
        num_ranks=4,
        max_row_tokens=100,
    )
    assert (found.num_mini_batches, found.row_multiple) == (1, 4)


def test_sizes_that_do_not_divide_are_refused_with_those_that_do() -> None:
    with pytest.raises(PlanError, match=r"8 groups .* mini-batches of 3: .* one of 1, 2, 4, 8"):
        schedule(
            groups_per_batch=8,
            groups_per_mini_batch=3,
            group_size=4,
            num_epochs=1,
            num_ranks=1,
            max_row_tokens=100,
        )


def test_a_row_longer_than_the_token_budget_is_refused_with_its_group() -> None:
    with pytest.raises(PlanError, match="row 1 of group g1 has 1001 tokens, the budget is 1000"):
        plan(
            [PlanRow(group_id="g0", num_tokens=5), PlanRow(group_id="g1", num_tokens=1001)], make(1)
        )


def test_rows_of_a_slice_are_handed_over_shortest_first_and_padding_last() -> None:
    rows = [PlanRow(group_id="g", num_tokens=2 + n) for n in (1, 5, 3)]
    assert plan(rows, make(1)).order == (0, 2, 1)
    assert plan(rows, make(1, ranks=2)).order in {(0, 1, 2, None), (2, 1, 0, None), (1, None, 0, 2)}


def test_slice_j_of_rank_r_is_mini_batch_j() -> None:
    planned = plan(sizes(2, 2, 2, 2), make(2, ranks=2))
    assert planned.rank(0) == planned.slice(0, 0) + planned.slice(0, 1)
    assert planned.rank(0) + planned.rank(1) == planned.order
    assert set(planned.mini_batch(0)) | set(planned.mini_batch(1)) == set(range(8))


def test_large_groups_are_paired_with_small_ones_to_save_padding() -> None:
    planned = plan(sizes(9, 8, 2, 1), make(2))
    assert len(planned.order) == 20
    assert planned.num_padding == 0


@pytest.mark.field_case("miles#1929")
def test_every_mini_batch_holds_the_same_number_of_groups() -> None:
    # 12 rows against 3 x 4: three small groups on one side would need no padding, but the loss of
    # both mini-batches is divided by the same number of rollouts.
    rows = sizes(12, 4, 4, 4)
    planned = plan(rows, make(2))
    groups = [{rows[i].group_id for i in planned.mini_batch(j) if i is not None} for j in range(2)]
    assert [len(g) for g in groups] == [2, 2]
    assert len(planned.order) == 32


def test_tokens_are_balanced_over_mini_batches_and_ranks() -> None:
    rows = [PlanRow(group_id=f"g{n}", num_tokens=n) for n in (100, 90, 80, 70, 40, 30, 20, 10)]
    planned = plan(rows, make(2, ranks=2))
    loads = [
        sum(rows[i].num_tokens for i in planned.slice(r, j) if i is not None)
        for r in range(2)
        for j in range(2)
    ]
    assert loads == [110, 110, 110, 110]


def test_an_empty_batch_still_takes_its_steps_on_padding() -> None:
    planned = plan([], make(2, ranks=2))
    assert planned.order == (None,) * 4
    assert planned.num_steps == 2


def test_things_that_do_not_divide_over_bins_are_refused() -> None:
    with pytest.raises(ValueError, match="3 things do not divide into 2"):
        spread([(1,), (2,), (3,)], 2)


groups_of_rows = st.lists(
    st.lists(st.integers(2, 1000), min_size=1, max_size=9), min_size=1, max_size=24
)


@settings(max_examples=150, deadline=None)
@given(groups_of_rows, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_plan_places_every_row_once_with_groups_whole_and_sizes_equal(
    groups: list[list[int]], mini_batches: int, ranks: int, epochs: int
) -> None:
    rows = [
        PlanRow(group_id=f"g{g}", num_tokens=n) for g, group in enumerate(groups) for n in group
    ]
    planned = plan(rows, make(mini_batches, ranks, epochs))
    placed = [row for row in planned.order if row is not None]
    assert sorted(placed) == list(range(len(rows)))
    assert planned.num_steps == mini_batches * epochs
    assert len(planned.order) % (mini_batches * ranks) == 0
    homes: dict[str, set[int]] = {}
    for j in range(mini_batches):
        for row in planned.mini_batch(j):
            if row is not None:
                homes.setdefault(rows[row].group_id, set()).add(j)
    assert all(len(home) == 1 for home in homes.values())
    counts = [sum(home == {j} for home in homes.values()) for j in range(mini_batches)]
    assert max(counts) - min(counts) <= 1
    group_sizes = [len(group) for group in groups]
    smallest = 0 if len(groups) % mini_batches else min(group_sizes)
    bound = len(rows) / mini_batches + max(group_sizes) - smallest
    assert len(planned.order) / mini_batches <= bound + ranks


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 6))
def test_spread_keeps_its_bound_and_swapping_never_makes_it_worse(
    weights: list[int], num_bins: int
) -> None:
    weights += [0] * (-len(weights) % num_bins)
    bins = spread([(w,) for w in weights], num_bins)
    totals = [sum(weights[i] for i in things) for things in bins]
    if weights:
        assert max(totals) <= sum(weights) / num_bins + max(weights) - min(weights)
    better = swap_down(bins, weights)
    assert max(sum(weights[i] for i in things) for things in better) <= max(totals)
    assert sorted(map(len, better)) == sorted(map(len, bins))
    assert sorted(i for things in better for i in things) == list(range(len(weights)))

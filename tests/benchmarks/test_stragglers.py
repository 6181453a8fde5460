"""The straggler simulator in small: its account is complete, and it says the same each time."""

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "stragglers"
MODULES = ("baselines", "bias", "engine", "report", "simulate", "turnfold_policy")
NUM_BATCHES = 20


@pytest.fixture(scope="module")
def stragglers() -> Iterator[dict[str, ModuleType]]:
    """The modules of benchmarks/stragglers, which are scripts beside each other and no package."""
    known = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in (*MODULES, "workload")}
    finally:
        sys.path.remove(str(FOLDER))
        for name in (*MODULES, "workload"):
            if name not in known:
                sys.modules.pop(name, None)


def run(stragglers: dict[str, ModuleType], policy: str, seed: int = 7) -> Any:
    world = stragglers["engine"].World(
        group_size=4, groups_per_batch=6, slots=60, train_s=900.0, min_group_size=2
    )
    shape = stragglers["workload"].Shape(
        distribution="pareto", num_tasks=50, fail_share=0.05, hang_share=0.01, lost_share=0.02
    )
    return stragglers["simulate"].simulate(policy, world, shape, num_batches=NUM_BATCHES, seed=seed)


@pytest.mark.parametrize(
    ("policy", "bound"),
    [
        ("synchronous", 0),
        ("wait-all", 1),
        ("turnfold-0", 0),
        ("turnfold-1", 1),
        ("turnfold-2", 2),
        ("turnfold-4", 4),
        ("turnfold-1-held", 1),
        ("turnfold-2-held", 2),
        ("turnfold-4-held", 4),
    ],
)
def test_no_trained_rollout_is_staler_than_the_bound(
    stragglers: dict[str, ModuleType], policy: str, bound: int
) -> None:
    simulation = run(stragglers, policy)
    assert simulation.num_published == NUM_BATCHES
    lags = [lag for batch in simulation.batches for lag in batch.staleness]
    assert lags
    assert all(0 <= lag <= bound for lag in lags)


@pytest.mark.parametrize("policy", ["synchronous", "drop-stale", "turnfold-2", "turnfold-2-held"])
def test_every_dispatched_group_is_trained_once_or_dropped_with_a_reason_or_open(
    stragglers: dict[str, ModuleType], policy: str
) -> None:
    simulation = run(stragglers, policy)
    times_trained = Counter(group.index for batch in simulation.batches for group in batch.groups)
    assert set(times_trained.values()) == {1}
    for group in simulation.groups:
        assert (group.fate == "trained") == (group.index in times_trained)
        assert group.fate
        assert all(group.outcomes[slot] == "completed" for slot in group.trained)
    fates = Counter(group.fate for group in simulation.groups)
    assert sum(fates.values()) == len(simulation.groups)
    assert fates["open"] <= 3 * simulation.world.groups_per_batch


def test_the_decisions_account_for_every_group_that_turnfold_decided(
    stragglers: dict[str, ModuleType],
) -> None:
    simulation = run(stragglers, "turnfold-2")
    fates = {group.group_id: group.fate for group in simulation.groups if group.fate != "open"}
    assert "stale" in fates.values()
    assert simulation.policy.decided == fates


def test_nothing_waits_longer_than_its_deadline_and_the_batches_of_the_bound(
    stragglers: dict[str, ModuleType],
) -> None:
    simulation = run(stragglers, "turnfold-2-held")
    world = simulation.world
    batch_s = world.group_timeout_s + world.train_s + world.serve_s + world.handover_s
    longest = stragglers["report"].longest_undecided(simulation)
    assert longest <= world.group_timeout_s + 3 * batch_s


def test_no_group_is_stale_when_cuts_that_would_strand_one_are_put_off(
    stragglers: dict[str, ModuleType],
) -> None:
    as_is, held = (run(stragglers, name) for name in ("turnfold-2", "turnfold-2-held"))
    assert any(group.fate == "stale" for group in as_is.groups)
    assert not any(group.fate == "stale" for group in held.groups)


def test_one_seed_gives_one_report_and_another_seed_another(
    stragglers: dict[str, ModuleType],
) -> None:
    def report(seed: int) -> dict[str, Any]:
        simulation = run(stragglers, "turnfold-2", seed)
        found: dict[str, Any] = stragglers["report"].figures(simulation, warmup=5, permutations=20)
        return found

    assert report(7) == report(7)
    assert report(7) != report(8)


def test_turnfold_at_staleness_zero_is_as_idle_as_a_synchronous_trainer(
    stragglers: dict[str, ModuleType],
) -> None:
    """Two programs that have nothing but the world in common; only lost groups part them."""
    shape = stragglers["workload"].Shape(num_tasks=50, fail_share=0.0, lost_share=0.0)
    world = stragglers["engine"].World(group_size=4, groups_per_batch=6, slots=60)
    synchronous, strict = (
        stragglers["simulate"].simulate(name, world, shape, num_batches=NUM_BATCHES, seed=7)
        for name in ("synchronous", "turnfold-0")
    )
    assert synchronous.finished_at == pytest.approx(strict.finished_at, rel=1e-9)


def test_the_bias_test_sees_a_schedule_that_drops_slow_groups_and_no_other(
    stragglers: dict[str, ModuleType],
) -> None:
    rng = np.random.default_rng(1)
    scales = rng.lognormal(0.0, 0.6, 2000)
    lengths = scales[:, None] * rng.lognormal(0.0, 1.0, (2000, 4))
    measure = stragglers["bias"].measure

    def trained(dropped: Any) -> Any:
        return np.repeat(~dropped[:, None], 4, axis=1)

    slow = lengths.max(axis=1) > np.quantile(lengths.max(axis=1), 0.95)
    chance = rng.random(2000) < 0.05
    biased = measure(lengths, trained(slow), scales, permutations=200, seed=1)
    fair = measure(lengths, trained(chance), scales, permutations=200, seed=1)
    assert biased.ks_p <= 0.01
    assert biased.trained_share_by_length[-1] < 0.5
    assert fair.ks_p > 0.01
    assert fair.task_p > 0.01

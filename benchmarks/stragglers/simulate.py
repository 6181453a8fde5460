"""Which policy keeps a trainer busy when rollouts have a heavy tail, and what it trains on.

    python benchmarks/stragglers/simulate.py
    python benchmarks/stragglers/simulate.py --batches 1000 --policies synchronous turnfold-2-held
    python benchmarks/stragglers/simulate.py --train-s 300 600 1500 3000 --batches 100 --plots docs/images

A discrete-event simulation: the clock is virtual, and turnfold's own pure functions take every
decision of the `turnfold-*` policies, where the number is max_staleness. Prints one JSON object with
a list of results, one for each distribution, trainer time and policy.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from baselines import Cohorts, DropStale
from engine import Policy, Simulation, World
from report import figures
from turnfold_policy import Turnfold
from workload import Shape, Workload

from turnfold.schemas.run import RunConfig

WARMUP = 5
"""Batches before the figures begin."""


def turnfold(
    world: World,
    shape: Shape,
    max_staleness: int,
    is_held: bool = False,
    lookahead: int | None = None,
) -> Turnfold:
    config = RunConfig(
        run_id="sim",
        group_size=world.group_size,
        groups_per_batch=world.groups_per_batch,
        min_group_size=world.min_group_size,
        max_staleness=max_staleness,
        group_timeout_s=world.group_timeout_s,
        rollout_timeout_s=world.rollout_timeout_s,
    )
    return Turnfold(config, shape.num_tasks, is_held=is_held, lookahead=lookahead)


POLICIES: dict[str, Callable[[World, Shape], Policy]] = {
    "synchronous": lambda world, shape: Cohorts(ahead=0),
    "wait-all": lambda world, shape: Cohorts(ahead=1),
    "drop-stale": lambda world, shape: DropStale(in_flight=2),
    "turnfold-0": lambda world, shape: turnfold(world, shape, 0),
    "turnfold-1": lambda world, shape: turnfold(world, shape, 1),
    "turnfold-2": lambda world, shape: turnfold(world, shape, 2),
    "turnfold-4": lambda world, shape: turnfold(world, shape, 4),
    "turnfold-1-held": lambda world, shape: turnfold(world, shape, 1, True, 1),
    "turnfold-2-held": lambda world, shape: turnfold(world, shape, 2, True, 1),
    "turnfold-4-held": lambda world, shape: turnfold(world, shape, 4, True, 1),
}


def simulate(name: str, world: World, shape: Shape, *, num_batches: int, seed: int) -> Simulation:
    """One policy over one workload, until the trainer has trained `num_batches`."""
    policy = POLICIES[name](world, shape)
    policy.name = name
    simulation = Simulation(policy, Workload(shape, seed), world, num_batches)
    simulation.run()
    return simulation


def scenario(options: argparse.Namespace, shape: Shape, world: World) -> list[dict[str, Any]]:
    """All policies on one workload, with their throughput against the synchronous one."""
    results: list[dict[str, Any]] = []
    for name in options.policies:
        began = time.process_time()
        simulation = simulate(name, world, shape, num_batches=options.batches, seed=options.seed)
        found = figures(simulation, warmup=WARMUP, permutations=options.permutations)
        results.append(
            {
                "distribution": shape.distribution,
                "train_s": world.train_s,
                **found,
                "cpu_seconds": round(time.process_time() - began, 1),
            }
        )
    rates = {found["policy"]: found["batches_per_hour"] for found in results}
    for found in results:
        if "synchronous" in rates:
            ratio = found["batches_per_hour"] / rates["synchronous"]
            found["throughput_over_synchronous"] = round(ratio, 3)
        found["goals"] = goals(found)
    return results


def goals(found: dict[str, Any]) -> dict[str, bool]:
    """What turnfold is meant to reach at max_staleness 2 and more."""
    return {
        "idle_at_most_5_percent": found["trainer_idle_share"] <= 0.05,
        "twice_synchronous": found.get("throughput_over_synchronous", 0.0) >= 2.0,
        "no_bias_by_length": found["bias"]["ks_p"] > 0.01,
        "no_bias_by_task": found["bias"]["task_p"] > 0.01,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--distributions", nargs="+", default=["lognormal", "pareto"])
    parser.add_argument("--train-s", nargs="+", type=float, default=[World.train_s])
    parser.add_argument("--slots", type=int, default=World.slots, help="rollouts at a time")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--permutations", type=int, default=400)
    parser.add_argument("--plots", type=Path, help="folder for stragglers-*.png")
    options = parser.parse_args()
    if options.batches <= WARMUP:
        parser.error(f"--batches: expected more than {WARMUP}, got {options.batches}")
    return options


def main() -> None:
    options = parse()
    results = [
        found
        for distribution in options.distributions
        for train_s in options.train_s
        for found in scenario(
            options, Shape(distribution=distribution), World(train_s=train_s, slots=options.slots)
        )
    ]
    print(
        json.dumps({"batches": options.batches, "seed": options.seed, "results": results}, indent=1)
    )
    if options.plots:
        from plots import save_plots

        save_plots(results, options.plots)


if __name__ == "__main__":
    main()

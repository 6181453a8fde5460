"""The assembler with 100,000 groups in flight: memory, time a trajectory, and a restart.

    python benchmarks/stragglers/scale.py
    python benchmarks/stragglers/scale.py --groups 10000

Prints one JSON object. First all rollouts but one of every group end, in random order, so that all
groups are in flight and hold as much as they ever do; then the last ones end and batches are cut.
`restart` is what a process that starts anew has to do with the records of all groups in flight:
decode, digest and fold; fetching them from the broker is not in it.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from turnfold.assembler.checkpoint import checkpoint_text
from turnfold.assembler.cut import Wait, decide, decide_early, strands_running
from turnfold.assembler.groups import GroupsState
from turnfold.assembler.rollouts import RolloutSummary, summary
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task
from turnfold.schemas.testing import row, trajectory
from turnfold.schemas.trajectories import Trajectory

GROUP_SIZE = 8
NUM_PARTITIONS = 4
RECORDS_PER_POLL = 500
"""The app decides once after each poll."""
CONFIG = RunConfig(
    run_id="scale", group_size=GROUP_SIZE, groups_per_batch=64, max_staleness=100_000
)
"""Nothing gets stale, and all that is kept for staleness is kept."""


class Stopwatch:
    """Adds up CPU seconds of the calls that it is told to run."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._began = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time() - self._began


def task(index: int) -> Task:
    return Task(
        run_id="scale",
        group_id=f"scale-{index:06d}",
        task_id=f"row-{index:06d}",
        dispatch_index=index,
        n=GROUP_SIZE,
        payload={},
        dispatched_at=1000.0 + index / 1000,
    )


def rollouts(num_groups: int, slots: range, first_offset: int) -> Iterator[RolloutSummary]:
    """The given slots of all groups in random order, each made when it is asked for."""
    order = np.random.default_rng(7).permutation(num_groups * len(slots))
    for number, drawn in enumerate(order.tolist(), start=first_offset):
        slot, group = divmod(drawn, num_groups)
        made = rollout(group, slots[slot], *divmod(number, NUM_PARTITIONS))
        # Decoded, so that no two rollouts share a string: that is how they come out of the log.
        yield codec.decode(RolloutSummary, codec.encode(made))


def rollout(group: int, slot: int, offset: int, partition: int) -> RolloutSummary:
    group_id = f"scale-{group:06d}"
    return RolloutSummary(
        run_id="scale",
        group_id=group_id,
        task_id=f"row-{group:06d}",
        dispatch_index=group,
        split="train",
        revision=0,
        status="completed",
        reason="",
        rollout_id=f"{group_id}-{slot:02d}",
        index=slot,
        attempt=0,
        partition=partition,
        offset=offset,
        digest=f"{group:032x}{slot:032x}",
        reward=float(slot % 2),
        num_rows=1,
        num_tokens=2000 + slot,
        num_trained=500,
        max_row_tokens=2000 + slot,
        min_policy_version=0,
        max_policy_version=0,
    )


def measure(num_groups: int, num_tokens: int) -> dict[str, object]:
    state = GroupsState(CONFIG)
    before_mb = resident_mb()
    tasks, first, last, deciding = (Stopwatch() for _ in range(4))
    with tasks:
        for index in range(num_groups):
            state.add_task(task(index), 0, index)
    for made in rollouts(num_groups, range(GROUP_SIZE - 1), 0):
        with first:
            state.add_rollout(made)
    in_flight_mb = resident_mb() - before_mb
    checkpoint = Stopwatch()
    with checkpoint:
        checkpoint_text(state, 0)
    num_first = num_groups * (GROUP_SIZE - 1)
    num_batches, num_put_off, putting_off = 0, 0, Stopwatch()
    for number, made in enumerate(
        rollouts(num_groups, range(GROUP_SIZE - 1, GROUP_SIZE), num_first)
    ):
        with last:
            state.add_rollout(made)
        if number % RECORDS_PER_POLL == 0:
            with deciding:
                decision = decide(state, CONFIG, 1000.0)
            if isinstance(decision, BatchCut):
                with putting_off:  # what each poll costs while a cut is put off
                    strands_running(state, decision, 1000.0)
                    decide_early(state, CONFIG, 1000.0)
                num_put_off += 1
            with deciding:
                num_batches += decide_all(state)
    decoding_us = us_to_decode(num_tokens)
    return {
        "groups": num_groups,
        "rollouts": num_groups * GROUP_SIZE,
        "in_flight_mb": round(in_flight_mb, 1),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "us_per_task": round(1e6 * tasks.seconds / num_groups, 2),
        "us_per_trajectory": round(1e6 * first.seconds / num_first, 2),
        "us_per_trajectory_that_completes_a_group": round(1e6 * last.seconds / num_groups, 2),
        "batches": num_batches,
        "ms_per_batch_cut": round(1e3 * deciding.seconds / max(1, num_batches), 2),
        "us_to_put_a_cut_off": round(1e6 * putting_off.seconds / max(1, num_put_off), 1),
        "ms_per_checkpoint": round(1e3 * checkpoint.seconds, 1),
        "us_per_trajectory_in_all": round(
            1e6 * (first.seconds + last.seconds + deciding.seconds) / (num_first + num_groups), 2
        ),
        "restart": {
            "fold_seconds": round(tasks.seconds + first.seconds, 2),
            "tokens_per_trajectory": num_tokens,
            "us_to_decode_and_digest": round(decoding_us, 1),
            "seconds": round(tasks.seconds + first.seconds + num_first * decoding_us / 1e6, 1),
        },
    }


def decide_all(state: GroupsState) -> int:
    """Take every decision that is due; how many there were."""
    count = 0
    while not isinstance(decision := decide(state, state.config, 1000.0), Wait):
        assert state.add_decision(decision)
        count += 1
    return count


def us_to_decode(num_tokens: int, repeats: int = 2000) -> float:
    """From the bytes of a trajectory to its summary, as the app does it."""
    mask = [0] * (num_tokens - num_tokens // 4) + [1] * (num_tokens // 4)
    data = codec.encode(trajectory("scale-000000-00", rows=[row(range(num_tokens), mask)]))
    watch = Stopwatch()
    with watch:
        for offset in range(repeats):
            decoded = codec.decode(Trajectory, data)
            summary(decoded, 0, offset, codec.digest(decoded))
    return 1e6 * watch.seconds / repeats


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of a trajectory")
    options = parser.parse_args()
    print(json.dumps(measure(options.groups, options.tokens), indent=2))


if __name__ == "__main__":
    main()

"""Ranks as Ray actors, over one machine or many, in verl's own worker group.

`trainer.nnodes` x `trainer.n_gpus_per_node` processes, as in verl; on CPUs the second number counts
processes. Checkpoints and weights are written by the workers, so the run directory must be on a
file system that all nodes and this process share.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from turnfold.trainer.backends import environment
from turnfold.trainer.drivers import Driver

log = logging.getLogger("turnfold.trainer")


class RayGroup(Driver):
    """A worker group in a running cluster (RAY_ADDRESS), or in one of its own on this machine."""

    can_copy_weights = False

    def __init__(self, config: Any, weights_from: Path | None, *, is_gpu: bool) -> None:
        import ray
        from verl.single_controller.ray import (
            RayClassWithInitArgs,
            RayResourcePool,
            RayWorkerGroup,
        )

        from turnfold.trainer.backends.ray_worker import RankWorker

        per_node = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            _connect(sum(per_node), is_gpu)
        pool = RayResourcePool(per_node, use_gpu=is_gpu, max_colocate_count=1)
        workers = RayClassWithInitArgs(
            cls=ray.remote(RankWorker), config=config, weights_from=weights_from, is_gpu=is_gpu
        )
        log.info("starting %d Ray workers on %d node(s)", sum(per_node), len(per_node))
        self._group = RayWorkerGroup(
            resource_pool=pool,
            ray_cls_with_init=workers,
            device_name="cuda" if is_gpu else "cpu",
            ray_wait_register_center_timeout=config.trainer.ray_wait_register_center_timeout,
        )
        self._group.build()

    def call(self, method: str, *args: Any) -> list[Any]:
        import ray

        # One copy per node in Ray's store, whatever the number of workers there.
        results: list[Any] = self._group.call(method, *map(ray.put, args))
        return results

    def close(self) -> None:
        import ray

        for worker in self._group.workers:
            ray.kill(worker)
        if self._is_ours:
            ray.shutdown()


def _connect(num_workers: int, is_gpu: bool) -> None:
    import ray

    variables = {"env_vars": environment.for_workers(is_gpu)}
    options: dict[str, Any] = {"runtime_env": variables, "log_to_driver": False}
    if not os.environ.get("RAY_ADDRESS"):
        # A cluster for this run alone; a CPU per worker and one for what Ray itself does.
        options |= {"num_cpus": num_workers + 1, "include_dashboard": False}
    ray.init(**options)

"""A checkpoint engine for verl that sends every version of the weights by a collective.

    engine=actor_rollout_ref.rollout.checkpoint_engine
    PYTHONPATH=examples turnfold train --model ./model $engine.backend=gloo \\
        $engine.custom_backend_module=gloo_engine +$engine.engine_kwargs.gloo.port=29600

Receivers are processes like weights_over_gloo.py; the trainer waits for them at its first version.
Rank 0 sends, since gathering leaves it with full parameters.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from weights_over_gloo import Group


@CheckpointEngineRegistry.register("gloo")
class GlooEngine(CheckpointEngine):  # type: ignore[misc]
    """The trainer's side, one on each of its ranks."""

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        host: str = "127.0.0.1",
        port: int = 29600,
        num_receivers: int = 1,
    ) -> None:
        del bucket_size  # parameters go one by one
        self._is_master = is_master
        self._address = (host, port, num_receivers)
        self._group: Group | None = None

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        if not self._is_master:
            for _ in weights:  # gathering is a collective of its own
                pass
            return
        if self._group is None:
            self._group = Group(*self._address, is_sender=True)
        self._group.send(global_steps or 0, weights)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor]]:
        if self._group is None:
            self._group = Group(*self._address, is_sender=False)
        for name, tensor in self._group.receive(global_steps or 0):
            yield name, tensor

    def prepare(self) -> dict[str, Any]:
        return {}  # verl's own trainers ask for this and what follows; turnfold's does not

    @classmethod
    def build_topology(cls, *_: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        raise NotImplementedError("the group is found by host and port")

    def init_process_group(self, **_: Any) -> None:
        pass

    def finalize(self) -> None:
        pass

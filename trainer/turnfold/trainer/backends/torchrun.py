"""Ranks that torchrun started: the first owns log and files, the others do what it does.

    rank 0   the trainer's loop ── call("update", rows, plan) ──┐ broadcast
    rank n   follow()           <───────────────────────────────┘ the same call on its backend

Commands go through a process group of their own that may wait for a month, since the next batch can
be hours away; the groups in which verl works keep their timeouts.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

from turnfold.schemas.errors import UserError
from turnfold.trainer.backend import TrainerBackend
from turnfold.trainer.backends.environment import join_process_group
from turnfold.trainer.drivers import Driver

log = logging.getLogger("turnfold.trainer")

_PATIENCE = timedelta(days=30)
_BUILD, _STOP = "build", "stop"


class Leader(Driver):
    """Rank 0: makes every call here and on the ranks that follow."""

    def __init__(self, config: Any, weights_from: Path | None, *, is_gpu: bool) -> None:
        self._commands = _command_group(is_gpu)
        self._is_in_call = True
        self._send(_BUILD, config, weights_from)
        self._backend = TrainerBackend(config, weights_from, is_gpu=is_gpu)
        self._is_in_call = False

    def call(self, method: str, *args: Any) -> list[Any]:
        import torch.distributed as dist

        self._is_in_call = True
        self._send(method, *args)
        result = getattr(self._backend, method)(*args)
        results: list[Any] = [None] * dist.get_world_size()
        # Full parameters stay here: everybody else has none.
        dist.gather_object(None, results, group=self._commands)
        self._is_in_call = False
        return [result, *results[1:]]

    def close(self) -> None:
        # After a call that failed the others are somewhere in it; they end when this process does.
        if not self._is_in_call:
            self._send(_STOP)

    def _send(self, *command: Any) -> None:
        import torch.distributed as dist

        dist.broadcast_object_list([command], src=0, group=self._commands)


def follow(is_gpu: bool) -> None:
    """Do what rank 0 says until it says stop. Raises UserError when rank 0 is gone."""
    import torch.distributed as dist

    commands = _command_group(is_gpu)
    backend: Any = None
    while True:
        method, *args = _receive(commands)
        if method == _STOP:
            return
        if method == _BUILD:
            backend = TrainerBackend(*args, is_gpu=is_gpu)
            continue
        dist.gather_object(getattr(backend, method)(*args), group=commands)


def _receive(commands: Any) -> Any:
    import torch.distributed as dist

    box: list[Any] = [None]
    try:
        dist.broadcast_object_list(box, src=0, group=commands)
    except RuntimeError as error:
        raise UserError(f"rank {dist.get_rank()}: rank 0 has ended: {error}") from error
    return box[0]


def _command_group(is_gpu: bool) -> Any:
    import torch.distributed as dist

    join_process_group(is_gpu)
    return dist.new_group(backend="gloo", timeout=_PATIENCE)

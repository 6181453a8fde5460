"""One rank of a policy as a Ray actor. Imports verl, so the environment must be set before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register


class RankWorker(Worker):  # type: ignore[misc]
    """A `TrainerBackend` in a process that verl's worker group has given a rank."""

    def __init__(self, config: Any, weights_from: Path | None, is_gpu: bool) -> None:
        super().__init__()
        self._arguments, self._is_gpu = (config, weights_from), is_gpu
        self._backend: Any = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def build(self) -> None:
        from turnfold.trainer.backend import TrainerBackend

        self._backend = TrainerBackend(*self._arguments, is_gpu=self._is_gpu)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def call(self, method: str, *args: Any) -> Any:
        """A method of `TrainerBackend` on this rank."""
        return getattr(self._backend, method)(*args)

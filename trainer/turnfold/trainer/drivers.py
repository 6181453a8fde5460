"""How the trainer's loop reaches the ranks of its policy: one process, torchrun, or Ray.

Every rank is the same `TrainerBackend`; a driver makes the same call on each of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from turnfold.trainer import weights
from turnfold.trainer.plan import Plan
from turnfold.trainer.rows import TrainRow
from turnfold.trainer.weights import Publication


class Driver(ABC):
    """All ranks of a policy, seen from the process that owns log and files."""

    can_copy_weights = True
    """Does the rank that gathers full parameters share memory with this process?"""

    @abstractmethod
    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `TrainerBackend` on every rank; what each returned, in rank order."""

    @abstractmethod
    def close(self) -> None:
        """Let the other ranks end."""

    def sizes(self) -> tuple[int, int]:
        """Data-parallel ranks and processes."""
        sizes: tuple[int, int] = self.call("sizes")[0]
        return sizes

    def update(self, rows: Sequence[TrainRow], plan: Plan) -> dict[str, float]:
        """Train on one batch; see `TrainerBackend.update`."""
        return next((m for m in self.call("update", tuple(rows), plan) if m), {})

    def save(self, directory: Path) -> None:
        """Every rank writes its part of a checkpoint into a directory that all ranks see."""
        self.call("save", directory)

    def load(self, directory: Path) -> None:
        self.call("load", directory)

    def skip_batches(self, count: int) -> None:
        self.call("skip_batches", count)

    def send_weights(self, version: int) -> None:
        """Send the present parameters by verl's checkpoint engine; returns when they are sent."""
        self.call("send_weights", version)

    def write_weights(self, publication: Publication) -> Path:
        """Write the present parameters, part by part. A version that is there stays as it is."""
        if weights.is_valid(publication.directory):
            return weights.write(publication, ())
        directory: Path = self.call("write_weights", publication)[0]
        return directory

    def copied_weights(self, publication: Publication) -> Callable[[], Path]:
        """Copy the present parameters into memory; what is returned writes them, in any thread."""
        if weights.is_valid(publication.directory):
            return partial(weights.write, publication, ())
        copied = self.call("snapshot", publication.dtype)[0]
        return partial(weights.write, publication, copied.items())


class InProcess(Driver):
    """The only rank, in this process."""

    def __init__(self, config: Any, weights_from: Path | None, *, is_gpu: bool) -> None:
        from turnfold.trainer.backend import TrainerBackend

        self._backend = TrainerBackend(config, weights_from, is_gpu=is_gpu)

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._backend, method)(*args)]

    def close(self) -> None:
        pass


def start(
    name: str,
    config: Any,
    *,
    weights_from: Path | None,
    is_gpu: bool,
    num_processes: int,
) -> Driver:
    """Build the policy on all its ranks, from other weights than the initial model where given.

    `num_processes` is what torchrun started, 1 without it.
    """
    if name == "ray":
        from turnfold.trainer.backends.ray_group import RayGroup

        return RayGroup(config, weights_from, is_gpu=is_gpu)
    if num_processes > 1:
        from turnfold.trainer.backends.torchrun import Leader

        return Leader(config, weights_from, is_gpu=is_gpu)
    return InProcess(config, weights_from, is_gpu=is_gpu)

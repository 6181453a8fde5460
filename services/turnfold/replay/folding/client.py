"""Checkpoints of a replay as files of a folder, one for each partition."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from turnfold.replay.folding.part import Checkpoint
from turnfold.schemas import codec
from turnfold.schemas.errors import UserError


class CheckpointFolder:
    """Where a replay keeps how far it has come.

    folder = CheckpointFolder(Path("replay.d"), question)
    folder.write(checkpoint)          # whole or not at all
    folder.read()                     # {partition: checkpoint}
    """

    def __init__(self, path: Path, question: str) -> None:
        self.path, self.question = path, question

    def write(self, checkpoint: Checkpoint) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        file = self._file(checkpoint.partition)
        part = file.with_suffix(".part")
        part.write_bytes(codec.encode(checkpoint))
        part.replace(file)

    def read(self) -> dict[int, Checkpoint]:
        """What is there, by partition.

        Raises UserError when there is nothing, or when a file answers another question.
        """
        found = [self._read(file) for file in sorted(self.path.glob("partition-*.checkpoint"))]
        if not found:
            raise UserError(f"{self.path} holds no checkpoint: start without --resume")
        return {checkpoint.partition: checkpoint for checkpoint in found}

    def clear(self, partitions: Iterable[int]) -> None:
        """Forget what is there, before another replay begins."""
        for partition in partitions:
            self._file(partition).unlink(missing_ok=True)

    def _read(self, file: Path) -> Checkpoint:
        try:
            checkpoint = codec.decode(Checkpoint, file.read_bytes())
        except codec.CodecError as error:
            raise UserError(f"{file} is no checkpoint of a replay: {error}") from error
        if checkpoint.question != self.question:
            raise UserError(
                f"{file} is a checkpoint of another replay: expected {self.question}; it holds "
                f"{checkpoint.question}"
            )
        return checkpoint

    def _file(self, partition: int) -> Path:
        return self.path / f"partition-{partition}.checkpoint"

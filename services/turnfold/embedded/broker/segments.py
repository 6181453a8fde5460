"""One append-only file of record batches, named after the first offset it may hold."""

import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from turnfold.embedded.broker.records import (
    HEADER_SIZE,
    MAGIC,
    BatchHeader,
    has_valid_checksum,
    read_header,
)

logger = logging.getLogger(__name__)


def segment_name(base_offset: int) -> str:
    """`00000000000000000042.log`: sorts by offset."""
    return f"{base_offset:020d}.log"


class Segment:
    """An open segment file. `size` is where the next batch goes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.base_offset = int(path.stem)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self.size = os.fstat(self._descriptor).st_size

    def append(self, batch: bytes | bytearray) -> int:
        """Hand the batch to the operating system and return its position.

        On an error (disk full) the file is cut back to what it was, and OSError goes to the caller.
        """
        position = self.size
        remaining = memoryview(batch)
        try:
            while remaining:
                written = os.pwrite(self._descriptor, remaining, self.size)
                self.size += written
                remaining = remaining[written:]
        except OSError:
            os.ftruncate(self._descriptor, position)
            self.size = position
            raise
        return position

    def flush_to_disk(self) -> None:
        """Wait until the disk has what was appended (survives a power cut)."""
        os.fdatasync(self._descriptor)

    def read(self, position: int, size: int) -> bytes:
        """Bytes of the file; fewer than `size` at its end."""
        return os.pread(self._descriptor, size, position)

    def scan(self, *, verify: bool) -> Iterator[tuple[BatchHeader, int]]:
        """Header and position of each batch, in order; a damaged tail is cut off.

        The tail is what a crash in the middle of a write leaves: an incomplete batch, or with `verify` one
        whose checksum fails. Without `verify` only headers are read.
        """
        position = 0
        with self._mapped() as content:
            while position < self.size:
                header = _whole_batch(content, position)
                if header is None or (verify and not _is_sound(content, header, position)):
                    break
                yield header, position
                position += header.size
        if position < self.size:
            self._cut(position)

    def close(self) -> None:
        os.close(self._descriptor)

    def delete(self) -> None:
        """Close and remove the file."""
        self.close()
        self.path.unlink(missing_ok=True)

    @contextmanager
    def _mapped(self) -> Iterator[memoryview]:
        """The whole file as memory, which is much quicker to go through than by reading."""
        if self.size == 0:  # cannot be mapped
            yield memoryview(b"")
            return
        with (
            mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as content,
        ):
            yield content

    def _cut(self, position: int) -> None:
        logger.warning(
            "%s: cut %d damaged bytes after the last whole batch", self.path, self.size - position
        )
        os.ftruncate(self._descriptor, position)
        self.size = position


def _whole_batch(content: memoryview, position: int) -> BatchHeader | None:
    """The header at `position`, if a whole batch is there."""
    if len(content) - position < HEADER_SIZE:
        return None
    header = read_header(content, position)
    is_whole = HEADER_SIZE <= header.size <= len(content) - position
    return header if header.magic == MAGIC and is_whole else None


def _is_sound(content: memoryview, header: BatchHeader, position: int) -> bool:
    with content[position : position + header.size] as batch:
        return has_valid_checksum(batch, header)

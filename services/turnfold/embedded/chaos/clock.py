"""A clock that can be set wrong, for one process.

    python -m turnfold.embedded.chaos.clock run/clocks/healer turnfold.cli healer

runs `python -m turnfold.cli healer` whose `time.time()` is that of the machine plus what the file
says at the moment. The services know nothing of it. `time.monotonic()` is untouched, as it is when
the clock of a machine is set, and so is `datetime.now()`, which the services do not ask for times
that matter.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_SECONDS = struct.Struct("<d")


class Clocks:
    """The clocks of several processes, each with a file that says how wrong it is."""

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.paths = {name: directory / name for name in names}
        self._offsets = dict.fromkeys(self.paths, 0.0)
        for path in self.paths.values():
            path.write_bytes(_SECONDS.pack(0.0))

    def shift(self, name: str, seconds: float) -> None:
        """Move the clock of a process, while it runs or before it starts again."""
        self._offsets[name] += seconds
        # In place: the process has the file mapped.
        with self.paths[name].open("r+b") as file:
            file.write(_SECONDS.pack(self._offsets[name]))

    def shift_all(self, seconds: float) -> None:
        for name in self.paths:
            self.shift(name, seconds)


def install(path: Path) -> None:
    """Let `time.time` of this process follow the file."""
    with path.open("r+b") as file:
        offset = mmap.mmap(file.fileno(), _SECONDS.size)
    right_time = time.time

    def shifted() -> float:
        (seconds,) = _SECONDS.unpack_from(offset)
        return right_time() + float(seconds)

    time.time = shifted


def main() -> None:
    """Install the clock and run the module with the arguments that are left."""
    path, module, *arguments = sys.argv[1:]
    install(Path(path))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

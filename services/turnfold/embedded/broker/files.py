"""Small files that are either the old or the new version, never half of one."""

import json
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Any, *, fsync: bool) -> None:
    """Replace the file at `path`; a crash leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        if fsync:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
    if fsync:
        flush_directory(path.parent)


def flush_directory(directory: Path) -> None:
    """Wait until the disk has the names of the files in `directory` (survives a power cut)."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> Any:
    """The content of the file, or None if there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None

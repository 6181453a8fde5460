"""Files that are either whole or not there, also after a power cut."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A directory to fill; it gets its name, in one rename, once everything in it is on disk.

    On an exception nothing of it stays. An existing `target` is replaced.
    """
    draft = new_draft(target)
    try:
        yield draft
        keep(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def new_draft(target: Path) -> Path:
    """An empty directory beside `target`, which `keep` gives its name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".{target.name}.tmp"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    return draft


def keep(draft: Path, target: Path) -> None:
    """Bring a filled draft to disk and give it its name; an existing `target` is replaced."""
    sync_tree(draft)
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    sync(target.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a small file in one step."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(text)
    sync(draft)
    draft.replace(path)
    sync(path.parent)


def sync_tree(directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        sync(path)
    sync(directory)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_drafts(directory: Path) -> None:
    """Remove what a killed process left half written."""
    for draft in directory.glob(".*.tmp"):
        if draft.is_dir():
            shutil.rmtree(draft, ignore_errors=True)
        else:
            draft.unlink(missing_ok=True)

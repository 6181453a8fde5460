"""Checkpoints: verl's own files and where in the log the run stands, whole or not there at all.

    checkpoints/b00000007/actor/…       model, optimizer, scheduler and random state, as verl saves
                          state.json    batch, position, size and sha256 of every file

The directory gets its name when everything in it is on disk, so a name means a finished checkpoint.
What the disk did to it later is found on reading, and the one before is taken with a warning.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import msgspec

from turnfold.schemas.errors import UserError
from turnfold.schemas.wire import Wire
from turnfold.trainer.backends import durable

log = logging.getLogger("turnfold.trainer")


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the text names the file."""


class State(Wire, frozen=True, kw_only=True):
    """Where a run stands; the random states are in verl's own files."""

    run_id: str
    batch: int
    """Last batch that was trained; also the policy version of the weights."""
    manifest_digest: str = ""
    """Digest of the manifest of that batch, to know the log again; empty before the first."""
    config_digest: str
    """Digest of the RunConfig."""
    num_processes: int = 1
    """Processes that saved a part each; verl's files can be loaded by as many only."""
    metrics: dict[str, float] = {}
    """What was measured on that batch, for a PolicyPublished that has to be sent again."""


class _File(Wire, frozen=True):
    size: int
    sha256: str


class _Inventory(Wire, frozen=True, kw_only=True, omit_defaults=False):
    state: State
    files: dict[str, _File]


class Checkpoint(Wire, frozen=True, kw_only=True):
    """A checkpoint that was verified."""

    state: State
    directory: Path

    @property
    def actor_dir(self) -> Path:
        return self.directory / "actor"

    @property
    def model_dir(self) -> Path | None:
        """Full weights as transformers loads them, where verl was told to save `hf_model`."""
        directory = self.actor_dir / "huggingface"
        return directory if any(directory.glob("*.safetensors")) else None


def begin(root: Path, batch: int) -> Path:
    """An empty draft of the checkpoint of `batch`; verl's files go to `draft / "actor"`."""
    return durable.new_draft(_directory(root, batch))


def commit(root: Path, state: State, draft: Path) -> Checkpoint:
    """Add the inventory to a filled draft, bring it to disk and give it its name."""
    target = _directory(root, state.batch)
    inventory = _Inventory(state=state, files=_files(draft))
    (draft / "state.json").write_bytes(msgspec.json.format(msgspec.json.encode(inventory)))
    durable.keep(draft, target)
    return Checkpoint(state=state, directory=target)


def read(directory: Path) -> Checkpoint:
    """Verify a checkpoint. Raises CheckpointError naming the first file that is not as written."""
    try:
        inventory = msgspec.json.decode((directory / "state.json").read_bytes(), type=_Inventory)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{directory / 'state.json'}: {error}") from error
    for name, expected in inventory.files.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing")
        if path.stat().st_size != expected.size:
            raise CheckpointError(
                f"{path}: expected {expected.size} bytes, found {path.stat().st_size}"
            )
        if durable.sha256(path) != expected.sha256:
            raise CheckpointError(f"{path}: the content is not what was written")
    return Checkpoint(state=inventory.state, directory=directory)


def newest_good(root: Path) -> Checkpoint | None:
    """The newest checkpoint that verifies; a damaged one is skipped with a warning.

    Raises CheckpointError when there are checkpoints but none is good.
    """
    found = _directories(root)
    for directory in reversed(found):
        try:
            return read(directory)
        except CheckpointError as error:
            log.warning("damaged checkpoint, taking the one before: %s", error)
    if found:
        raise CheckpointError(f"{root}: none of {len(found)} checkpoints is usable")
    return None


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, 2 at least."""
    for directory in _directories(root)[: -max(keep, 2)]:
        shutil.rmtree(directory)


def _directory(root: Path, batch: int) -> Path:
    return root / f"b{batch:08d}"


def _directories(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("b????????") if path.is_dir())


def _files(directory: Path) -> dict[str, _File]:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): _File(path.stat().st_size, durable.sha256(path))
        for path in paths
    }

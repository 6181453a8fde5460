"""Checkpoints: verl's own files and where in the log the run stands, whole or not there at all.

    checkpoints/b00000007/actor/…       model, optimizer, scheduler and random state, as verl saves
                          state.json    batch, position, size and sha256 of every file

The directory gets its name when everything in it is on disk, so a name means a finished checkpoint.
What the disk did to it later is found on reading, and the one before is taken with a warning.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from turnfold.schemas.errors import UserError
from turnfold.schemas.policies import UpdateSchedule
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
    schedule: UpdateSchedule | None = None
    """How that batch was divided into optimizer steps, for the same."""
    at: float = 0.0
    """Unix seconds when the batch was trained, to keep checkpoints by age."""


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
    inventory = _inventory(directory)
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


def prune(root: Path, *, keep: int, hours: int = 0) -> None:
    """Remove old checkpoints; the newest `keep` stay, 2 at least.

    So does the newest one of each hour of the `hours` before the newest checkpoint:

        keep 2, hours 3:   9:10  9:50* 10:20  10:40* 11:05  11:20* 11:30*     * stays
    """
    found = _directories(root)
    older = found[: -max(keep, 2)]
    staying = _newest_of_hours(found, hours) if hours and older else set()
    for directory in older:
        if directory not in staying:
            shutil.rmtree(directory)


def _newest_of_hours(directories: Sequence[Path], hours: int) -> set[Path]:
    """Of each hour of the clock the newest checkpoint, back to `hours` before the newest of all.

    One whose inventory cannot be read has no age and is not among them.
    """
    times: dict[Path, float] = {}
    for directory in directories:
        with suppress(CheckpointError):
            times[directory] = _inventory(directory).state.at
    newest = max(times.values(), default=0.0)
    by_hour = {
        int(at // 3600): directory for directory, at in times.items() if at > newest - hours * 3600
    }
    return set(by_hour.values())


def _inventory(directory: Path) -> _Inventory:
    path = directory / "state.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Inventory)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: {error}") from error


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

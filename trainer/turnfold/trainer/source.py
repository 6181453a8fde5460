"""Whether manifests and trajectories are those that they should be. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, GroupRef, RolloutRef
from turnfold.schemas.errors import UserError
from turnfold.schemas.run import RunConfig
from turnfold.schemas.trajectories import Trajectory
from turnfold.schemas.wire import Wire


class SourceError(UserError):
    """The log does not hold what a manifest says; the text says what and where."""


class Batch(Wire, frozen=True, kw_only=True):
    """A manifest with the trajectories that it names, in its order."""

    cut: BatchCut
    trajectories: tuple[Trajectory, ...]


def check_manifest(cut: BatchCut, run: RunConfig) -> None:
    """Raise SourceError for a manifest that was cut under another configuration."""
    if cut.config_digest != run.digest:
        raise SourceError(
            f"batch {cut.index} was cut under run configuration {cut.config_digest[:12]}, this "
            f"trainer has {run.digest[:12]}: give assembler and trainer the same TURNFOLD_* "
            "variables"
        )


def check_trained(cut: BatchCut, manifest_digest: str) -> None:
    """Raise SourceError unless this is the manifest that the checkpoint was trained on."""
    found = codec.digest(cut)
    if found != manifest_digest:
        raise SourceError(
            f"the manifest of batch {cut.index} has digest {found[:12]}, the checkpoint was trained "
            f"on {manifest_digest[:12]}: the run directory belongs to another log"
        )


def refs(cut: BatchCut) -> Iterator[tuple[GroupRef, RolloutRef]]:
    """Every rollout of a manifest with its group, in order."""
    for group in cut.groups:
        for ref in group.rollouts:
            yield group, ref


def check_trajectory(group: GroupRef, ref: RolloutRef, trajectory: Trajectory) -> None:
    """Raise SourceError unless this is the very trajectory that the manifest names."""
    where = f"trajectories/{ref.partition}@{ref.offset}"
    if (trajectory.rollout_id, trajectory.group_id) != (ref.rollout_id, group.group_id):
        raise SourceError(
            f"{where}: expected rollout {ref.rollout_id} of group {group.group_id}, found "
            f"{trajectory.rollout_id} of group {trajectory.group_id}: the topic was rebuilt since "
            "the batch was cut; rebuild the manifests too"
        )
    found = codec.digest(trajectory)
    if found != ref.digest:
        raise SourceError(
            f"{where}: rollout {ref.rollout_id} has digest {found[:12]}, the manifest says "
            f"{ref.digest[:12]}: the trajectory differs from the one that was cut"
        )


def staleness(cut: BatchCut, ref: RolloutRef) -> int:
    """Versions between the oldest policy that sampled the rollout and the one it trains.

    Batch 13 trains version 12: a rollout sampled by versions 9 to 12 has staleness 3.
    """
    return cut.policy_version - ref.min_policy_version


def runs(offsets: Iterable[int], max_gap: int = 64) -> list[Sequence[int]]:
    """Sorted offsets in parts that one sequential read each can fetch.

    runs([5, 900, 6, 40])  ->  [[5, 6, 40], [900]]
    """
    parts: list[list[int]] = []
    for offset in sorted(set(offsets)):
        if parts and offset - parts[-1][-1] <= max_gap:
            parts[-1].append(offset)
        else:
            parts.append([offset])
    return list(parts)

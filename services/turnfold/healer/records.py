"""A trajectory as a record of `<ns>.trajectories`. Pure."""

from __future__ import annotations

import hashlib

import msgspec

from turnfold.schemas import codec
from turnfold.schemas.trajectories import Trajectory


class TrajectoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent: the headers tell rollout, revision and digest without decoding the value."""

    key: bytes
    value: bytes
    headers: dict[str, str]


def trajectory_record(trajectory: Trajectory) -> TrajectoryRecord:
    """The record of a trajectory; its key is the group, so that a group lies in one partition."""
    value = codec.encode(trajectory)
    return TrajectoryRecord(
        key=trajectory.group_id.encode(),
        value=value,
        headers={
            "content-type": codec.MSGPACK,
            "rollout_id": trajectory.rollout_id,
            "revision": str(trajectory.revision),
            "digest": hashlib.sha256(value).hexdigest(),
        },
    )

"""Loads a reward function, and writes refolded trajectories to the topic of another namespace."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Self

from turnfold.healer.records import TrajectoryRecord, trajectory_record
from turnfold.log.client import Producer, create_topics, reader_from_start
from turnfold.log.settings import Kafka
from turnfold.replay.compare import Key, named
from turnfold.replay.refold.rewards import RewardError, RewardFunction
from turnfold.schemas.errors import UserError
from turnfold.schemas.topics import Topics
from turnfold.schemas.trajectories import Trajectory

_MAX_WAITING = 100


def load_reward(name: str) -> RewardFunction:
    """The function that `package.module:function` or `path/to/file.py:function` names.

    Raises RewardError when there is no such module, file or function.
    """
    where, _, function_name = name.rpartition(":")
    if not where or not function_name:
        raise RewardError(
            f"reward {name!r}: expected module:function or path/to/file.py:function, "
            "such as rewards.py:score"
        )
    module = _file_module(Path(where)) if where.endswith(".py") else _named_module(where)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RewardError(f"reward {name!r}: {where} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def _named_module(name: str) -> ModuleType:
    # As `python -m` does: a module next to where the command is started can be found.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise RewardError(f"reward module {name!r} cannot be imported: {error}") from error


def _file_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"reward file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"turnfold_reward_{path.stem}", path)
    assert spec is not None, f"{path} ends in .py"
    assert spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TrajectoryTopic:
    """The trajectories topic of a namespace, to which each trajectory is written once.

    async with TrajectoryTopic(kafka, "tree") as target:
        await target.add(trajectory)
    target.num_written, target.num_found

    The topic is created when it is missing. What an interrupted run left there is kept and not
    written again; a trajectory of the same rollout with other bytes is a UserError, because two
    results in one topic could not be told apart.
    """

    def __init__(self, kafka: Kafka, namespace: str, *, num_partitions: int = 4) -> None:
        self.num_written = 0
        self.num_found = 0
        """Trajectories that were there already."""
        self._kafka = kafka
        topics = Topics(namespace=namespace)
        self._topic = topics.trajectories
        self._specs = [spec for spec in topics.specs(num_partitions) if spec.name == self._topic]
        self._digests: dict[Key, str] = {}
        self._waiting: list[TrajectoryRecord] = []

    async def __aenter__(self) -> Self:
        await create_topics(self._kafka, self._specs)
        async with reader_from_start(self._kafka, self._topic) as reader:
            async for record in reader.read_to_end():
                headers = {name: value.decode() for name, value in record.headers}
                key = (headers.get("rollout_id", ""), int(headers.get("revision", 0)))
                self._digests[key] = headers.get("digest", "")
        self._producer = await Producer(self._kafka).__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._flush()
        await self._producer.__aexit__(*exc)

    async def add(self, trajectory: Trajectory) -> None:
        """Write a trajectory, unless it is there."""
        record = trajectory_record(trajectory)
        key = (trajectory.rollout_id, trajectory.revision)
        found = self._digests.get(key)
        if found == record.headers["digest"]:
            self.num_found += 1
            return
        if found is not None:
            raise UserError(
                f"{self._topic} holds another trajectory of {named(key)}: write each result to a "
                "namespace of its own"
            )
        self._waiting.append(record)
        if len(self._waiting) == _MAX_WAITING:
            await self._flush()

    async def _flush(self) -> None:
        sends = [
            self._producer.send_raw(self._topic, key=r.key, value=r.value, headers=r.headers)
            for r in self._waiting
        ]
        self._waiting = []
        self.num_written += len(await asyncio.gather(*sends))

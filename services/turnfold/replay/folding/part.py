"""One partition of a replay: its fold, what came of it, and how to go on with it later. Pure.

    low watermark        through                    end of the log
    |--- warmed up ------|--- folded for the first time ---|
    start of the oldest rollout that was open

A checkpoint holds no token: the open rollouts are folded again, silently, as a healer does when it
starts.
"""

from __future__ import annotations

from collections import Counter

from turnfold.healer.partition import Revisions
from turnfold.log.records import Record
from turnfold.replay.compare import Key
from turnfold.replay.rebuild import Rebuild
from turnfold.schemas.events import HistoryMode
from turnfold.schemas.trajectories import Trajectory
from turnfold.schemas.wire import Wire


class Checkpoint(Wire, frozen=True, kw_only=True, tag="replay_checkpoint"):
    """How far a replay of one partition has come, and to what."""

    question: str
    """Log, selection and mode: a checkpoint answers no other question."""
    partition: int
    restart_at: int
    """Offset at which reading begins."""
    log_time: float
    """Latest time of a record before it, Unix seconds."""
    through: int
    """Next offset that is not folded yet."""
    num_events: int
    digests: tuple[tuple[str, int, str], ...] = ()
    """rollout_id, revision and digest of each trajectory so far."""
    revised: tuple[str, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    """Place and reason."""
    ignored: dict[str, int] = {}
    chosen: tuple[bytes, ...] = ()
    """Keys that the selection has learnt."""


class Part:
    """The replay of one partition.

    part = Part("turnfold.events", 0, mode=None)
    for record in records:
        for trajectory in part.feed(record):
            part.digests[trajectory.rollout_id, trajectory.revision] = digest(trajectory)
    part.checkpoint(question, chosen)
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        *,
        mode: HistoryMode | None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.topic, self.partition = topic, partition
        self.position = checkpoint.through if checkpoint else 0
        """Next offset to fold for the first time."""
        self.start = checkpoint.restart_at if checkpoint else 0
        """Offset to read from."""
        self.digests: dict[Key, str] = {}
        self._rejected: list[tuple[str, str]] = []
        self._ignored: Counter[str] = Counter()
        self._num_events = self._through = 0
        self._rebuild = Rebuild(mode, log_time=checkpoint.log_time if checkpoint else 0.0)
        if checkpoint:
            self._take_up(checkpoint)

    def _take_up(self, checkpoint: Checkpoint) -> None:
        self._through = checkpoint.through
        self._num_events = checkpoint.num_events
        self.digests = {(name, revision): digest for name, revision, digest in checkpoint.digests}
        self._rejected += checkpoint.rejected
        self._ignored.update(checkpoint.ignored)
        self._rebuild.revised += checkpoint.revised

    @property
    def num_events(self) -> int:
        return self._num_events + self._rebuild.num_events

    @property
    def open_rollouts(self) -> list[str]:
        return self._rebuild.open_rollouts

    @property
    def has_open_rollouts(self) -> bool:
        return self._rebuild.has_open_rollouts

    @property
    def revised(self) -> list[str]:
        """Rollouts whose reward was revised after they ended."""
        return self._rebuild.revised

    def feed(self, record: Record) -> list[Trajectory]:
        """The trajectories that a record completes, unless they are in the checkpoint."""
        if record.offset < self._through:
            self._rebuild.warm_up(record)
            return []
        made = self._rebuild.feed(record)
        self.position = record.offset + 1
        return made

    def skip(self, record: Record) -> None:
        """A record that is not asked for."""
        self.position = max(self.position, record.offset + 1)

    def revisions(self) -> Revisions:
        """A second reader of the partition, for the superseding trajectories."""
        return self._rebuild.revisions()

    @property
    def rejected(self) -> list[tuple[str, str]]:
        """Place and reason of each record that could not be used."""
        found = [(str(record), reason) for record, reason in self._rebuild.rejected]
        return [*self._rejected, *found]

    @property
    def ignored(self) -> Counter[str]:
        """Events that changed nothing, by kind."""
        return self._ignored + self._rebuild.ignored

    def checkpoint(self, question: str, chosen: set[bytes]) -> Checkpoint:
        restart = self._rebuild.restart_point(self.topic, self.partition, self.position)
        return Checkpoint(
            question=question,
            partition=self.partition,
            restart_at=restart.offset,
            log_time=restart.log_time,
            through=self.position,
            num_events=self.num_events,
            digests=tuple((name, revision, d) for (name, revision), d in self.digests.items()),
            revised=tuple(self.revised),
            rejected=tuple(self.rejected),
            ignored=dict(self.ignored),
            chosen=tuple(sorted(chosen)),
        )

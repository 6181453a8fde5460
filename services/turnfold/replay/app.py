"""What the replay commands do, without how they look: read a log, compute, hand back a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path

import msgspec

from turnfold.healer.recorded import decode_event
from turnfold.healer.rows import FOLD_VERSION
from turnfold.log.client import Producer, Record, create_topics
from turnfold.log.settings import Kafka
from turnfold.replay.client import FileLog, KafkaLog, LogSource, OnProgress, append
from turnfold.replay.compare import Difference, Key, Written, combined_digest, explain, named
from turnfold.replay.decisions import Decisions, Verdict, decoded
from turnfold.replay.folding.app import Folded, rebuilt
from turnfold.replay.folding.client import CheckpointFolder
from turnfold.replay.folding.part import Checkpoint
from turnfold.replay.logfile import Header, LogReader, LogWriter
from turnfold.replay.processes.app import divided
from turnfold.replay.ranges import OffsetRanges, between
from turnfold.replay.rebuild import Rebuild, Selection
from turnfold.replay.shares.app import WrittenRecord, replay_share
from turnfold.replay.writers import Writer, writer_for
from turnfold.schemas import codec
from turnfold.schemas.errors import UserError
from turnfold.schemas.events import Event, HistoryMode
from turnfold.schemas.topics import Topics
from turnfold.schemas.trajectories import Trajectory

_MAX_EXPLAINED = 5
_MAX_IMPORT_RECORDS = 500


class Report(msgspec.Struct, kw_only=True):
    """What a replay found."""

    num_events: int = 0
    num_trajectories: int = 0
    digest: str = ""
    """Of all trajectories, whatever order they came in."""
    is_compared: bool = True
    differences: list[Difference] = []
    num_of_other_versions: Counter[int] = msgspec.field(default_factory=Counter)
    """Trajectories that were not compared, as another version of the fold wrote them, by version."""
    explanations: list[str] = []
    """The first differences in detail."""
    verdicts: list[Verdict] = []
    """On the decisions of each run."""
    open_rollouts: list[str] = []
    rejected: list[tuple[str, str]] = []
    """Place and reason of each record that could not be used."""
    ignored: Counter[str] = msgspec.field(default_factory=Counter)

    @property
    def num_decisions(self) -> int:
        return sum(v.num_same + len(v.differences) for v in self.verdicts)

    @property
    def all_differences(self) -> list[Difference]:
        return [*self.differences, *(d for verdict in self.verdicts for d in verdict.differences)]


async def replay(
    source: LogSource,
    *,
    mode: HistoryMode | None = None,
    selection: Selection | None = None,
    is_compared: bool = True,
    writer: Writer | None = None,
    num_processes: int = 1,
    checkpoints: Path | None = None,
    is_resumed: bool = False,
    on_progress: OnProgress = lambda _: None,
) -> Report:
    """Fold the events again and hold the result against what healer and assembler wrote.

    `selection` looks at some rollouts only and leaves the decisions out. Nothing is kept of a
    trajectory but its digest, so memory does not grow with the tokens of the log. With several
    processes there can be no writer. `checkpoints` is a folder in which it keeps how far it has
    come; a resumed replay goes on from there, also when the log has grown since.
    """
    selection = selection or Selection()
    assert writer is None or not is_resumed, "a file begins with the first trajectory"
    assert writer is None or num_processes == 1, "a file is written by one process"
    folder, resumed = await _checkpoints(source, mode, selection, checkpoints, is_resumed)
    # Before anything else, so that a decision that is taken meanwhile is not held against a log that
    # was read when it had not been.
    decisions = Decisions()
    if is_compared and selection.is_everything:
        await _read_decisions(source, decisions)
    job = partial(
        replay_share,
        source=source,
        mode=mode,
        selection=selection,
        is_compared=is_compared,
        writer=writer,
        folder=folder,
        resumed=resumed,
    )
    shares = await divided(job, num_processes, on_progress)
    folded = Folded()
    for share in shares:
        folded.add(share.folded)
    report = Report(
        num_events=folded.num_events,
        num_trajectories=len(folded.digests),
        digest=combined_digest(folded.digests),
        is_compared=is_compared,
        open_rollouts=folded.open_rollouts,
        rejected=folded.rejected,
        ignored=folded.ignored,
    )
    if is_compared:
        records = [record for share in shares for record in share.written]
        written = _written(records)
        report.num_of_other_versions.update(written.of_other_versions.values())
        report.differences, explained = await _differences(source, folded, written)
        report.explanations = await _explanations(source, mode, explained)
        for record in records:
            found = record.trajectory
            decisions.add_rollout(record.partition, record.offset, found.summary if found else None)
        report.verdicts = decisions.retake()
    return report


async def _checkpoints(
    source: LogSource,
    mode: HistoryMode | None,
    selection: Selection,
    path: Path | None,
    is_resumed: bool,
) -> tuple[CheckpointFolder | None, dict[int, Checkpoint]]:
    """Where the replay keeps how far it has come, and how far it had come before."""
    if path is None:
        return None, {}
    events = source.topics.events
    question = f"{events}, fold {FOLD_VERSION}, mode {mode or 'as run'}, {selection.question}"
    folder = CheckpointFolder(path, question)
    if is_resumed:
        return folder, folder.read()
    folder.clear(range((await source.num_partitions([events])).get(events, 0)))
    return folder, {}


async def offsets_between(
    source: LogSource, since: float | None, until: float | None
) -> OffsetRanges | None:
    """The events from `since` (included) to `until` (not included), Unix seconds; None for all."""
    if since is None and until is None:
        return None
    events = source.topics.events
    starts = await source.offsets_at(events, since or 0.0)
    return between(starts, None if until is None else await source.offsets_at(events, until))


def _written(records: Iterable[WrittenRecord]) -> Written:
    """The trajectories that were asked for."""
    written = Written()
    for record in records:
        found = record.trajectory
        if found is not None and found.is_selected:
            key = (found.summary.rollout_id, found.summary.revision)
            written.add(key, found.digest, found.source, found.fold_version)
    return written


async def _differences(
    source: LogSource, folded: Folded, written: Written
) -> tuple[list[Difference], list[Key]]:
    """What is not as it was written, and the first trajectories that are worth explaining."""
    differences = {
        key: difference
        for key, digest in folded.digests.items()
        if (difference := written.difference_to(key, digest)) is not None
    }
    found_differences = [*differences.values(), *written.doubled()]
    if leftovers := written.leftovers():
        ends = await source.end_offsets(source.topics.events)
        found_differences += (
            leftover.difference
            for leftover in leftovers
            if leftover.is_unfounded(folded.reached, ends)
        )
    return found_differences, list(differences)[:_MAX_EXPLAINED]


async def _read_decisions(source: LogSource, decisions: Decisions) -> None:
    """What the assembler decided, and of which tasks."""
    topics = source.topics
    async for record in source.read(topics.batches, topics.tasks):
        if record.topic == topics.tasks:
            decisions.add_task(record)
        else:
            decisions.add_decision(record)


async def _explanations(
    source: LogSource, mode: HistoryMode | None, keys: Collection[Key]
) -> list[str]:
    """What differs in these trajectories; they are folded again, since only digests were kept."""
    lines: list[str] = []
    if not keys:
        return lines
    selection = Selection({rollout_id for rollout_id, _ in keys})
    again = {
        (trajectory.rollout_id, trajectory.revision): trajectory
        async for trajectory in rebuilt(source, Rebuild(mode), selection, lambda _: None)
    }
    async for record in source.read(source.topics.trajectories):
        written: Trajectory | None = decoded(Trajectory, record)
        key = (written.rollout_id, written.revision) if written else ("", 0)
        if written and key in keys:
            lines += [f"{named(key)}: {line}" for line in explain(written, again[key])]
    return lines


@contextmanager
def file_writer(path: Path | None) -> Iterator[Writer | None]:
    """A writer for a file that appears under its name only when it is whole."""
    if path is None:
        yield None
        return
    part = path.with_name(path.name + ".part")
    with part.open("wb+") as file:
        writer = writer_for(path.suffix, file)
        yield writer
        writer.close()
    part.replace(path)


async def events(
    source: LogSource, selection: Selection
) -> AsyncGenerator[tuple[Record, Event | str]]:
    """The events of a log with their records; a text says what is wrong with one."""
    async with aclosing(source.read(source.topics.events)) as records:
        async for record in records:
            if selection.holds_event(record):
                try:
                    yield record, decode_event(record)
                except codec.CodecError as error:
                    yield record, str(error)


async def export(
    source: KafkaLog,
    path: Path,
    selection: Selection,
    *,
    is_events_only: bool = False,
    on_progress: OnProgress = lambda _: None,
) -> int:
    """Write the log to a file and return the number of records.

    With a selection, only events and trajectories of the chosen rollouts are written.
    """
    topics = source.topics
    wanted = [topics.events]
    if not is_events_only:
        wanted.append(topics.trajectories)
        if selection.is_everything:
            wanted += [topics.tasks, topics.batches, topics.policies, topics.dead_letters]
    num_partitions = await source.num_partitions(wanted)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        header = Header(namespace=topics.namespace, topics=num_partitions)
        writer = LogWriter(file, header)
        for topic in num_partitions:
            async for record in source.read(topic):
                on_progress(1)
                if _is_selected(record, topics, selection):
                    writer.add(record)
        writer.close()
    part.replace(path)
    return writer.num_records


def _is_selected(record: Record, topics: Topics, selection: Selection) -> bool:
    if selection.is_everything:
        return True
    if record.topic == topics.events:
        return selection.holds_event(record)
    group_id = (record.key or b"").decode(errors="replace")
    rollout_id = next(
        (value.decode() for name, value in record.headers if name == "rollout_id"), ""
    )
    return selection.holds_rollout(rollout_id, group_id)


async def import_log(
    path: Path, kafka: Kafka, namespace: str, on_progress: OnProgress = lambda _: None
) -> int:
    """Append the records of a file to a broker, under another namespace if need be; how many.

    The topics are created with the file's numbers of partitions; each must be empty. The file is
    checked as a whole before the first record is written.
    """
    source = FileLog(path)
    names = {
        topic: namespace + topic.removeprefix(source.header.namespace)
        for topic in source.header.topics
    }
    with path.open("rb") as file:
        for _ in LogReader(file, str(path)):
            pass
    target = KafkaLog(kafka, namespace)
    await _make_empty_topics(target, {names[t]: n for t, n in source.header.topics.items()})
    num_records = 0
    async with Producer(kafka) as producer:
        waiting: list[Record] = []
        async for record in source.read(*names):
            waiting.append(record)
            if len(waiting) == _MAX_IMPORT_RECORDS:
                num_records += await append(producer, waiting, names)
                on_progress(len(waiting))
                waiting = []
        num_records += await append(producer, waiting, names)
        on_progress(len(waiting))
    return num_records


async def _make_empty_topics(target: KafkaLog, num_partitions: dict[str, int]) -> None:
    specs = {spec.name: spec for spec in target.topics.specs()}
    for name, number in num_partitions.items():
        spec = msgspec.structs.replace(specs[name], num_partitions=number)
        await create_topics(target.kafka, [spec])
    found = await target.num_partitions(num_partitions)
    for name, number in num_partitions.items():
        if found[name] != number:
            raise UserError(
                f"topic {name} has {found[name]} partitions, the file has {number}: "
                "import into another namespace"
            )
        if await target.num_records(name):
            raise UserError(f"topic {name} is not empty: import into another namespace")


async def publish(
    lines: Iterable[str], kafka: Kafka, namespace: str, *, is_checked_only: bool = False
) -> int:
    """Publish one JSON event a line and return how many, each acknowledged.

    Raises UserError naming the first line that is no event; the lines before it are published.
    """
    if is_checked_only:
        return sum(1 for _ in _parsed(lines, "nothing was published"))
    num_published = 0
    topic = Topics(namespace=namespace).events
    async with Producer(kafka) as producer:
        for event in _parsed(lines, "the lines before it were published"):
            # The time that the event names, so that a copy of an old log is as old as the log.
            await producer.send_raw(
                topic,
                key=event.rollout_id.encode(),
                value=codec.encode(event),
                headers={"content-type": codec.MSGPACK},
                timestamp=event.at or None,
            )
            num_published += 1
    return num_published


def _parsed(lines: Iterable[str], outcome: str) -> Iterator[Event]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event: Event = codec.decode(Event, line.encode(), codec.JSON)
        except codec.CodecError as error:
            raise UserError(f"line {number}: {error}; {outcome}") from error
        yield event

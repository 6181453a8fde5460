"""Sends tasks to `<ns>.tasks` at the pace that the batches and the served versions set."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec
from aiokafka.errors import KafkaError

from turnfold.dispatcher.client import Dataset, DatasetError, open_dataset
from turnfold.dispatcher.plan import (
    DispatchState,
    Slot,
    is_done,
    next_slots,
    place_of,
    row_at,
    task_id,
)
from turnfold.dispatcher.settings import Settings
from turnfold.log.client import FENCED, BrokerUnavailable, Producer, Reader, Record, Replaced
from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas.batches import Decision
from turnfold.schemas.policies import PolicyEvent
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task

log = logging.getLogger("turnfold.dispatcher")

_MAX_TASKS_PER_TRANSACTION = 64


async def run(settings: Settings, config: RunConfig, health: Health, stop: asyncio.Event) -> None:
    """Dispatch until `stop` is set, or until the run's limit is reached and all is decided.

    Raises DatasetError, BrokerUnavailable, MissingTopic, or Replaced when another dispatcher has
    taken over.
    """
    dataset = open_dataset(settings.dataset, settings.dataset_split)
    name = f"{settings.namespace}-dispatcher-{config.run_id}"
    try:
        # Fence an older dispatcher before reading: then nothing of it can come after what is read.
        async with (
            Producer(settings.bootstrap, transactional_id=name) as producer,
            Reader(settings.bootstrap) as reader,
        ):
            await _Dispatcher(settings, config, dataset, producer, reader).run(health, stop)
    except FENCED as error:
        raise Replaced(
            f"another dispatcher of run {config.run_id!r} has taken over, so this one ends; "
            "run one dispatcher a run"
        ) from error
    except KafkaError as error:
        raise BrokerUnavailable(settings.bootstrap, repr(error)) from error


class _Dispatcher:
    def __init__(
        self,
        settings: Settings,
        config: RunConfig,
        dataset: Dataset,
        producer: Producer,
        reader: Reader,
    ) -> None:
        self.settings = settings
        self.topics = settings.topics
        self.config = config
        self.dataset = dataset
        self.producer = producer
        self.reader = reader
        self.state = DispatchState(config)
        self._shown = ""

    async def run(self, health: Health, stop: asyncio.Event) -> None:
        await self.reader.assign_from_start(
            [self.topics.tasks, self.topics.batches, self.topics.policies]
        )
        async for record in self.reader.read_to_end():
            self._fold(record)
        self._check_dataset()
        limits = self.settings.limits
        while not stop.is_set():
            health.ready(self._show_progress())
            if is_done(self.state, len(self.dataset), limits):
                log.info("run %s: all that was asked for is dispatched", self.config.run_id)
                return
            slots = next_slots(self.state, len(self.dataset), limits)
            if slots:
                await self._send(slots[:_MAX_TASKS_PER_TRANSACTION], stop)
            else:
                await self._poll()

    async def _send(self, slots: list[Slot], stop: asyncio.Event) -> None:
        """Send tasks in one transaction, and read on until they have come back."""
        first = self.state.next_dispatch_index
        async with self.producer.transaction():
            for index, slot in enumerate(slots, start=first):
                task = self._task(slot, index)
                await self.producer.send(self.topics.tasks, key=task.group_id, message=task)
        while self.state.next_dispatch_index < first + len(slots) and not stop.is_set():
            await self._poll()

    def _task(self, slot: Slot, dispatch_index: int) -> Task:
        settings, config = self.settings, self.config
        if slot.lost is not None:
            name, payload = slot.lost.task_id, slot.lost.payload
        else:
            name, payload = self._row(slot)
        assert self.state.served_version is not None, "dispatched before a version was served"
        return Task(
            run_id=config.run_id,
            group_id=f"{config.run_id}-{dispatch_index:06d}",
            task_id=name,
            dispatch_index=dispatch_index,
            n=config.group_size,
            payload=payload,
            attempt=slot.attempt,
            epoch=slot.place.epoch,
            cursor=slot.place.cursor,
            policy_version=self.state.served_version,
            dispatched_at=time.time(),
            rollout_timeout_s=config.rollout_timeout_s,
            history_mode=settings.history_mode,
            nonlinear=settings.nonlinear,
            sampling=settings.sampling,
            max_turns=settings.max_turns,
            max_context_tokens=settings.max_context_tokens,
        )

    def _row(self, slot: Slot) -> tuple[str, dict[str, object]]:
        settings = self.settings
        index = row_at(slot.place, len(self.dataset), settings.seed, settings.is_shuffled)
        row = self.dataset[index]
        return task_id(row, index), row

    def _check_dataset(self) -> None:
        """Refuse to go on with another data set or order than the one that the log began with."""
        last = self.state.last
        if last is None:
            return
        is_inside = last.cursor < len(self.dataset)
        name, row = self._row(Slot(place=place_of(last))) if is_inside else ("nothing", {})
        encode = msgspec.msgpack.encode
        if name == last.task_id and encode(row) == encode(last.payload):
            return
        raise DatasetError(
            f"data set {self.dataset.path} is not the one that run {self.config.run_id!r} was "
            f"started with: epoch {last.epoch}, place {last.cursor} was task {last.task_id!r} and "
            f"is now {name!r}. Use the same data set, seed and shuffling, or another run_id"
        )

    async def _poll(self) -> None:
        for record in await self.reader.poll():
            self._fold(record)

    def _fold(self, record: Record) -> None:
        kinds = {
            self.topics.tasks: Task,
            self.topics.batches: Decision,
            self.topics.policies: PolicyEvent,
        }
        try:
            message = codec.decode(kinds[record.topic], record.value or b"", record.content_type)
        except codec.CodecError as error:
            # The assembler and the relay keep damaged records of these topics.
            log.warning("%s skipped: %s", record, error)
            return
        if record.topic == self.topics.tasks:
            self.state.add_task(message)
        elif record.topic == self.topics.batches:
            self.state.add_decision(message)
        else:
            self.state.add_policy(message)

    def _show_progress(self) -> str:
        """What the dispatcher waits for, in one line; logged when it changes."""
        state, config = self.state, self.config
        if state.served_version is None:
            line = "waiting for the engines to serve policy version 0"
        else:
            seats = (state.served_version + config.max_staleness + 1) * config.groups_per_batch
            line = (
                f"version {state.served_version} served, {state.decisions.num_batches} batches "
                f"cut, {len(state.outstanding)} groups in flight, {state.next_dispatch_index} "
                f"dispatched, {max(0, seats - state.num_cut - len(state.outstanding))} seats free"
            )
        if line != self._shown:
            log.info("run %s: %s", config.run_id, line)
            self._shown = line
        return line

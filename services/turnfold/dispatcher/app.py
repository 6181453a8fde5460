"""Sends tasks to `<ns>.tasks` at the pace that the batches and the served versions set."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

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
from turnfold.dispatcher.rounds import RoundSlot, evaluation_of, is_evaluated, next_evaluations
from turnfold.dispatcher.settings import Settings
from turnfold.dispatcher.waiting import awaited
from turnfold.log.client import FENCED, Producer, Reader, Record, Replaced, why_ended
from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas.batches import Decision
from turnfold.schemas.policies import PolicyEvent
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task

log = logging.getLogger("turnfold.dispatcher")

_MAX_TASKS_PER_TRANSACTION = 64
_SAY_EVERY_S = 60.0


async def run(settings: Settings, config: RunConfig, health: Health, stop: asyncio.Event) -> None:
    """Dispatch until `stop` is set, or until the run's limit is reached and all is decided.

    Raises DatasetError, BrokerUnavailable, WorkEnded, MissingTopic, or Replaced when another
    dispatcher has taken over.
    """
    dataset = open_dataset(settings.dataset, settings.dataset_split)
    evaluated = None
    if settings.eval_dataset is not None:
        evaluated = open_dataset(settings.eval_dataset, settings.eval_dataset_split)
    name = f"{settings.namespace}-dispatcher-{config.run_id}"
    try:
        # Fence an older dispatcher before reading: then nothing of it can come after what is read.
        async with (
            Producer(settings, transactional_id=name) as producer,
            Reader(settings) as reader,
        ):
            await _Dispatcher(settings, config, dataset, evaluated, producer, reader).run(
                health, stop
            )
    except FENCED as error:
        raise Replaced(f"dispatcher of run {config.run_id!r}", "one dispatcher a run") from error
    except KafkaError as error:
        raise why_ended(settings, error) from error


class _Dispatcher:
    def __init__(
        self,
        settings: Settings,
        config: RunConfig,
        dataset: Dataset,
        evaluated: Dataset | None,
        producer: Producer,
        reader: Reader,
    ) -> None:
        self.settings = settings
        self.topics = settings.topics
        self.config = config
        self.dataset = dataset
        self.evaluated = evaluated
        """Data set of the evaluations; None without them."""
        self.plan = None if evaluated is None else settings.round_plan(len(evaluated))
        self.producer = producer
        self.reader = reader
        self.state = DispatchState(config)
        self._shown = ""
        self._shown_at = 0.0

    async def run(self, health: Health, stop: asyncio.Event) -> None:
        await self.reader.assign_from_start(
            [self.topics.tasks, self.topics.batches, self.topics.policies]
        )
        async for record in self.reader.read_to_end():
            self._fold(record)
        self._check_dataset()
        self._check_evaluated()
        limits = self.settings.limits
        while not stop.is_set():
            health.ready(self._show_progress())
            is_trained = is_done(self.state, len(self.dataset), limits)
            if is_trained and self._is_evaluated():
                log.info("run %s: all that was asked for is dispatched", self.config.run_id)
                return
            slots = [] if is_trained else next_slots(self.state, len(self.dataset), limits)
            if slots:
                await self._send_slots(slots[:_MAX_TASKS_PER_TRANSACTION], stop)
            elif evaluations := self._next_evaluations(is_trained):
                await self._send_evaluations(evaluations[:_MAX_TASKS_PER_TRANSACTION], stop)
            else:
                await self._poll()

    async def _send_slots(self, slots: list[Slot], stop: asyncio.Event) -> None:
        state, first = self.state, self.state.next_dispatch_index
        tasks = [self._task(slot, index) for index, slot in enumerate(slots, start=first)]
        await self._send(tasks, lambda: state.next_dispatch_index >= first + len(tasks), stop)

    async def _send_evaluations(self, slots: list[RoundSlot], stop: asyncio.Event) -> None:
        rounds, first = self.state.rounds, self.state.rounds.next_dispatch_index
        tasks = [self._evaluation(slot, index) for index, slot in enumerate(slots, start=first)]
        await self._send(tasks, lambda: rounds.next_dispatch_index >= first + len(tasks), stop)

    async def _send(
        self, tasks: list[Task], is_read_back: Callable[[], bool], stop: asyncio.Event
    ) -> None:
        """Send tasks in one transaction, and read on until they have come back."""
        async with self.producer.transaction():
            for task in tasks:
                await self.producer.send(self.topics.tasks, key=task.group_id, message=task)
        while not is_read_back() and not stop.is_set():
            await self._poll()

    def _next_evaluations(self, is_trained: bool) -> list[RoundSlot]:
        if self.plan is None:
            return []
        final = self.state.decisions.num_batches if is_trained else self.settings.num_batches
        served = self.state.served_version
        return next_evaluations(self.state.rounds, self.plan, served, final)

    def _is_evaluated(self) -> bool:
        """Whether the last version that the run makes has been evaluated too."""
        if self.plan is None:
            return True
        return is_evaluated(self.state.rounds, self.state.decisions.num_batches)

    def _task(self, slot: Slot, dispatch_index: int) -> Task:
        settings, config = self.settings, self.config
        if slot.lost is not None:
            name, payload = slot.lost.task_id, slot.lost.payload
        else:
            name, payload = self._row(slot)
        return self._made(
            group_id=f"{config.run_id}-{dispatch_index:06d}",
            task_id=name,
            dispatch_index=dispatch_index,
            n=config.group_size,
            payload=payload,
            attempt=slot.attempt,
            epoch=slot.place.epoch,
            cursor=slot.place.cursor,
            sampling=settings.sampling,
        )

    def _evaluation(self, slot: RoundSlot, dispatch_index: int) -> Task:
        settings, state = self.settings, self.state
        assert self.plan is not None, "an evaluation without a plan"
        name, payload = self._evaluation_row(slot.cursor)
        retry = f"-{slot.attempt}" if slot.attempt else ""
        return self._made(
            group_id=f"{self.config.run_id}-eval-{slot.version:06d}-{slot.cursor:05d}{retry}",
            task_id=name,
            dispatch_index=dispatch_index,
            n=settings.eval_group_size,
            payload=payload,
            split="eval",
            attempt=slot.attempt,
            cursor=slot.cursor,
            sampling=settings.eval_sampling,
            evaluation=evaluation_of(state.rounds, self.plan, slot),
        )

    def _made(self, **fields: Any) -> Task:
        """A task with what all tasks of the run have in common."""
        settings, config = self.settings, self.config
        assert self.state.served_version is not None, "dispatched before a version was served"
        return Task(
            run_id=config.run_id,
            policy_version=self.state.served_version,
            dispatched_at=time.time(),
            rollout_timeout_s=config.rollout_timeout_s,
            history_mode=settings.history_mode,
            nonlinear=settings.nonlinear,
            rewrites=settings.rewrites,
            max_turns=settings.max_turns,
            max_context_tokens=settings.max_context_tokens,
            **fields,
        )

    def _evaluation_row(self, cursor: int) -> tuple[str, dict[str, object]]:
        """Rounds go through the data set in its own order, so that all have the same tasks."""
        if self.evaluated is None or cursor >= len(self.evaluated):
            return "nothing", {}
        row = self.evaluated[cursor]
        return task_id(row, cursor), row

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
        found = self._row(Slot(place=place_of(last))) if is_inside else ("nothing", {})
        self._check_row(self.dataset, last, *found)

    def _check_evaluated(self) -> None:
        """The same for the evaluations: rounds of other tasks would make no curve."""
        last = self.state.rounds.last
        if last is not None and self.evaluated is not None:
            self._check_row(self.evaluated, last, *self._evaluation_row(last.cursor))

    def _check_row(
        self, dataset: Dataset, last: Task, name: str, payload: dict[str, object]
    ) -> None:
        encode = msgspec.msgpack.encode
        if name == last.task_id and encode(payload) == encode(last.payload):
            return
        raise DatasetError(
            f"data set {dataset.path} is not the one that run {self.config.run_id!r} was "
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
        """How far it is, logged when that changes, and what it waits for."""
        state, config = self.state, self.config
        waits_for = awaited(state, time.time())
        if state.served_version is None:
            line = waits_for
        else:
            seats = (state.served_version + config.max_staleness + 1) * config.groups_per_batch
            line = (
                f"version {state.served_version} served, {state.decisions.num_batches} batches "
                f"cut, {len(state.outstanding)} groups in flight, {state.next_dispatch_index} "
                f"dispatched, {max(0, seats - state.num_cut - len(state.outstanding))} seats free"
            )
            if self.plan is not None:
                line += f", {len(state.rounds.outstanding)} evaluation groups in flight"
        if line != self._shown:
            log.info("run %s: %s", config.run_id, line)
            self._shown, self._shown_at = line, time.time()
        elif time.time() - self._shown_at >= _SAY_EVERY_S:
            log.info("run %s: %s", config.run_id, waits_for)
            self._shown_at = time.time()
        return line if line == waits_for else f"{line}; {waits_for}"

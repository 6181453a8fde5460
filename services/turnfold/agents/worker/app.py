"""Runs an agent for every rollout of the groups that the dispatcher hands out.

A group is taken at most once: its offset is committed before the first rollout starts, and a worker
that dies takes the group with it, which then comes back from the dispatcher as another group. The
handler of a task returns as soon as its rollouts are on their way, so that slow ones hold up
neither the others nor the heartbeats of the consumer group.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, defaultdict
from typing import Any, cast

import msgspec
from aiokafka import TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError
from faststream.kafka import KafkaBroker, KafkaMessage

from turnfold.agents.attempts.app import Agent, Attempt, Ended
from turnfold.agents.blocking.app import warning_when_blocked
from turnfold.agents.client import GatewayClient
from turnfold.agents.deadlines import deadlines
from turnfold.agents.decisions.app import following_decisions
from turnfold.agents.results import outcome_of
from turnfold.agents.worker import metrics, status
from turnfold.agents.worker.client import agent_of
from turnfold.agents.worker.settings import Settings
from turnfold.log.client import wait_for_topics
from turnfold.log.faststream import commit, message_broker
from turnfold.log.service import Health
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task

log = logging.getLogger("turnfold.worker")

_TOPICS_TIMEOUT_S = 30.0
_PING_EVERY_S = 5.0
_REPORT_EVERY_S = 30.0
_GOODBYE_S = 5.0
_NUM_REMEMBERED = 10_000
_MAX_LOGGED_CHARS = 300


async def run(settings: Settings, config: RunConfig, health: Health, stop: asyncio.Event) -> None:
    """Run agents until `stop` is set, then let those that run finish within the grace.

    Raises AgentError, CommandError, BrokerUnavailable, or MissingTopic.
    """
    # Loading an agent runs its imports, which may take long.
    agent = await asyncio.to_thread(agent_of, settings)
    topics = settings.topics
    await wait_for_topics(settings, [topics.tasks, topics.batches], _TOPICS_TIMEOUT_S)
    async with GatewayClient(
        settings.gateway_url, settings.control_key, patience_s=settings.gateway_patience_s
    ) as gateway:
        worker = Worker(
            agent,
            gateway,
            settings.concurrency,
            rollout_timeout_s=config.rollout_timeout_s,
            agent_grace_s=settings.agent_grace_s,
            setup_timeout_s=settings.setup_timeout_s,
        )
        broker = create_broker(settings, config, worker)
        async with (
            following_decisions(settings, topics.batches, worker.cancel_group),
            warning_when_blocked(),
        ):
            async with broker:
                await broker.start()
                await _watch(broker, worker, health, stop)
                worker.close()
            # The group's other members have the partitions by now; what runs here may finish.
            health.not_ready("stopping")
            await worker.drain(settings.grace_s)


def create_broker(settings: Settings, config: RunConfig, worker: Worker) -> KafkaBroker:
    """The FastStream broker with the subscriber that takes tasks."""
    topics = settings.topics
    # FastStream would log each record; what matters here is logged by the worker itself.
    quiet = logging.getLogger("turnfold.worker.faststream")
    quiet.setLevel(logging.ERROR)
    broker = message_broker(settings, Task, topics.dead_letters, logger=quiet)

    @broker.subscriber(
        topics.tasks,
        group_id=f"{settings.namespace}-agents",
        auto_offset_reset="earliest",
        title="agent worker",
        description="Takes a group once and runs an agent for each of its rollouts.",
    )
    async def take_task(task: Task, message: KafkaMessage) -> None:
        # While this waits nothing else is taken. A worker that has been full for five minutes
        # loses its partitions to one that has room, and then fails to commit below.
        if not await worker.wait_for_room():
            return  # stopping: another worker gets it
        if _is_expired(task, config, time.time()):
            metrics.SKIPPED.labels("expired").inc()
            log.warning("group %s is past its deadline and is not run", task.group_id)
            await commit(message)
        elif await _is_ours(task, message, worker):
            worker.begin(task)

    return broker


class Worker:
    """Runs the rollouts of any number of groups, at most `concurrency` at a time."""

    def __init__(
        self,
        agent: Agent,
        gateway: GatewayClient,
        concurrency: int,
        *,
        rollout_timeout_s: float = 1800.0,
        agent_grace_s: float = 10.0,
        setup_timeout_s: float | None = None,
    ) -> None:
        self.agent = agent
        self.gateway = gateway
        self.concurrency = concurrency
        self.rollout_timeout_s = rollout_timeout_s
        """For a task that does not say."""
        self.agent_grace_s = agent_grace_s
        self.setup_timeout_s = setup_timeout_s
        self.is_closed = False
        self.ended: Counter[str] = Counter()
        """Rollouts by outcome."""
        self.streak = status.Streak()
        self._slots = asyncio.Semaphore(concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempts: defaultdict[str, set[Attempt]] = defaultdict(set)
        """By group, those of which the agent runs."""
        self._decided: set[str] = set()
        """Groups with rollouts here that are not needed any more."""
        self._pending: Counter[str] = Counter()
        """Rollouts by group."""
        self._room = asyncio.Event()
        self._room.set()
        self._taken: OrderedDict[str, None] = OrderedDict()
        self._seen_errors: set[type[BaseException]] = set()

    @property
    def num_pending(self) -> int:
        """Rollouts that run or wait for a slot."""
        return len(self._tasks)

    @property
    def running(self) -> list[status.Running]:
        """Rollouts that hold a slot now."""
        now = time.monotonic()
        return [
            status.Running(one.rollout.rollout_id or group_id, one.phase, now - one.began)
            for group_id, attempts in self._attempts.items()
            for one in attempts
        ]

    def describe(self) -> str:
        """What runs, what waits and what became of the rest, in one line."""
        running = self.running
        num_waiting = max(0, self.num_pending - len(running))
        return status.line(running, num_waiting, self.concurrency, self.ended, self.streak)

    async def wait_for_room(self) -> bool:
        """True as soon as a rollout could start at once; False when the worker is closed."""
        await self._room.wait()
        return not self.is_closed

    async def wait_until_idle(self) -> None:
        """Until every rollout that was begun has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def has_taken(self, group_id: str) -> bool:
        """Whether this worker took the group before: Kafka redelivers after a rebalance."""
        return group_id in self._taken

    def begin(self, task: Task) -> None:
        """Start all rollouts of a group; they wait for slots by themselves."""
        self._taken[task.group_id] = None
        if len(self._taken) > _NUM_REMEMBERED:
            self._taken.popitem(last=False)
        metrics.GROUPS.inc()
        log.debug("group %s: task %s, %d rollouts", task.group_id, task.task_id, task.n)
        if task.rollout_timeout_s is None:
            task = msgspec.structs.replace(task, rollout_timeout_s=self.rollout_timeout_s)
        for index in range(task.n):
            running = asyncio.create_task(self._run_rollout(task, index))
            self._tasks.add(running)
            self._pending[task.group_id] += 1
            running.add_done_callback(self._forget)
        self._update_room()

    def cancel_group(self, group_id: str) -> None:
        """Nobody needs its rollouts any more: end those that run, do not start the others."""
        if group_id not in self._pending:
            return
        log.info("group %s is decided on: its rollouts end", group_id)
        self._decided.add(group_id)
        for attempt in self._attempts.get(group_id, ()):
            attempt.stop("group_decided")

    def close(self) -> None:
        """Take nothing more; rollouts that wait for a slot will not start."""
        self.is_closed = True
        self._update_room()

    async def drain(self, grace_s: float) -> None:
        """Wait for running rollouts, and after the grace abort what is left."""
        self.close()
        if self._tasks:
            log.info("%d rollouts have %.0f s to finish", len(self._tasks), grace_s)
            await asyncio.wait(self._tasks, timeout=grace_s)
        for attempts in self._attempts.values():
            for attempt in attempts:
                attempt.stop("worker_shutdown")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.agent_grace_s + _GOODBYE_S)

    def _forget(self, running: asyncio.Task[None]) -> None:
        self._tasks.discard(running)
        self._update_room()

    def _update_room(self) -> None:
        if self.is_closed or self.num_pending < self.concurrency:
            self._room.set()
        else:
            self._room.clear()

    async def _run_rollout(self, task: Task, index: int) -> None:
        try:
            async with self._slots:
                ended = await self._attempted(task, index)
        finally:
            self._pending[task.group_id] -= 1
            if not self._pending[task.group_id]:
                del self._pending[task.group_id]
                self._attempts.pop(task.group_id, None)
                self._decided.discard(task.group_id)
        self._count(f"{task.group_id}-{index:02d}", ended)

    async def _attempted(self, task: Task, index: int) -> Ended:
        if task.group_id in self._decided:
            # It was never started, and nobody waits for its end.
            return Ended(outcome=outcome_of("group_decided"), reason="group_decided")
        assert task.rollout_timeout_s is not None, "begin() has set it"
        attempt = Attempt(
            self.agent,
            task.payload,
            self.gateway.rollout_of(task, index),
            deadlines(task.rollout_timeout_s, self.agent_grace_s, self.setup_timeout_s),
        )
        if self.is_closed:
            # Started and aborted without the agent, so that its group need not wait for a deadline.
            attempt.stop("worker_shutdown")
        self._attempts[task.group_id].add(attempt)
        try:
            with metrics.RUNNING.track_inprogress():
                return await attempt.run()
        finally:
            self._attempts[task.group_id].discard(attempt)

    def _count(self, rollout_id: str, ended: Ended) -> None:
        metrics.ROLLOUTS.labels(ended.outcome, ended.reason or "").inc()
        self.ended[ended.outcome] += 1
        if ended.is_left_behind:
            metrics.LEFT_BEHIND.inc()
            log.error(
                "rollout %s: its agent does not end although it was cancelled, and is left behind; "
                "an agent must let asyncio.CancelledError pass",
                rollout_id,
            )
        if ended.outcome == "aborted":
            log.info("rollout %s: %s", rollout_id, ended.reason)
            return
        if ended.reason is not None:
            self._report(rollout_id, ended)
        self.streak = self.streak.after(ended.reason, ended.message)
        if self.streak.is_news:
            log.error("%s: is it the agent itself, or its world?", self.streak.text())

    def _report(self, rollout_id: str, ended: Ended) -> None:
        """The first error of each kind comes with its traceback, later ones in one line."""
        error = ended.error
        is_new = error is not None and type(error) not in self._seen_errors
        if error is not None:
            self._seen_errors.add(type(error))
        log.warning(
            "rollout %s: %s: %s",
            rollout_id,
            ended.reason,
            ended.message.partition("\n")[0][:_MAX_LOGGED_CHARS],
            exc_info=error if is_new else None,
        )


def _is_expired(task: Task, config: RunConfig, now: float) -> bool:
    """Whether the assembler has given the group up: a worker may find old tasks at its start."""
    return 0 < task.dispatched_at < now - config.group_timeout_s


async def _is_ours(task: Task, message: KafkaMessage, worker: Worker) -> bool:
    """Commit the task; False when it has been taken before, or is another worker's by now."""
    record = cast(Any, message.raw_message)
    consumer = cast(Any, message.consumer)
    try:
        committed = await consumer.committed(TopicPartition(record.topic, record.partition))
        # Without this a worker could commit once more what another one took in the meantime.
        is_taken = committed is not None and committed > record.offset
        if not is_taken:
            await commit(message)
    except (KafkaError, IllegalStateError) as error:
        metrics.SKIPPED.labels("moved").inc()
        log.info("group %s is left to another worker: %s", task.group_id, type(error).__name__)
        return False
    if is_taken or worker.has_taken(task.group_id):
        metrics.SKIPPED.labels("redelivered").inc()
        log.info("group %s was taken before", task.group_id)
        return False
    return True


async def _watch(broker: KafkaBroker, worker: Worker, health: Health, stop: asyncio.Event) -> None:
    """Keep the health up to date until the worker is asked to stop, and log what changes."""
    shown, report_at = "", time.monotonic()
    while not stop.is_set():
        described = worker.describe()
        if await broker.ping(_PING_EVERY_S):
            health.ready(described)
        else:
            health.not_ready("Kafka does not answer")
        if described != shown and time.monotonic() >= report_at:
            log.info("%s", described)
            shown, report_at = described, time.monotonic() + _REPORT_EVERY_S
        try:
            await asyncio.wait_for(stop.wait(), _PING_EVERY_S)
        except TimeoutError:
            continue

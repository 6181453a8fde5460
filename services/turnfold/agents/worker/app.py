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
from collections import OrderedDict
from typing import Any, cast

from aiokafka import TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError
from faststream.kafka import KafkaBroker, KafkaMessage

from turnfold.agents.client import GatewayClient, GatewayError, Rollout, RolloutClosed
from turnfold.agents.results import EnvironmentFailed, InvalidResult, as_result
from turnfold.agents.worker import metrics
from turnfold.agents.worker.client import Agent, load_agent
from turnfold.agents.worker.settings import Settings
from turnfold.log.client import wait_for_topics
from turnfold.log.faststream import commit, message_broker
from turnfold.log.service import Health
from turnfold.schemas.run import RunConfig
from turnfold.schemas.tasks import Task

log = logging.getLogger("turnfold.worker")

_TOPICS_TIMEOUT_S = 30.0
_PING_EVERY_S = 5.0
_GOODBYE_S = 5.0
_NUM_REMEMBERED = 10_000
_MAX_MESSAGE_CHARS = 1000


async def run(settings: Settings, config: RunConfig, health: Health, stop: asyncio.Event) -> None:
    """Run agents until `stop` is set, then let those that run finish within the grace.

    Raises AgentError, BrokerUnavailable, or MissingTopic.
    """
    # Loading an agent runs its imports, which may take long.
    agent = await asyncio.to_thread(load_agent, settings.agent)
    await wait_for_topics(settings.bootstrap, [settings.topics.tasks], _TOPICS_TIMEOUT_S)
    async with GatewayClient(
        settings.gateway_url, settings.control_key, patience_s=settings.gateway_patience_s
    ) as gateway:
        worker = Worker(agent, gateway, settings.concurrency)
        broker = create_broker(settings, config, worker)
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
    broker = message_broker(settings.bootstrap, Task, topics.dead_letters, logger=quiet)

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

    def __init__(self, agent: Agent, gateway: GatewayClient, concurrency: int) -> None:
        self.agent = agent
        self.gateway = gateway
        self.concurrency = concurrency
        self.is_closed = False
        self._slots = asyncio.Semaphore(concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._room.set()
        self._taken: OrderedDict[str, None] = OrderedDict()
        self._seen_errors: set[type[BaseException]] = set()

    @property
    def num_pending(self) -> int:
        """Rollouts that run or wait for a slot."""
        return len(self._tasks)

    async def wait_for_room(self) -> bool:
        """True as soon as a rollout could start at once; False when the worker is closed."""
        await self._room.wait()
        return not self.is_closed

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
        for index in range(task.n):
            running = asyncio.create_task(self._run_rollout(task, index))
            self._tasks.add(running)
            running.add_done_callback(self._forget)
        self._update_room()

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
        if self._tasks:
            for running in self._tasks:
                running.cancel()
            await asyncio.wait(self._tasks, timeout=_GOODBYE_S)

    def _forget(self, running: asyncio.Task[None]) -> None:
        self._tasks.discard(running)
        self._update_room()

    def _update_room(self) -> None:
        if self.is_closed or self.num_pending < self.concurrency:
            self._room.set()
        else:
            self._room.clear()

    async def _run_rollout(self, task: Task, index: int) -> None:
        rollout = self.gateway.rollout_of(task, index)
        try:
            async with self._slots:
                outcome = await self._outcome(task, rollout)
        except asyncio.CancelledError:
            outcome = "worker_shutdown"
            await self._give_up(rollout)
        metrics.ROLLOUTS.labels(outcome).inc()

    async def _outcome(self, task: Task, rollout: Rollout) -> str:
        if self.is_closed:
            await self._give_up(rollout)
            return "worker_shutdown"
        try:
            with metrics.RUNNING.track_inprogress():
                value = await self._run_agent(task, rollout)
            return await _finished(rollout, value)
        except RolloutClosed as error:
            log.info("rollout %s: %s", rollout.rollout_id, error)
            return "closed"
        except _Failed as failed:
            self._report(rollout, failed.reason, failed.error)
            await _aborted(rollout, failed.reason, failed.message)
            return failed.reason

    async def _run_agent(self, task: Task, rollout: Rollout) -> Any:
        """The agent's result. Raises _Failed; the deadline counts from before the start."""
        deadline = asyncio.timeout(task.rollout_timeout_s)
        try:
            async with deadline:
                await rollout.start()
                return await self.agent(task.payload, rollout)
        except RolloutClosed:
            raise
        except Exception as error:
            if rollout.status == "new":
                raise _Failed("gateway_error", error) from error
            if deadline.expired() and isinstance(error, TimeoutError):
                raise _Failed("agent_timeout", error) from error
            is_environment = isinstance(error, EnvironmentFailed)
            raise _Failed(
                "environment_error" if is_environment else "agent_error", error
            ) from error

    async def _give_up(self, rollout: Rollout) -> None:
        """End a rollout that will not be run, so that its group need not wait for a deadline."""
        try:
            if rollout.status == "new":
                await rollout.start()
        except GatewayError as error:
            log.warning("a rollout could not be given up: %s", error)
        await _aborted(rollout, "worker_shutdown")

    def _report(self, rollout: Rollout, reason: str, error: Exception) -> None:
        """The first error of each kind comes with its traceback, later ones in one line."""
        is_new = type(error) not in self._seen_errors
        self._seen_errors.add(type(error))
        log.warning(
            "rollout %s: %s: %s",
            rollout.rollout_id,
            reason,
            type(error).__name__,
            exc_info=error if is_new else None,
        )


class _Failed(Exception):
    """A rollout without a reward, and why."""

    def __init__(self, reason: str, error: Exception) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error

    @property
    def message(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"[:_MAX_MESSAGE_CHARS]


async def _finished(rollout: Rollout, value: Any) -> str:
    """Give the reward, unless the agent has done so itself. Raises _Failed and RolloutClosed."""
    if value is None and rollout.status != "running":
        return rollout.status
    try:
        result = as_result(value)
    except InvalidResult as error:
        raise _Failed("invalid_result", error) from error
    try:
        await rollout.finish(
            result.reward,
            rewards=result.rewards,
            is_truncated=result.is_truncated,
            info=result.info,
        )
    except RolloutClosed:
        raise
    except GatewayError as error:
        raise _Failed("gateway_error", error) from error
    return "truncated" if result.is_truncated else "completed"


async def _aborted(rollout: Rollout, reason: str, message: str = "") -> None:
    if rollout.status != "running":
        return
    try:
        await rollout.abort(reason, message)
    except GatewayError as error:
        # Past its deadline the healer ends it.
        log.warning("rollout %s could not be aborted: %s", rollout.rollout_id, error)


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
    """Keep the health up to date until the worker is asked to stop."""
    while not stop.is_set():
        if await broker.ping(_PING_EVERY_S):
            health.ready(f"{worker.num_pending} rollouts, up to {worker.concurrency} at a time")
        else:
            health.not_ready("Kafka does not answer")
        try:
            await asyncio.wait_for(stop.wait(), _PING_EVERY_S)
        except TimeoutError:
            continue

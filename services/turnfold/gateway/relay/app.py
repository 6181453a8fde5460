"""The policy relay as a process: FastStream takes policies from the log, engines get the weights."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from aiokafka.errors import KafkaError
from faststream.kafka import KafkaBroker, KafkaMessage

from turnfold.gateway.backends.kinds import weights_of
from turnfold.gateway.backends.weights import EngineWeights, UpdateFailed
from turnfold.gateway.backends.weights_directory import UnusableWeights
from turnfold.gateway.relay.policies import PolicyView, fold
from turnfold.gateway.relay.settings import Settings
from turnfold.log.client import reader_from_start
from turnfold.log.faststream import commit, message_broker
from turnfold.log.service import Health, run_service
from turnfold.schemas import codec
from turnfold.schemas.errors import UserError
from turnfold.schemas.policies import PolicyEvent, PolicyPublished, PolicyServed
from turnfold.schemas.settings import load

log = logging.getLogger("turnfold.relay")


def run_relay(environment: Mapping[str, str], **options: Any) -> None:
    """Run until SIGTERM or SIGINT; exits 1 with one line when it cannot start."""
    try:
        settings = load(Settings, environment, **options)
    except UserError as error:
        sys.exit(f"turnfold relay: {error}")

    async def body(health: Health, stop: asyncio.Event) -> None:
        await Relay(settings).run(health, stop)

    run_service("relay", body, settings)


class Relay:
    """Keeps every engine on the newest policy and says in the log when all of them serve it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.view = PolicyView()
        self.engines = [
            weights_of(settings.engine_kind, url, timeout_s=settings.weight_update_timeout_s)
            for url in settings.engines
        ]
        self.broker = create_broker(settings, self._on_event)
        self._news = asyncio.Event()

    async def run(self, health: Health, stop: asyncio.Event) -> None:
        """Work until `stop` is set. Raises BrokerUnavailable and MissingTopic."""
        await self._read_topic()
        async with self.broker:
            await self.broker.start()
            health.ready("waiting for a policy")
            try:
                while not stop.is_set():
                    self._news.clear()
                    await self._reconcile(health)
                    await self._wait_for_news(stop)
            finally:
                for engine in self.engines:
                    await engine.aclose()

    async def _read_topic(self) -> None:
        """The newest policy may have been published, and committed, before this process began."""
        topic = self.settings.topics.policies
        async with reader_from_start(self.settings, topic) as reader:
            async for record in reader.read_to_end():
                with suppress(codec.CodecError):  # FastStream sends it to the dead letters
                    event = codec.decode(
                        cast(type[PolicyEvent], PolicyEvent),
                        record.value or b"",
                        record.content_type,
                    )
                    self.view = fold(self.view, record.offset, event)

    async def _on_event(self, offset: int, event: PolicyEvent) -> None:
        self.view = fold(self.view, offset, event)
        self._news.set()

    async def _wait_for_news(self, stop: asyncio.Event) -> None:
        waits = {asyncio.create_task(self._news.wait()), asyncio.create_task(stop.wait())}
        await asyncio.wait(
            waits,
            timeout=self.settings.engine_poll_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for wait in waits:
            wait.cancel()

    async def _reconcile(self, health: Health) -> None:
        """Load the newest policy where it is not served, and publish PolicyServed once."""
        newest = self.view.newest
        if newest is None:
            return
        updated = await asyncio.gather(*(self._bring_up(engine, newest) for engine in self.engines))
        if not all(updated):
            health.not_ready(f"policy {newest.policy_version} is not served by every engine")
            return
        health.ready(f"policy {newest.policy_version} is served")
        if self.view.newest is newest and not self.view.is_newest_served:
            await self._publish_served(newest)

    async def _bring_up(self, engine: EngineWeights, policy: PolicyPublished) -> bool:
        """Whether the engine serves the policy now."""
        version = await engine.version()
        if version is None:
            log.warning("engine %s does not answer", engine.url)
            return False
        known = self.view.policy_of(version)
        if engine.loaded_uri is None and known is not None:
            # Loaded by a relay before this one, which may not have lived to let the engine go on.
            await engine.adopt(known.weights_uri)
        is_same_load = engine.loaded_uri in (None, policy.weights_uri)
        if version == str(policy.policy_version) and is_same_load:
            return True
        try:
            await engine.update(policy.weights_uri, policy.policy_version)
        except (UnusableWeights, UpdateFailed) as error:
            log.error("policy %d: %s", policy.policy_version, error)
            return False
        log.info("policy %d is loaded by %s", policy.policy_version, engine.url)
        return True

    async def _publish_served(self, policy: PolicyPublished) -> None:
        served = PolicyServed(
            run_id=policy.run_id,
            policy_version=policy.policy_version,
            engines=tuple(engine.url for engine in self.engines),
            at=time.time(),
        )
        try:
            await self.broker.publish(
                served,
                topic=self.settings.topics.policies,
                key=f"{policy.run_id}/served".encode(),
            )
        except KafkaError as error:
            # The next look at the engines tries again.
            log.error("policy %d: cannot say that it is served: %s", policy.policy_version, error)
            return
        # Known at once, so that the next look does not publish it a second time.
        self.view = self.view.after_serving(served)


def create_broker(settings: Settings, on_event: Any) -> KafkaBroker:
    """The FastStream broker with its one subscriber, which also documents the topic."""
    topics = settings.topics
    # FastStream would log each record; what matters here is logged by the relay itself.
    quiet = logging.getLogger("turnfold.relay.faststream")
    quiet.setLevel(logging.ERROR)
    broker = message_broker(settings, PolicyEvent, topics.dead_letters, logger=quiet)

    @broker.subscriber(
        topics.policies,
        group_id=f"{settings.namespace}-relay",
        auto_offset_reset="earliest",
        title="policy relay",
        description="Loads each published policy into every engine, then publishes PolicyServed.",
    )
    async def take_policy(event: PolicyEvent, message: KafkaMessage) -> None:
        await on_event(cast(Any, message.raw_message).offset, event)
        await commit(message)

    broker.publisher(topics.policies, title="policies served", schema=PolicyServed)
    return broker

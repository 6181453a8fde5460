"""Does a fault to the processes, connections and clocks of a running pipeline."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
from collections.abc import Mapping
from contextlib import suppress

import msgspec
from aiokafka.errors import KafkaError

from turnfold.embedded.chaos import faults
from turnfold.embedded.chaos.clock import Clocks
from turnfold.embedded.chaos.evidence import records_of
from turnfold.embedded.chaos.faults import Fault
from turnfold.embedded.chaos.findings import AGAIN_HEADER
from turnfold.embedded.chaos.network import Link
from turnfold.embedded.chaos.site import Site
from turnfold.embedded.demo.supervisor import Service
from turnfold.log.client import Producer, Record
from turnfold.schemas.errors import UserError

_NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class Strikes(msgspec.Struct, kw_only=True):
    """What can be got hold of."""

    site: Site
    services: Mapping[str, Service]
    links: Mapping[str, Link]
    clocks: Clocks
    num_redelivered: int = 0
    """Records that were appended to the log a second time."""

    async def strike(self, fault: Fault) -> bool:
        """Do it, and return when it is over; False when the service is down from another fault."""
        match fault.kind:
            case faults.KILL | faults.PAUSE | faults.DISK_FULL | faults.DISK_FILLS:
                return await self._strike_process(fault, self.services[fault.target])
            case faults.CLOCK_AHEAD:
                await self._shift(fault.target, fault.amount, fault.seconds)
            case faults.CLOCK_BEHIND:
                await self._shift(fault.target, -fault.amount, fault.seconds)
            case faults.CLOCKS_AHEAD:
                self.clocks.shift_all(fault.amount)
            case faults.CUT:
                await self.links[fault.target].cut(fault.seconds)
            case faults.UNANSWERED:
                await self.links[fault.target].lose_answers(fault.seconds)
            case faults.LATE:
                await self.links[fault.target].hold(fault.seconds)
            case faults.SLOW:
                await self._slow_broker(fault.amount, fault.seconds)
            case faults.AGAIN:
                return await self._redeliver(fault)
            case _:
                raise AssertionError(fault)
        return True

    async def _strike_process(self, fault: Fault, service: Service) -> bool:
        if not service.is_running:
            return False
        match fault.kind:
            case faults.KILL:
                service.kill9()
            case faults.PAUSE:
                await _pause(service.pid, fault.seconds)
            case faults.DISK_FULL:
                await _limit_files(service.pid, 0, fault.seconds)
            case _:
                await _limit_files(service.pid, self._almost_full(fault), fault.seconds)
        return True

    def _almost_full(self, fault: Fault) -> int:
        """A few bytes more than some file of the log has, so that the next write is cut short."""
        files = sorted((self.site.data_dir / "topics").rglob("*.log"))
        return files[fault.choice % len(files)].stat().st_size + round(fault.amount)

    async def _shift(self, name: str, shift_s: float, seconds: float) -> None:
        self.clocks.shift(name, shift_s)
        await asyncio.sleep(seconds)
        self.clocks.shift(name, -shift_s)

    async def _slow_broker(self, delay_s: float, seconds: float) -> None:
        slowed = [self.links[name] for name in faults.BROKER_LINKS]
        for link in slowed:
            link.delay_s = delay_s
        await asyncio.sleep(seconds)
        for link in slowed:
            link.delay_s = 0.0

    async def _redeliver(self, fault: Fault) -> bool:
        """Append some records to their topic again, old ones among them; whether any was taken."""
        topic = f"{self.site.namespace}.{fault.target}"
        records = await records_of(self.site.kafka, topic)
        chosen = (
            random.Random(fault.choice).choices(records, k=round(fault.amount)) if records else []
        )
        num_before = self.num_redelivered
        # The broker may be down from another fault.
        with suppress(UserError, KafkaError, OSError):
            async with Producer(self.site.kafka) as producer:
                for record in chosen:
                    await _append_again(producer, record)
                    self.num_redelivered += 1
        return self.num_redelivered > num_before


async def _append_again(producer: Producer, record: Record) -> None:
    headers = {name: value.decode() for name, value in record.headers}
    await producer.send_raw(
        record.topic,
        key=record.key,
        value=record.value,
        partition=record.partition,
        headers={**headers, AGAIN_HEADER: "1"},
    )


async def _pause(pid: int, seconds: float) -> None:
    with suppress(ProcessLookupError):  # killed meanwhile
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


async def _limit_files(pid: int, size: int, seconds: float) -> None:
    """No file of the process may grow beyond this size for a time.

    Writes fail with EFBIG where a full disk would give ENOSPC; one that crosses the limit is cut
    short, as on a disk that fills up.
    """
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        await asyncio.sleep(seconds)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, _NO_LIMIT)

"""A trainer without arithmetic: everything of `turnfold train` but the model.

It reads manifests with the trainer's own reader, which checks every digest, places the rows with
its plan, counts optimizer steps, keeps a checkpoint, and announces each version when the checkpoint
is written. The engines' acknowledgement, which the policy relay would give, it gives itself.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from turnfold.log.client import Producer
from turnfold.log.service import Health, run_service
from turnfold.log.settings import ServiceSettings
from turnfold.schemas import codec
from turnfold.schemas.policies import PolicyPublished, PolicyServed
from turnfold.schemas.run import RunConfig
from turnfold.schemas.settings import load
from turnfold.trainer.client import BatchSource, PolicyLog
from turnfold.trainer.plan import Schedule, plan, schedule
from turnfold.trainer.rows import train_rows
from turnfold.trainer.source import Batch

NUM_MINI_BATCHES = 2


class Settings(ServiceSettings, frozen=True, kw_only=True):
    """What the stand-in is told; the rest is the RunConfig."""

    run_dir: str
    """Where its checkpoint and the version file are."""


class Checkpoint(msgspec.Struct, frozen=True):
    """What would be a model: how far it is trained."""

    batch: int = 0
    manifest_digest: str = ""
    num_steps: int = 0
    """Optimizer steps so far."""


def version_file(run_dir: Path) -> Path:
    return run_dir / "version"


def read_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The checkpoint of a run; None when there is none yet."""
    with suppress(FileNotFoundError):
        return msgspec.json.decode((run_dir / "checkpoint").read_bytes(), type=Checkpoint)
    return None


def schedule_of(config: RunConfig) -> Schedule:
    return schedule(
        groups_per_batch=config.groups_per_batch,
        groups_per_mini_batch=config.groups_per_batch // NUM_MINI_BATCHES,
        group_size=config.group_size,
        num_epochs=1,
        num_ranks=1,
        max_row_tokens=config.max_row_tokens,
    )


async def train(settings: Settings, config: RunConfig, stop: asyncio.Event) -> None:
    """Train batch after batch until `stop` is set."""
    run_dir, topics = Path(settings.run_dir), settings.topics
    async with (
        PolicyLog(settings, topics, config.run_id) as policies,
        BatchSource(settings, topics, config) as source,
        Producer(settings) as producer,
    ):
        checkpoint = read_checkpoint(run_dir) or Checkpoint()
        _write(run_dir / "checkpoint", msgspec.json.encode(checkpoint))
        await source.open(after=checkpoint.batch, manifest_digest=checkpoint.manifest_digest)
        stopping = asyncio.create_task(stop.wait())
        while True:
            await _announce(run_dir, config, checkpoint, policies)
            served = PolicyServed(run_id=config.run_id, policy_version=checkpoint.batch)
            await producer.send(topics.policies, key=f"{config.run_id}/served", message=served)
            getting = asyncio.create_task(source.next())
            await asyncio.wait({getting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                getting.cancel()
                return
            checkpoint = trained(checkpoint, getting.result(), config)
            _write(run_dir / "checkpoint", msgspec.json.encode(checkpoint))


def trained(before: Checkpoint, batch: Batch, config: RunConfig) -> Checkpoint:
    """The checkpoint after one more batch."""
    assert batch.cut.index == before.batch + 1, (batch.cut.index, before)
    rows = train_rows(batch.trajectories, {})
    planned = plan([row.size for row in rows], schedule_of(config))
    return Checkpoint(
        batch=batch.cut.index,
        manifest_digest=codec.digest(batch.cut),
        num_steps=before.num_steps + planned.num_steps,
    )


async def _announce(
    run_dir: Path, config: RunConfig, checkpoint: Checkpoint, policies: PolicyLog
) -> None:
    _write(version_file(run_dir), str(checkpoint.batch).encode())
    event = PolicyPublished(
        run_id=config.run_id,
        policy_version=checkpoint.batch,
        weights_uri=str(run_dir),
        at=time.time(),
        metrics={"optimizer_steps": float(schedule_of(config).num_steps)},
    )
    await policies.publish(event)


def _write(path: Path, data: bytes) -> None:
    """Either the old or the new contents, whenever the process is killed."""
    draft = path.with_name(path.name + ".draft")
    draft.write_bytes(data)
    draft.replace(path)


def main() -> None:
    """Run as a service with TURNFOLD_* variables."""
    settings, config = load(Settings, os.environ), load(RunConfig, os.environ)

    async def body(health: Health, stop: asyncio.Event) -> None:
        health.ready()
        await train(settings, config, stop)

    run_service("trainer", body, settings)


if __name__ == "__main__":
    main()

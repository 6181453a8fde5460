"""The trainer's loop: fetch, plan, advantages, update, checkpoint, publish.

What is written, and in which order, for batch b, which trains version b-1 and makes version b:

    1. checkpoint b     weights, optimizer, random state, "batch b is trained"   (one rename)
    2. weights v b      what engines load                                        (one rename)
    3. PolicyPublished(b) on `<ns>.policies`                                     (one record)

A process killed …
    before 1            leaves nothing of batch b. Checkpoint b-1 is loaded and batch b is trained
                        on version b-1 as if for the first time: nobody has seen the first attempt.
    between 1 and 2     Checkpoint b is loaded; its weights are written, version b is published.
    between 2 and 3     Checkpoint b is loaded; the weights are there, version b is published.
    after 3             Checkpoint b is loaded; the topic has version b; nothing is sent.
So the batch after a checkpoint is always the next one trained: none twice on the same weights, none
skipped, and every version is published once and in order. Where a checkpoint is damaged, or with
`checkpoint_every` above 1, the batches since the last good one are trained again from it, which
gives the same versions (bit for bit on one rank); what was published is not published again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas.errors import UserError
from turnfold.schemas.policies import PolicyPublished
from turnfold.schemas.run import RunConfig
from turnfold.schemas.settings import SettingsError
from turnfold.trainer import checkpoints, config, weights
from turnfold.trainer.advantages import rollout_advantages, score
from turnfold.trainer.backends import durable, environment
from turnfold.trainer.checkpoints import Checkpoint, State
from turnfold.trainer.client import BatchSource, PolicyLog
from turnfold.trainer.metrics import batch_metrics, summary
from turnfold.trainer.plan import Plan, Schedule, plan
from turnfold.trainer.rows import TrainRow, train_rows
from turnfold.trainer.settings import Settings
from turnfold.trainer.source import Batch

log = logging.getLogger("turnfold.trainer")

InThread = Callable[..., Awaitable[Any]]


async def train(
    settings: Settings,
    run: RunConfig,
    overrides: Sequence[str],
    health: Health,
    stop: asyncio.Event,
) -> None:
    """Train batch after batch until `num_batches` or a signal; the current batch is finished.

    Raises UserError (settings, source, checkpoint, plan) with a text that says what to do.
    """
    # One thread for all of verl: its state is per thread in places, and the event loop goes on.
    executor = ThreadPoolExecutor(1, "verl")
    in_thread: InThread = partial(asyncio.get_running_loop().run_in_executor, executor)
    try:
        async with (
            PolicyLog(settings.bootstrap, settings.topics, run.run_id) as policies,
            BatchSource(settings.bootstrap, settings.topics, run) as source,
        ):
            trainer: Trainer = await in_thread(Trainer, settings, run, list(overrides))
            await trainer.resume(policies, in_thread)
            await source.open(
                after=trainer.state.batch, manifest_digest=trainer.state.manifest_digest
            )
            await _train_batches(trainer, source, policies, in_thread, health, stop)
    finally:
        executor.shutdown()


async def _train_batches(
    trainer: Trainer,
    source: BatchSource,
    policies: PolicyLog,
    in_thread: InThread,
    health: Health,
    stop: asyncio.Event,
) -> None:
    health.ready(f"policy version {trainer.state.batch}")
    batches = prefetched(source, trainer.settings.prefetch, stop)
    try:
        while not trainer.is_done and (batch := await anext(batches, None)) is not None:
            await trainer.step(batch, policies, in_thread)
            health.ready(f"policy version {trainer.state.batch}")
        await in_thread(trainer.checkpoint)
        log.info("stopping behind batch %d", trainer.state.batch)
    finally:
        await batches.aclose()
        trainer.finish()


async def prefetched(source: BatchSource, depth: int, stop: asyncio.Event) -> AsyncGenerator[Batch]:
    """Batches in order, up to `depth` of them read ahead, until `stop` is set.

    An error while reading ahead is raised once the batches read before it are used up.
    """
    queue: asyncio.Queue[Batch] = asyncio.Queue(depth)

    async def fill() -> None:
        while True:
            await queue.put(await source.next())

    filling = asyncio.create_task(fill())
    stopping = asyncio.create_task(stop.wait())
    try:
        while not stop.is_set():
            if queue.empty():
                log.info("waiting for the next batch")
            getting = asyncio.create_task(queue.get())
            await asyncio.wait({getting, filling, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done() and not stop.is_set():
                yield getting.result()
                continue
            getting.cancel()
            if filling.done():
                filling.result()
    finally:
        filling.cancel()
        stopping.cancel()


class Trainer:
    """A policy in training and where it stands. Built and used in the thread that owns verl."""

    def __init__(self, settings: Settings, run: RunConfig, overrides: list[str]) -> None:
        self.settings, self.run = settings, run
        is_gpu = environment.prepare(settings.device)
        _require_one_process()
        self.model_dir = _model_dir(settings)
        self.config = config.compose(
            overrides,
            run,
            model=str(self.model_dir),
            is_gpu=is_gpu,
            num_batches=settings.num_batches,
        )
        self.schedule: Schedule = config.check(self.config, run, is_gpu=is_gpu)
        self.weights_dtype = _dtype(settings.weights_dtype, is_gpu)

        from turnfold.trainer.backend import TrainerBackend

        log.info("building the model of %s with verl", self.model_dir)
        self.backend = TrainerBackend(self.config, is_gpu=is_gpu)
        self.state = State(run_id=run.run_id, batch=0, config_digest=run.digest)
        self._saved, self._checkpoint_uri = -1, ""
        self._tracking: Any = None
        self._idle_since = time.monotonic()

    @property
    def is_done(self) -> bool:
        return self.settings.num_batches is not None and (
            self.state.batch >= self.settings.num_batches
        )

    async def resume(self, policies: PolicyLog, in_thread: InThread) -> None:
        """Go on from the newest good checkpoint, or write checkpoint and version 0.

        Publishes the version of the checkpoint when the topic is behind it. Raises UserError when
        run directory and topic are of different runs.
        """
        await in_thread(self._load_or_begin, policies.published)
        await self._publish(policies, in_thread)
        log.info(
            "policy version %d, %d optimizer steps a batch",
            self.state.batch,
            self.schedule.num_steps,
        )
        self._tracking = await in_thread(self._open_tracking)
        self._idle_since = time.monotonic()

    async def step(self, batch: Batch, policies: PolicyLog, in_thread: InThread) -> None:
        """Train one batch and make its version known; see the module for the order."""
        waited = time.monotonic() - self._idle_since
        started = time.monotonic()
        rows, planned = await in_thread(self._prepare, batch)
        measured = await in_thread(self.backend.update, rows, planned)
        seconds = time.monotonic() - started
        metrics = batch_metrics(batch, rows, planned) | measured
        metrics |= {
            "mismatch_kl": measured.get("rollout_corr/k3_kl", 0.0),
            "grad_norm": measured.get("actor/grad_norm", 0.0),
            "optimizer_steps": measured["actor/optimizer_steps"],
            "seconds": seconds,
            "wait_s": waited,
        }
        self._check_mismatch(batch.cut.index, metrics["mismatch_kl"])
        self.state = State(
            run_id=self.run.run_id,
            batch=batch.cut.index,
            manifest_digest=codec.digest(batch.cut),
            config_digest=self.run.digest,
            metrics=metrics,
        )
        if batch.cut.index % self.settings.checkpoint_every == 0:
            await in_thread(self.checkpoint)
        await self._publish(policies, in_thread)
        await in_thread(self._tracking.log, metrics, batch.cut.index)
        log.info("%s", summary(batch.cut.index, metrics))
        self._idle_since = time.monotonic()

    def checkpoint(self) -> None:
        """Write a checkpoint of the present state, unless there is one."""
        if self._saved == self.state.batch:
            return
        root = self.settings.checkpoints_dir
        written = checkpoints.write(root, self.state, self.backend.save)
        checkpoints.prune(root, self.settings.keep_checkpoints)
        self._saved, self._checkpoint_uri = self.state.batch, str(written.directory)

    def finish(self) -> None:
        if self._tracking is not None:
            self._tracking.finish()

    def _prepare(self, batch: Batch) -> tuple[list[TrainRow], Plan]:
        algorithm = self.config.algorithm
        scores = [score(trajectory) for trajectory in batch.trajectories]
        advantages = rollout_advantages(scores, algorithm.adv_estimator, algorithm)
        rows = train_rows(batch.trajectories, advantages)
        return rows, plan([row.size for row in rows], self.schedule)

    def _load_or_begin(self, published: int | None) -> None:
        root = self.settings.checkpoints_dir
        for directory in (root, self.settings.weights_dir):
            directory.mkdir(parents=True, exist_ok=True)
            durable.remove_drafts(directory)
        found = checkpoints.newest_good(root)
        if found is None:
            self._check_new(published)
            self.checkpoint()
            return
        self._check_owner(found, published)
        self.backend.load(found.actor_dir)
        self.state, self._saved = found.state, found.state.batch
        self._checkpoint_uri = str(found.directory)
        log.info("resumed from %s", found.directory)

    def _check_mismatch(self, index: int, mismatch_kl: float) -> None:
        """Raise UserError, before the batch is kept, when its data is not what engines sampled."""
        limit = self.settings.max_mismatch_kl
        if limit is not None and not mismatch_kl <= limit:
            raise UserError(
                f"batch {index}: KL between sampling and training policy is {mismatch_kl:.3g}, the "
                f"limit is {limit:.3g}: engines and trainer do not see the same tokens, weights or "
                "temperature; TURNFOLD_MAX_MISMATCH_KL sets the limit"
            )

    def _check_new(self, published: int | None) -> None:
        """Without a checkpoint there must be nothing of a run, neither on the topic nor on disk."""
        root = self.settings.checkpoints_dir
        if published is not None:
            raise UserError(
                f"run {self.run.run_id} has published policy version {published}, but {root} holds "
                "no checkpoint: give the --run-dir of that run, or start another one with "
                "TURNFOLD_RUN_ID"
            )
        if weights.versions(self.settings.weights_dir):
            raise UserError(
                f"{self.settings.weights_dir} holds weights of some run, but {root} holds no "
                "checkpoint of it: give an empty --run-dir"
            )

    def _check_owner(self, found: Checkpoint, published: int | None) -> None:
        expected = (self.run.run_id, self.run.digest)
        if (found.state.run_id, found.state.config_digest) != expected:
            raise UserError(
                f"{found.directory} is of run {found.state.run_id} with configuration "
                f"{found.state.config_digest[:12]}, this is run {expected[0]} with "
                f"{expected[1][:12]}: give the same TURNFOLD_* variables, or another --run-dir"
            )
        # A checkpoint is at most one version ahead of the topic: that of the crash before 3.
        if found.state.batch > (-1 if published is None else published) + 1:
            raise UserError(
                f"{found.directory} is of policy version {found.state.batch}, but the newest on "
                f"{self.settings.topics.policies} is {published}: the run directory belongs to "
                "another log; give an empty --run-dir"
            )

    async def _publish(self, policies: PolicyLog, in_thread: InThread) -> None:
        """Weights to disk, then the word that they are there; old weights go.

        Nothing to do for a version that is trained again after a newer one was published.
        """
        await policies.refresh()
        if policies.published is not None and self.state.batch < policies.published:
            return
        directory = await in_thread(self._write_weights, policies.served)
        event = PolicyPublished(
            run_id=self.run.run_id,
            policy_version=self.state.batch,
            weights_uri=str(directory),
            checkpoint_uri=self._checkpoint_uri,
            at=time.time(),
            metrics=self.state.metrics,
        )
        await policies.publish(event)

    def _write_weights(self, served: int | None) -> Path:
        root = self.settings.weights_dir
        directory = weights.write(
            root,
            self.state.batch,
            self.backend.weights(),
            model_dir=self.model_dir,
            dtype=self.weights_dtype,
        )
        weights.prune(root, keep=self.settings.keep_weights, served=served)
        return directory

    def _open_tracking(self) -> Any:
        from omegaconf import OmegaConf
        from verl.utils.tracking import Tracking

        directory = self.settings.metrics_dir
        directory.mkdir(parents=True, exist_ok=True)
        # verl's file logger starts its file anew, so each start of the process gets its own.
        first = self.state.batch + 1
        os.environ["VERL_FILE_LOGGER_PATH"] = str(directory / f"from-batch-{first:08d}.jsonl")
        os.environ.setdefault("TENSORBOARD_DIR", str(directory / "tensorboard"))
        return Tracking(
            self.config.trainer.project_name,
            self.config.trainer.experiment_name,
            OmegaConf.to_container(self.config.trainer, resolve=True)["logger"],
            OmegaConf.to_container(self.config, resolve=True),
        )


def _model_dir(settings: Settings) -> Path:
    if not settings.model:
        raise SettingsError("TURNFOLD_MODEL is not set: give --model the directory of the model")
    directory = Path(settings.model).expanduser().resolve()
    if not (directory / "config.json").is_file():
        raise SettingsError(
            f"TURNFOLD_MODEL={settings.model}: expected a directory with config.json, weights and "
            "tokenizer; `turnfold tiny-model` makes a small one"
        )
    return directory


def _dtype(name: str, is_gpu: bool) -> str:
    known = ("float32", "bfloat16", "float16")
    if name == "auto":
        return "bfloat16" if is_gpu else "float32"
    if name not in known:
        raise SettingsError(f"TURNFOLD_WEIGHTS_DTYPE={name}: expected auto, {', '.join(known)}")
    return name


def _require_one_process() -> None:
    if os.environ["WORLD_SIZE"] != "1":
        raise SettingsError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: `turnfold train` runs as one process; "
            "start it without torchrun"
        )

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

Batch b+1 is trained while 1 to 3 of batch b go on behind it: verl's files and a copy of the weights
are taken before its first step, and nothing of batch b+1 is taken before batch b is published. With
`is_overlapped` false, and on Ray, batch b+1 waits for 3.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas.errors import UserError
from turnfold.schemas.policies import PolicyPublished
from turnfold.schemas.run import RunConfig
from turnfold.trainer import checkpoints, weights
from turnfold.trainer.backends import environment
from turnfold.trainer.backends.policy import Policy, follow
from turnfold.trainer.checkpoints import State
from turnfold.trainer.client import BatchSource, PolicyLog, prefetched
from turnfold.trainer.metrics import batch_metrics, idle_metrics, summary, update_schedule
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

    In a process of torchrun other than the first, do what the first one says until it ends.
    Raises UserError (settings, source, checkpoint, plan) with a text that says what to do.
    """
    # One thread for all of verl: its state is per thread in places, and the event loop goes on.
    # Another one for files that are written while verl trains.
    verl_thread, file_thread = ThreadPoolExecutor(1, "verl"), ThreadPoolExecutor(1, "files")
    loop = asyncio.get_running_loop()
    in_verl: InThread = partial(loop.run_in_executor, verl_thread)
    in_files: InThread = partial(loop.run_in_executor, file_thread)
    try:
        if environment.process_rank() > 0:
            await in_verl(follow, settings.device)
            return
        async with (
            PolicyLog(settings, settings.topics, run.run_id) as policies,
            BatchSource(settings, settings.topics, run) as source,
        ):
            trainer = Trainer(settings, run, list(overrides), policies, in_verl, in_files)
            try:
                await _train_batches(trainer, source, health, stop)
            finally:
                await trainer.close()
    finally:
        verl_thread.shutdown()
        file_thread.shutdown()


async def _train_batches(
    trainer: Trainer, source: BatchSource, health: Health, stop: asyncio.Event
) -> None:
    await trainer.resume()
    await source.open(after=trainer.state.batch, manifest_digest=trainer.state.manifest_digest)
    health.ready(f"policy version {trainer.state.batch}")
    async with aclosing(prefetched(source, trainer.settings.prefetch, stop)) as batches:
        while not trainer.is_done:
            batch = await trainer.unless_failed(anext(batches, None))
            if batch is None:
                break
            await trainer.step(batch)
            health.ready(f"policy version {trainer.state.batch}")
    await trainer.finish()
    log.info("stopping behind batch %d", trainer.state.batch)


@dataclass(frozen=True, slots=True)
class Commit:
    """What was taken of a state and is still to be kept, in this order."""

    state: State
    checkpoint: Path | None
    """Draft with verl's files; None when no checkpoint is due."""
    write_weights: Callable[[], Path] | None
    """None for a version that is trained again after a newer one was published."""


class Trainer:
    """A policy in training and where it stands. Methods that block run in the thread of verl."""

    def __init__(
        self,
        settings: Settings,
        run: RunConfig,
        overrides: list[str],
        policies: PolicyLog,
        in_verl: InThread,
        in_files: InThread,
    ) -> None:
        self.settings, self.run = settings, run
        self._overrides, self._policies = overrides, policies
        self._in_verl, self._in_files = in_verl, in_files
        self.state = State(run_id=run.run_id, batch=0, config_digest=run.digest)
        self._built: Policy | None = None
        self._committing: asyncio.Task[None] | None = None
        self._saved, self._checkpoint_uri = -1, ""
        self._tracking: Any = None
        self._idle_since, self._saving_s = time.monotonic(), 0.0

    @property
    def is_done(self) -> bool:
        return self.settings.num_batches is not None and (
            self.state.batch >= self.settings.num_batches
        )

    @property
    def _policy(self) -> Policy:
        assert self._built is not None, "resume comes first"
        return self._built

    async def resume(self) -> None:
        """Build the policy from the newest good checkpoint, or write checkpoint and version 0.

        Publishes the version of the checkpoint when the topic is behind it. Raises UserError when
        run directory and topic are of different runs.
        """
        await self._in_verl(self._load_or_begin)
        await self._commit(await self._in_verl(self._take))
        self._tracking = await self._in_files(self._policy.open_tracking, self.state.batch + 1)
        steps = self._policy.schedule.num_steps
        log.info("policy version %d, %d optimizer steps a batch", self.state.batch, steps)
        self._idle_since = time.monotonic()

    async def unless_failed(self, coming: Awaitable[Batch | None]) -> Batch | None:
        """The next batch, or the error with which writing the one before has ended meanwhile.

        A version that was not published has no engines, and so no next batch comes.
        """
        getting = asyncio.ensure_future(coming)
        committing = {self._committing} if self._committing is not None else set()
        try:
            while not getting.done() and committing:
                done, _ = await asyncio.wait(
                    {getting, *committing}, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done & committing:
                    task.result()
                committing -= done
            return await getting
        finally:
            getting.cancel()
            await asyncio.wait({getting})

    async def step(self, batch: Batch) -> None:
        """Train one batch and begin to make its version known; see the module for the order."""
        started = time.monotonic()
        rows, planned = await self._in_verl(self._policy.prepare, batch)
        measured = await self._in_verl(self._policy.driver.update, rows, planned)
        trained = time.monotonic()
        mismatch_kl = measured.get("rollout_corr/k3_kl")
        self._check_mismatch(batch.cut.index, mismatch_kl)
        await self._committed()
        published = time.monotonic()
        metrics = batch_metrics(batch, rows, planned) | measured
        metrics |= {
            "grad_norm": measured.get("actor/grad_norm", 0.0),
            "optimizer_steps": measured["actor/optimizer_steps"],
            "perf/throughput": metrics["tokens"] / (trained - started) / self._policy.num_processes,
        }
        if mismatch_kl is not None:
            metrics["mismatch_kl"] = mismatch_kl
        metrics |= idle_metrics(
            training_s=trained - started,
            saving_s=self._saving_s,
            no_batch_s=started - self._idle_since,
            publishing_s=published - trained,
        )
        self.state = State(
            run_id=self.run.run_id,
            batch=batch.cut.index,
            manifest_digest=codec.digest(batch.cut),
            config_digest=self.run.digest,
            num_processes=self._policy.num_processes,
            metrics=metrics,
            schedule=update_schedule(planned.schedule),
            at=time.time(),
        )
        began_saving = time.monotonic()
        commit = await self._in_verl(self._take)
        self._saving_s = time.monotonic() - began_saving
        self._committing = asyncio.create_task(self._commit_and_report(commit, trained))
        if not self._policy.is_overlapped:
            await self._committed()
        self._idle_since = time.monotonic()

    async def finish(self) -> None:
        """Wait for what is being written, and leave a checkpoint of the last batch."""
        await self._committed()
        if self._saved != self.state.batch:
            commit = await self._in_verl(partial(self._take, is_last=True))
            await self._commit(commit)

    async def close(self) -> None:
        """Let what is being written end, and the other ranks."""
        if self._committing is not None:
            await asyncio.wait({self._committing})
        if self._tracking is not None:
            self._tracking.finish()
        if self._built is not None:
            await self._in_verl(self._built.close)

    def _load_or_begin(self) -> None:
        self._built = Policy(self.settings, self.run, self._overrides)
        found = self._built.build(self._policies.published)
        if found is not None:
            self.state, self._saved = found.state, found.state.batch
            self._checkpoint_uri = str(found.directory)
        self.state = msgspec.structs.replace(self.state, num_processes=self._built.num_processes)

    def _check_mismatch(self, index: int, mismatch_kl: float | None) -> None:
        """Raise UserError, before the batch is kept, when its data is not what engines sampled.

        Nothing is measured on a batch that trains no token.
        """
        limit = self.settings.max_mismatch_kl
        if limit is not None and mismatch_kl is not None and not mismatch_kl <= limit:
            raise UserError(
                f"batch {index}: KL between sampling and training policy is {mismatch_kl:.3g}, the "
                f"limit is {limit:.3g}: engines and trainer do not see the same tokens, weights or "
                "temperature; TURNFOLD_MAX_MISMATCH_KL sets the limit"
            )

    def _take(self, *, is_last: bool = False) -> Commit:
        """What is to be kept of the present state, in files of verl and in memory."""
        state, published, driver = self.state, self._policies.published, self._policy.driver
        is_due = is_last or state.batch % self.settings.checkpoint_every == 0
        draft = None
        if is_due and self._saved != state.batch:
            draft = checkpoints.begin(self.settings.checkpoints_dir, state.batch)
            driver.save(draft / "actor")
        publication = self._policy.publication(state.batch)
        if published is not None and state.batch < published:
            return Commit(state, draft, None)
        if self._policy.sends_weights:
            driver.send_weights(state.batch)
        if self._policy.is_overlapped:
            return Commit(state, draft, driver.copied_weights(publication))
        return Commit(state, draft, partial(driver.write_weights, publication))

    async def _commit(self, commit: Commit) -> None:
        """Checkpoint to disk, weights to disk, then the word that they are there."""
        if commit.checkpoint is not None:
            await self._in_files(self._keep_checkpoint, commit.state, commit.checkpoint)
        if commit.write_weights is None:
            return
        in_thread = self._in_files if self._policy.is_overlapped else self._in_verl
        directory: Path = await in_thread(commit.write_weights)
        await self._policies.refresh()
        await self._in_files(self._prune_weights, self._policies.served)
        event = PolicyPublished(
            run_id=self.run.run_id,
            policy_version=commit.state.batch,
            weights_uri=str(directory),
            checkpoint_uri=self._checkpoint_uri,
            at=time.time(),
            metrics=commit.state.metrics,
            schedule=commit.state.schedule,
        )
        await self._policies.publish(event)

    async def _commit_and_report(self, commit: Commit, trained: float) -> None:
        await self._commit(commit)
        metrics = commit.state.metrics | {"publish_s": time.monotonic() - trained}
        await self._in_files(self._tracking.log, metrics, commit.state.batch)
        log.info("%s", summary(commit.state.batch, metrics))

    async def _committed(self) -> None:
        """Wait until the batch before is published; raises what went wrong with it."""
        if self._committing is not None:
            await self._committing

    def _keep_checkpoint(self, state: State, draft: Path) -> None:
        root = self.settings.checkpoints_dir
        written = checkpoints.commit(root, state, draft)
        checkpoints.prune(
            root, keep=self.settings.keep_checkpoints, hours=self.settings.keep_checkpoint_hours
        )
        self._saved, self._checkpoint_uri = state.batch, str(written.directory)

    def _prune_weights(self, served: int | None) -> None:
        weights.prune(self.settings.weights_dir, keep=self.settings.keep_weights, served=served)

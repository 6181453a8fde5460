"""The policy in training: its configuration, its ranks, and the plan of a batch for them.

All of it runs in the thread that owns verl.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import msgspec

from turnfold.schemas.run import RunConfig
from turnfold.schemas.settings import SettingsError
from turnfold.trainer import checkpoints, config, drivers, weights
from turnfold.trainer.advantages import rollout_advantages, score, turn_advantages
from turnfold.trainer.backends import durable, environment
from turnfold.trainer.checkpoints import Checkpoint
from turnfold.trainer.drivers import Driver
from turnfold.trainer.plan import Plan, Schedule, plan
from turnfold.trainer.resume import check_new, check_owner, origin
from turnfold.trainer.rows import TrainRow, check_media, train_rows
from turnfold.trainer.settings import Settings
from turnfold.trainer.source import Batch
from turnfold.trainer.weights import Publication

log = logging.getLogger("turnfold.trainer")


class Policy:
    """A configuration that was found to be good, and from `build` on the ranks that train it."""

    def __init__(self, settings: Settings, run: RunConfig, overrides: list[str]) -> None:
        """Everything that can be wrong without a model being built. Raises SettingsError."""
        self._settings, self._run = settings, run
        is_ray = settings.driver == "ray"
        self._is_gpu = environment.prepare(settings.device, is_elsewhere=is_ray)
        if is_ray and environment.num_processes() > 1:
            raise SettingsError("TURNFOLD_DRIVER=ray starts its own processes: leave torchrun out")
        self._model = weights.model_dir(settings.model)
        self.config = config.compose(
            overrides,
            run,
            model=str(self._model),
            is_gpu=self._is_gpu,
            num_batches=settings.num_batches,
        )
        self.schedule: Schedule = config.check(self.config, run, is_gpu=self._is_gpu)
        config.check_gate(self.config, settings.max_mismatch_kl)
        self.sends_weights = config.sends_weights(self.config)
        for caution in config.cautions(self.config, overrides):
            log.warning("%s", caution)
        self._placeholders = weights.placeholders(self._model)
        self._dtype = _dtype(settings.weights_dtype, self._is_gpu)
        self._driver: Driver | None = None
        sizes = self.config.trainer
        self.num_processes = (
            sizes.nnodes * sizes.n_gpus_per_node if is_ray else environment.num_processes()
        )

    def build(self, published: int | None) -> Checkpoint | None:
        """Build the policy as the newest good checkpoint has it, and return that one.

        `published` is the newest version on the topic. Raises UserError when run directory and
        topic are of different runs, or when the checkpoint does not fit.
        """
        found = self._find(published)
        start = origin(
            found,
            model=self._model,
            num_processes=self.num_processes,
            is_lora=config.lora_rank(self.config) > 0,
        )
        log.info("building the model of %s with verl", start.model)
        self._driver = drivers.start(
            self._settings.driver,
            self.config,
            weights_from=None if start.model == self._model else start.model,
            is_gpu=self._is_gpu,
            num_processes=self.num_processes,
        )
        num_ranks, self.num_processes = self._driver.sizes()
        self.schedule = msgspec.structs.replace(self.schedule, num_ranks=num_ranks)
        if start.checkpoint is not None:
            self._driver.load(start.checkpoint.actor_dir)
            log.info("resumed from %s", start.checkpoint.directory)
        elif found is not None and found.state.batch > 0:
            self._driver.skip_batches(found.state.batch)
            log.warning(
                "resumed from the full weights in %s with another number of processes: the state "
                "of the optimizer starts anew",
                start.model,
            )
        return found

    @property
    def driver(self) -> Driver:
        assert self._driver is not None, "build comes first"
        return self._driver

    def close(self) -> None:
        """Let the other ranks end."""
        if self._driver is not None:
            self._driver.close()

    @property
    def is_overlapped(self) -> bool:
        """May files be written while the next batch trains?"""
        return self._settings.is_overlapped and self.driver.can_copy_weights

    def prepare(self, batch: Batch) -> tuple[list[TrainRow], Plan]:
        """The rows of a batch with their advantages, and where each of them goes."""
        algorithm = self.config.algorithm
        scores = [score(trajectory) for trajectory in batch.trajectories]
        estimator = algorithm.adv_estimator
        advantages = rollout_advantages(scores, estimator, algorithm)
        by_turn = turn_advantages(batch.trajectories, estimator, algorithm)
        rows = train_rows(batch.trajectories, advantages, by_turn)
        check_media(rows, self._placeholders)
        return rows, plan([row.size for row in rows], self.schedule)

    def publication(self, version: int) -> Publication:
        """Where and how a version of the weights is written."""
        return Publication(
            root=self._settings.weights_dir,
            version=version,
            model_dir=self._model,
            dtype=self._dtype,
        )

    def open_tracking(self, first_batch: int) -> Any:
        """verl's Tracking, with the loggers of `trainer.logger`."""
        from omegaconf import OmegaConf
        from verl.utils.tracking import Tracking

        directory = self._settings.metrics_dir
        directory.mkdir(parents=True, exist_ok=True)
        # verl's file logger starts its file anew, so each start of the process gets its own.
        file = directory / f"from-batch-{first_batch:08d}.jsonl"
        os.environ["VERL_FILE_LOGGER_PATH"] = str(file)
        os.environ.setdefault("TENSORBOARD_DIR", str(directory / "tensorboard"))
        return Tracking(
            self.config.trainer.project_name,
            self.config.trainer.experiment_name,
            OmegaConf.to_container(self.config.trainer, resolve=True)["logger"],
            OmegaConf.to_container(self.config, resolve=True),
        )

    def _find(self, published: int | None) -> Checkpoint | None:
        """The checkpoint to go on from, checked to be of this run and this log."""
        root, directory = self._settings.checkpoints_dir, self._settings.weights_dir
        for path in (root, directory):
            path.mkdir(parents=True, exist_ok=True)
            durable.remove_drafts(path)
        found = checkpoints.newest_good(root)
        if found is None:
            stray = weights.versions(directory)
            check_new(self._run, published, checkpoints=root, weights=directory, stray=stray)
        else:
            check_owner(found, self._run, published, topic=self._settings.topics.policies)
        return found


def follow(device: Any) -> None:
    """What every rank but the first does under torchrun: as the first one says."""
    is_gpu = environment.prepare(device)
    from turnfold.trainer.backends import torchrun

    torchrun.follow(is_gpu)


def _dtype(name: str, is_gpu: bool) -> str:
    known = ("float32", "bfloat16", "float16")
    if name == "auto":
        return "bfloat16" if is_gpu else "float32"
    if name not in known:
        raise SettingsError(f"TURNFOLD_WEIGHTS_DTYPE={name}: expected auto, {', '.join(known)}")
    return name

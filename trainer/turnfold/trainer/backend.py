"""Drives verl's real actor worker inside this process, as one of the ranks of a policy.

Needs `backends.environment.prepare` before verl is imported. All calls must come from one thread.
Where there are several ranks, each of them makes the same calls with the same arguments.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnfold.trainer import tensors, weights
from turnfold.trainer.backends.environment import join_process_group
from turnfold.trainer.config import lora_rank
from turnfold.trainer.plan import Plan, Schedule
from turnfold.trainer.rows import TrainRow
from turnfold.trainer.weights import Publication

log = logging.getLogger("turnfold.trainer")


class TrainerBackend:
    """One policy with its optimizer, in verl's `ActorRolloutRefWorker(role="actor")`.

    backend = TrainerBackend(config)                    builds model and optimizer
    metrics = backend.update(rows, plan(sizes, schedule))
    for name, tensor in backend.weights(): ...

    With `actor.use_kl_loss` there is a reference policy too: the initial model in a second worker,
    or, with LoRA, the policy without its adapter. `weights_from` is a directory of full weights to
    go on from; the reference policy stays the model that the configuration names.
    """

    def __init__(
        self, config: Any, weights_from: Path | None = None, *, is_gpu: bool = False
    ) -> None:
        import transformers

        transformers.logging.disable_progress_bar()
        join_process_group(is_gpu)
        if not is_gpu:
            from turnfold.trainer import cpu_engine  # noqa: F401  # registers itself
        self.config = config
        self._worker = _build(config, "actor", weights_from)
        self._engine = self._worker.actor.engine
        self._has_adapter = lora_rank(config) > 0
        needs_reference = config.actor_rollout_ref.actor.use_kl_loss and not self._has_adapter
        self._reference = _build(config, "ref") if needs_reference else None
        self.num_optimizer_steps = 0
        """Optimizer steps that were really taken since this process started."""
        self._engine.optimizer.register_step_post_hook(self._count_step)

    def _count_step(self, *_: object) -> None:
        self.num_optimizer_steps += 1

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks: each has rows of its own."""
        return int(self._engine.get_data_parallel_size())

    @property
    def rank(self) -> int:
        """Data-parallel rank; processes that share one (sequence or tensor parallel) share rows."""
        return int(self._engine.get_data_parallel_rank())

    @property
    def num_processes(self) -> int:
        return int(self._worker.world_size)

    @property
    def is_first(self) -> bool:
        """The process that writes what is written once."""
        return int(self._worker.rank) == 0

    def sizes(self) -> tuple[int, int]:
        """Data-parallel ranks and processes."""
        return self.num_ranks, self.num_processes

    def update(self, rows: Sequence[TrainRow], plan: Plan) -> dict[str, float]:
        """Train on one batch: exactly `plan.num_steps` optimizer steps. Returns verl's metrics.

        `rows` are those of the whole batch; the plan says which are this rank's. A step whose
        gradient is not finite is skipped by verl; it is counted in `actor/nonfinite_grad_steps` and
        logged. A process without outputs (a pipeline stage, say) returns no metrics. Raises
        AssertionError when the steps that were taken and skipped are not those that were planned.
        """
        assert plan.schedule.num_ranks == self.num_ranks, (
            f"the plan is for {plan.schedule.num_ranks} ranks, there are {self.num_ranks}"
        )
        ordered = [None if i is None else rows[i] for i in plan.rank(self.rank)]
        data = self._tensors(ordered)
        compared = self._add_old_logprobs(data, tensors.rollouts_by_rank(rows, plan))
        if self.config.actor_rollout_ref.actor.use_kl_loss:
            self._add_reference_logprobs(data)
        measured = self._take_steps(data, plan.schedule)
        return compared | measured if measured else {}

    def logprobs(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """Logprob of every token after the prompt, under the current weights, for each row."""
        data = self._tensors(rows)
        found = self._logprobs_of(self._worker.compute_log_prob, data)
        return [part.tolist() for part in found[self.rank]]

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Full parameters by Hugging Face name; tied copies are left out.

        With several ranks every one must iterate to the end: gathering is collective. LoRA adapters
        come merged into the parameters, which verl does in bfloat16.
        """
        tied = self._tied_names()
        parameters, _ = self._engine.get_per_tensor_param()
        for name, tensor in parameters:
            if name not in tied:
                yield name, tensor

    def snapshot(self, dtype: str) -> dict[str, Any]:
        """A copy of the full parameters in memory of the first rank; the others get none."""
        kept = {}
        for name, tensor in self.weights():
            if self.is_first:
                kept[name] = weights.stored(tensor, dtype, is_copy=True)
        return kept

    def write_weights(self, publication: Publication) -> Path | None:
        """Write full parameters part by part on the first rank; the others help to gather them."""
        if self.is_first:
            return weights.write(publication, self.weights())
        for _ in self.weights():
            pass
        return None

    def send_weights(self, version: int) -> None:
        """Send full parameters by the checkpoint engine of verl's configuration, from all ranks."""
        asyncio.run(self._worker.update_weights(global_steps=version))

    def save(self, directory: Path) -> None:
        """Model, optimizer, scheduler and random state, in verl's own format: a part per rank."""
        self._worker.save_checkpoint(str(directory), None, 0, None)

    def load(self, directory: Path) -> None:
        """The opposite of `save`; the number of ranks must be the same."""
        self._worker.load_checkpoint(str(directory))

    def skip_batches(self, count: int) -> None:
        """Bring the learning-rate schedule to where it is behind `count` batches."""
        for _ in range(count):
            self._engine.lr_scheduler_step()

    def _tensors(self, rows: Sequence[TrainRow | None]) -> Any:
        rollout = self.config.actor_rollout_ref.rollout
        return tensors.to_verl(
            rows, temperature=rollout.temperature, pad_token_id=self._pad_token_id()
        )

    def _logprobs_of(self, forward: Any, data: Any, **options: bool) -> dict[int, list[Any]]:
        """Logprobs after the prompt of every row of every data-parallel rank, by rank."""
        output = forward(tensors.for_logprobs(data, **options))
        mine = None if output is None else tensors.response_logprobs(output, data)
        return self._exchange(mine)

    def _exchange(self, mine: list[Any] | None) -> dict[int, list[Any]]:
        """What each data-parallel rank has; None from a process without outputs."""
        import torch.distributed as dist

        if self.num_processes == 1:
            assert mine is not None
            return {0: mine}
        found: list[Any] = [None] * self.num_processes
        dist.all_gather_object(found, (self.rank, mine))
        return {rank: part for rank, part in sorted(found, key=lambda f: f[0]) if part is not None}

    def _add_old_logprobs(
        self, data: Any, rollouts: Mapping[int, Sequence[str]]
    ) -> dict[str, float]:
        """The proximal policy: recomputed (decoupled), or what the engine sampled with (bypass).

        Every rank compares all rows of the batch with their sampling logprobs, so that weights and
        metrics do not depend on which rank holds a row.
        """
        correction = self.config.algorithm.rollout_correction
        if correction.bypass_mode:
            data["old_log_probs"] = data["rollout_log_probs"]
            return {}
        by_rank = self._logprobs_of(self._worker.compute_log_prob, data)
        data["old_log_probs"] = tensors.jagged(by_rank[self.rank])
        everything = self._exchange(tensors.compared(data))
        return tensors.correct_for_sampling(data, everything, rollouts, self.rank, correction)

    def _add_reference_logprobs(self, data: Any) -> None:
        if self._reference is None:
            found = self._logprobs_of(self._worker.compute_log_prob, data, no_lora_adapter=True)
        else:
            found = self._logprobs_of(self._reference.compute_ref_log_prob, data)
        data["ref_log_prob"] = tensors.jagged(found[self.rank])

    def _take_steps(self, data: Any, schedule: Schedule) -> dict[str, float]:
        from verl.utils import tensordict_utils as tu
        from verl.utils.metric import reduce_metrics

        actor = self.config.actor_rollout_ref.actor
        request = tensors.for_update(
            data,
            schedule,
            seed=actor.data_loader_seed,
            is_entropy_wanted=bool(actor.calculate_entropy or actor.entropy_coeff),
        )
        before = self.num_optimizer_steps
        output = self._worker.update_actor(request)
        taken = self.num_optimizer_steps - before
        if output is None:
            return {}
        measured = tu.get(output, "metrics")
        norms = [float(norm) for norm in measured["grad_norm"]]
        num_skipped = sum(not math.isfinite(norm) for norm in norms)
        assert taken + num_skipped == schedule.num_steps, (
            f"expected {schedule.num_steps} optimizer steps, verl took {taken} and skipped "
            f"{num_skipped}"
        )
        if num_skipped:
            log.warning("%d of %d steps skipped: gradient not finite", num_skipped, len(norms))
            measured["grad_norm"] = [norm for norm in norms if math.isfinite(norm)] or [0.0]
        metrics = {_prefixed(k): float(v) for k, v in reduce_metrics(measured).items()}
        return metrics | {
            "actor/optimizer_steps": float(taken),
            "actor/nonfinite_grad_steps": float(num_skipped),
        }

    def _pad_token_id(self) -> int:
        tokenizer = self._worker.actor.model_config.tokenizer
        return int(getattr(tokenizer, "pad_token_id", None) or 0)

    def _tied_names(self) -> set[str]:
        """Names under which a parameter appears a second time, such as a tied lm_head."""
        seen: set[int] = set()
        tied = set()
        for name, parameter in self._engine.module.named_parameters(remove_duplicate=False):
            if id(parameter) in seen:
                tied.add(name.removeprefix("base_model.model."))
            seen.add(id(parameter))
        return tied


def _build(config: Any, role: str, weights_from: Path | None = None) -> Any:
    """verl's worker in a role. It edits its configuration while it builds, so it gets a copy."""
    from omegaconf import OmegaConf
    from verl.workers.engine_workers import ActorRolloutRefWorker

    own = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    if weights_from is not None:
        own.actor_rollout_ref.model.path = str(weights_from)
    worker = ActorRolloutRefWorker(config=own.actor_rollout_ref, role=role)
    worker.init_model()
    return worker


def _prefixed(name: str) -> str:
    return name if "/" in name else f"actor/{name}"

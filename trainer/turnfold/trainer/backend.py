"""Drives verl's real actor worker inside this process.

Needs `backends.environment.prepare` before verl is imported. All calls must come from one thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from turnfold.trainer import tensors
from turnfold.trainer.backends.environment import join_process_group
from turnfold.trainer.plan import Plan, Schedule
from turnfold.trainer.rows import TrainRow

log = logging.getLogger("turnfold.trainer")


class TrainerBackend:
    """One policy with its optimizer, in verl's `ActorRolloutRefWorker(role="actor")`.

    backend = TrainerBackend(config)                    builds model and optimizer
    metrics = backend.update(rows, plan(sizes, schedule))
    for name, tensor in backend.weights(): ...
    """

    def __init__(self, config: Any, *, is_gpu: bool = False) -> None:
        import transformers
        from omegaconf import OmegaConf
        from verl.workers.engine_workers import ActorRolloutRefWorker

        transformers.logging.disable_progress_bar()
        join_process_group(is_gpu)
        # The worker edits its configuration while it builds; ours stays as it was composed.
        self.config = config
        own = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
        self._worker = ActorRolloutRefWorker(config=own.actor_rollout_ref, role="actor")
        self._worker.init_model()
        self._engine = self._worker.actor.engine
        self.num_optimizer_steps = 0
        """Optimizer steps that were really taken since this process started."""
        self._engine.optimizer.register_step_post_hook(self._count_step)

    def _count_step(self, *_: object) -> None:
        self.num_optimizer_steps += 1

    @property
    def num_ranks(self) -> int:
        return int(self._engine.get_data_parallel_size())

    @property
    def rank(self) -> int:
        return int(self._engine.get_data_parallel_rank())

    def update(self, rows: Sequence[TrainRow], plan: Plan) -> dict[str, float]:
        """Train on one batch: exactly `plan.num_steps` optimizer steps. Returns verl's metrics.

        A step whose gradient is not finite is skipped by verl; it is counted in
        `actor/nonfinite_grad_steps` and logged. Raises AssertionError when the steps that were
        taken and skipped are not those that were planned.
        """
        ordered = [None if i is None else rows[i] for i in plan.rank(self.rank)]
        data = self._tensors(ordered)
        metrics = self._add_old_logprobs(data)
        metrics.update(self._take_steps(data, plan.schedule))
        return metrics

    def logprobs(self, rows: Sequence[TrainRow]) -> list[list[float]]:
        """Logprob of every token after the prompt, under the current weights, for each row."""
        data = self._tensors(rows)
        found = tensors.response_logprobs(self._forward(data), data)
        return [part.tolist() for part in found.unbind()]

    def weights(self) -> Iterator[tuple[str, Any]]:
        """Full parameters by Hugging Face name; tied copies are left out.

        With several ranks every one must iterate to the end: gathering is collective.
        """
        tied = self._tied_names()
        parameters, _ = self._engine.get_per_tensor_param()
        for name, tensor in parameters:
            if name not in tied:
                yield name, tensor

    def save(self, directory: Path) -> None:
        """Model, optimizer, scheduler and random state, in verl's own format."""
        self._worker.save_checkpoint(str(directory), None, 0, None)

    def load(self, directory: Path) -> None:
        """The opposite of `save`; the number of ranks must be the same."""
        self._worker.load_checkpoint(str(directory))

    def _tensors(self, rows: Sequence[TrainRow | None]) -> Any:
        rollout = self.config.actor_rollout_ref.rollout
        return tensors.to_verl(
            rows, temperature=rollout.temperature, pad_token_id=self._pad_token_id()
        )

    def _forward(self, data: Any) -> Any:
        return self._worker.compute_log_prob(tensors.for_logprobs(data))

    def _add_old_logprobs(self, data: Any) -> dict[str, float]:
        """The proximal policy: recomputed (decoupled), or what the engine sampled with (bypass)."""
        correction = self.config.algorithm.rollout_correction
        if correction.bypass_mode:
            data["old_log_probs"] = data["rollout_log_probs"]
            return {}
        data["old_log_probs"] = tensors.response_logprobs(self._forward(data), data)
        return tensors.correct_for_sampling(data, correction)

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
        measured = tu.get(self._worker.update_actor(request), "metrics")
        taken = self.num_optimizer_steps - before
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
                tied.add(name)
            seen.add(id(parameter))
        return tied


def _prefixed(name: str) -> str:
    return name if "/" in name else f"actor/{name}"

"""A fixed number of optimizer steps a batch against mini-batches of a fixed number of rows.

    python benchmarks/figure1.py --seeds 5 --batches 20 --png figure1.png

The toy task of `turnfold demo`, captured as a tree: a rollout that called its tool is two rows, the
call and the answer, so that a batch has between one and two rows a rollout. The policy is trained
with verl on two ways of cutting the same rollouts into mini-batches:

    fixed steps   the prompts of a batch over 2 mini-batches, whatever the rows: 2 x 2 epochs
    fixed rows    32 rows a mini-batch, where rows of a rollout part: more rows, more steps

Writes the mean reward of every batch, with one standard deviation over the seeds, and prints the
curves as JSON. On one core a batch takes about 3 seconds for each way and seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import deque
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import toy_rl

from turnfold.schemas.run import RunConfig
from turnfold.schemas.testing import row
from turnfold.trainer.advantages import Score, rollout_advantages
from turnfold.trainer.plan import Plan, PlanRow, plan
from turnfold.trainer.rows import TrainRow

WAYS = ("fixed steps", "fixed rows")


class VerlTrainer:
    """One policy in verl's worker; trains on rollouts of the toy task."""

    def __init__(self, model: Path, settings: toy_rl.Settings, way: str) -> None:
        from turnfold.trainer import config
        from turnfold.trainer.backend import TrainerBackend

        self._settings, self._way, self.num_steps = settings, way, []
        run = RunConfig(
            groups_per_batch=settings.groups_per_batch,
            group_size=settings.rollouts_per_group,
            max_row_tokens=512,
        )
        actor = "actor_rollout_ref.actor"
        mini_batch = settings.groups_per_batch // settings.num_mini_batches
        composed = config.compose(
            [
                f"{actor}.ppo_mini_batch_size={mini_batch}",
                f"{actor}.ppo_epochs={settings.ppo_epochs}",
                f"{actor}.optim.lr={settings.learning_rate}",
                f"{actor}.optim.weight_decay=0.0",
                f"{actor}.optim.clip_grad={settings.max_grad_norm}",
                f"{actor}.ppo_max_token_len_per_gpu=8192",
                "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=8192",
                "algorithm.rollout_correction.bypass_mode=true",
            ],
            run,
            model=str(model),
        )
        self._schedule = config.check(composed, run)
        self._algorithm = composed.algorithm
        self._backend = TrainerBackend(composed)

    def train(self, rollouts: list[toy_rl.Rollout]) -> None:
        rows = self._rows(rollouts)
        self._backend.update(rows, self._plan(rows))

    def state_dict(self) -> dict[str, Any]:
        return {name: tensor.detach().clone() for name, tensor in self._backend.weights()}

    def _rows(self, rollouts: list[toy_rl.Rollout]) -> list[TrainRow]:
        size = self._settings.rollouts_per_group
        scores = [
            Score(rollout_id=str(i), group_id=str(i // size), reward=r.reward, num_trained=1)
            for i, r in enumerate(rollouts)
        ]
        advantages = rollout_advantages(scores, "grpo", self._algorithm)
        return [
            TrainRow(str(i), str(i // size), part, advantages[str(i)])
            for i, rollout in enumerate(rollouts)
            for part in tree_rows(rollout)
        ]

    def _plan(self, rows: list[TrainRow]) -> Plan:
        schedule, sizes = self._schedule, [r.size for r in rows]
        if self._way == "fixed rows":
            per_step = schedule.rollouts_per_mini_batch
            num = -(-len(rows) // per_step)
            schedule = msgspec.structs.replace(schedule, num_mini_batches=num)
            # Rows are dealt one by one, in order: each is a group of its own.
            sizes = [PlanRow(group_id=str(i), num_tokens=s.num_tokens) for i, s in enumerate(sizes)]
        self.num_steps.append(schedule.num_steps)
        return plan(sizes, schedule)


def tree_rows(rollout: toy_rl.Rollout) -> list[Any]:
    """The call and the answer as rows of their own: each trains what the other has as context.

    mask 0 0 1 1 0 0 1 1  ->  0 0 1 1  and  0 0 0 0 0 0 1 1
    """
    mask = np.array(rollout.loss_mask)
    starts = np.flatnonzero(np.diff(np.concatenate([[0], mask])) == 1)
    ends = np.flatnonzero(np.diff(np.concatenate([mask, [0]])) == -1) + 1
    rows = []
    for start, end in zip(starts, ends, strict=True):
        own = np.where(np.arange(end) >= start, mask[:end], 0)
        logprobs = np.array(rollout.logprobs[:end]) * own
        rows.append(row(rollout.token_ids[:end], own.tolist(), logprobs.tolist()))
    return rows


def learn(model: Path, settings: toy_rl.Settings, way: str) -> dict[str, list[float]]:
    """Reward and optimizer steps of every batch; rollouts are one version old, as in the demo."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    trainer = VerlTrainer(model, settings, way)
    slots = toy_rl.SlotModel(model, num_slots=64, max_len=512)
    count = settings.groups_per_batch
    payloads = toy_rl.task.tasks(count * (settings.num_batches + settings.staleness), settings.seed)
    rewards: list[float] = []
    stop = toy_rl.StopRules(eos_token_ids=(tokenizer.eos_token_id,))
    with toy_rl.Engine(slots, stop) as engine:
        sampler = toy_rl.Sampler(engine, tokenizer, settings)
        queued: deque[list[toy_rl.Rollout]] = deque()
        for start in range(0, len(payloads), count):
            queued.append(sampler.batch(payloads[start : start + count]))
            if len(queued) <= settings.staleness:
                continue
            rollouts = queued.popleft()
            rewards.append(float(np.mean([r.reward for r in rollouts])))
            trainer.train(rollouts)
            engine.load_weights(trainer.state_dict()).result()
            sys.stderr.write(f"{way}, seed {settings.seed}: reward {rewards[-1]:.3f}\n")
    return {"reward": rewards, "steps": trainer.num_steps}


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    """Mean over the seeds as a line, one standard deviation as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for way, runs in curves.items():
        reward_SB = np.array(runs)
        mean_B, spread_B = reward_SB.mean(0), reward_SB.std(0)
        batches_B = np.arange(1, len(mean_B) + 1)
        (line,) = axes.plot(batches_B, mean_B, label=way)
        axes.fill_between(
            batches_B, mean_B - spread_B, mean_B + spread_B, color=line.get_color(), alpha=0.2
        )
    axes.set_xlabel("batch")
    axes.set_ylabel("mean reward")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--png", type=Path, default=Path("figure1.png"))
    options = parser.parse_args()
    from turnfold.trainer.backends import environment

    environment.prepare("cpu")
    toy_rl.torch.set_num_threads(1)
    found: dict[str, list[dict[str, list[float]]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as scratch, redirect_stdout(sys.stderr):
        model = Path(scratch) / "model"
        toy_rl.build(model, toy_rl.Recipe())
        for seed in range(options.seeds):
            settings = toy_rl.Settings(seed=seed, num_batches=options.batches)
            for way in WAYS:
                found[way].append(learn(model, settings, way))
    draw({way: [run["reward"] for run in runs] for way, runs in found.items()}, options.png)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

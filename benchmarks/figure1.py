"""A fixed number of optimizer steps a batch against mini-batches of a fixed number of rows.

    python benchmarks/figure1.py --seeds 0 1 2 3 4 --runs runs --png docs/figure1.png

The toy task of `turnfold demo`, with an agent that asks for its last answer one to six times from
the same history and takes the majority. Captured as a tree, a rollout is the row of its call and
one row for each answer, so that a batch has more rows the more answers its tasks want and the
better the policy has become at calling its tool. The same policy is trained with verl on two ways
of cutting the rows of a batch into mini-batches:

    fixed steps   the prompts of a batch over 4 mini-batches, whatever the rows: 4 steps
    fixed rows    16 rows a mini-batch (verl's ppo_mini_batch_size 2 times n 8), where the rows of
                  a rollout part: more rows, more steps

A run is one way with one seed; it is written to the directory `--runs`, and not done again when it
is there, so that seeds can be run side by side. Draws the mean reward of every batch with one
standard deviation over the seeds, and the steps below, and prints a summary as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import toy_rl

from turnfold.schemas.run import RunConfig
from turnfold.schemas.testing import row
from turnfold.schemas.trajectories import Row
from turnfold.trainer.advantages import Score, rollout_advantages
from turnfold.trainer.plan import Plan, PlanRow, plan
from turnfold.trainer.rows import TrainRow

WAYS = ("fixed steps", "fixed rows")
ANSWERS = (1, 1, 2, 3, 6)
"""How many answers a task may want, each as likely as the others."""
MEASURED = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm")


@dataclass(frozen=True, kw_only=True)
class TreeRollout:
    """An attempt whose last answer was sampled several times from one history."""

    rows: list[Row]
    reward: float


class VotingSampler(toy_rl.Sampler):
    """Runs rollouts that end in a vote; how many answers a task wants depends on its place alone."""

    def trees(self, payloads: Sequence[dict[str, int]], first: int) -> list[TreeRollout]:
        """All rollouts of these tasks, group after group; `first` is the place of the first one."""
        size = self._settings.rollouts_per_group
        wanted = [num_answers(self._settings.seed, first + i) for i in range(len(payloads))]
        attempts = [(p, n) for p, n in zip(payloads, wanted, strict=True) for _ in range(size)]
        prompts = [self._prompt(payload) for payload, _ in attempts]
        calls = self._generate(prompts, toy_rl.MAX_CALL_TOKENS)
        doors = [self._called_door(call) for call in calls]
        histories = [
            prompt + toy_rl.token_ids(call) + self._tool_result(payload, call, door)
            for (payload, _), prompt, call, door in zip(
                attempts, prompts, calls, doors, strict=True
            )
        ]
        asked = [0 if door is None else n for (_, n), door in zip(attempts, doors, strict=True)]
        repeated = [history for history, n in zip(histories, asked, strict=True) for _ in range(n)]
        answers = iter(self._generate(repeated, toy_rl.MAX_ANSWER_TOKENS))
        return [
            self._tree(payload, prompt, call, door, history, [next(answers) for _ in range(n)])
            for (payload, _), prompt, call, door, history, n in zip(
                attempts, prompts, calls, doors, histories, asked, strict=True
            )
        ]

    def _tree(
        self,
        payload: dict[str, int],
        prompt: list[int],
        call: toy_rl.Completion,
        door: object | None,
        history: list[int],
        answers: list[toy_rl.Completion],
    ) -> TreeRollout:
        texts = [
            str(self._tokenizer.decode(toy_rl.token_ids(answer), skip_special_tokens=True))
            for answer in answers
        ]
        voted = Counter(texts).most_common(1)[0][0] if texts else None
        return TreeRollout(
            rows=[sampled(prompt, call), *(sampled(history, answer) for answer in answers)],
            reward=toy_rl.task.reward(payload, door=door, answer=voted),
        )


def num_answers(seed: int, place: int) -> int:
    """Answers that a task wants, the same for both ways."""
    return random.Random(f"{seed}/{place}").choice(ANSWERS)


def sampled(context: list[int], completion: toy_rl.Completion) -> Row:
    """Context that is not trained, and what was sampled from it."""
    ids = toy_rl.token_ids(completion)
    logprobs = [token.logprob for token in completion.tokens]
    before = len(context)
    return row(context + ids, [0] * before + [1] * len(ids), [0.0] * before + logprobs)


class VerlTrainer:
    """One policy in verl's worker; trains on rollouts of the toy task."""

    def __init__(self, model: Path, settings: toy_rl.Settings, way: str) -> None:
        from turnfold.trainer import config
        from turnfold.trainer.backend import TrainerBackend

        self._settings, self._way = settings, way
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

    def train(self, rollouts: list[TreeRollout]) -> dict[str, float]:
        """Train on a batch; its rows, its optimizer steps and what verl measured."""
        rows = self._rows(rollouts)
        planned = self._plan(rows)
        measured = self._backend.update(rows, planned)
        found = {name: measured[name] for name in MEASURED}
        return {"rows": len(rows), "steps": planned.num_steps} | found

    def state_dict(self) -> dict[str, Any]:
        return {name: tensor.detach().clone() for name, tensor in self._backend.weights()}

    def _rows(self, rollouts: list[TreeRollout]) -> list[TrainRow]:
        size = self._settings.rollouts_per_group
        scores = [
            Score(rollout_id=str(i), group_id=str(i // size), reward=r.reward, num_trained=1)
            for i, r in enumerate(rollouts)
        ]
        advantages = rollout_advantages(scores, "grpo", self._algorithm)
        return [
            TrainRow(str(i), str(i // size), part, advantages[str(i)])
            for i, rollout in enumerate(rollouts)
            for part in rollout.rows
        ]

    def _plan(self, rows: list[TrainRow]) -> Plan:
        schedule, sizes = self._schedule, [r.size for r in rows]
        if self._way == "fixed rows":
            per_step = schedule.rollouts_per_mini_batch
            num = -(-len(rows) // per_step)
            schedule = msgspec.structs.replace(schedule, num_mini_batches=num)
            # Each row is a group of its own, which may go into any mini-batch.
            sizes = [PlanRow(group_id=str(i), num_tokens=s.num_tokens) for i, s in enumerate(sizes)]
        return plan(sizes, schedule)


def learn(model: Path, settings: toy_rl.Settings, way: str) -> list[dict[str, float]]:
    """What every batch brought; rollouts are one version old, as in the demo."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    trainer = VerlTrainer(model, settings, way)
    slots = toy_rl.SlotModel(model, num_slots=64, max_len=512)
    count = settings.groups_per_batch
    payloads = toy_rl.task.tasks(count * (settings.num_batches + settings.staleness), settings.seed)
    batches: list[dict[str, float]] = []
    stop = toy_rl.StopRules(eos_token_ids=(tokenizer.eos_token_id,))
    with toy_rl.Engine(slots, stop) as engine:
        sampler = VotingSampler(engine, tokenizer, settings)
        queued: deque[list[TreeRollout]] = deque()
        for start in range(0, len(payloads), count):
            queued.append(sampler.trees(payloads[start : start + count], start))
            if len(queued) <= settings.staleness:
                continue
            rollouts = queued.popleft()
            reward = float(np.mean([r.reward for r in rollouts]))
            batches.append({"reward": reward} | trainer.train(rollouts))
            engine.load_weights(trainer.state_dict()).result()
            sys.stderr.write(f"{way}, seed {settings.seed}: {batches[-1]}\n")
    return batches


Runs = dict[str, list[list[dict[str, float]]]]
"""For each way, for each seed, what every batch brought."""


def values(runs: Runs, way: str, name: str) -> np.ndarray[Any, Any]:
    """One value of every batch: seeds x batches."""
    return np.array([[batch[name] for batch in run] for run in runs[way]])


def draw(runs: Runs, path: Path) -> None:
    """Mean over the seeds as a line, one standard deviation as a band; optimizer steps below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(6, 5), sharex=True, height_ratios=(3, 1)
    )
    for way in WAYS:
        for axes, name in ((above, "reward"), (below, "steps")):
            value_SB = values(runs, way, name)
            mean_B, spread_B = value_SB.mean(0), value_SB.std(0, ddof=1)
            batches_B = np.arange(1, len(mean_B) + 1)
            (line,) = axes.plot(batches_B, mean_B, label=way)
            axes.fill_between(
                batches_B, mean_B - spread_B, mean_B + spread_B, color=line.get_color(), alpha=0.2
            )
    above.set_ylabel("mean reward")
    above.legend()
    below.set_ylabel("steps")
    below.set_xlabel("batch")
    below.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def summary(runs: Runs) -> dict[str, Any]:
    """Steps, rows, and the reward of the first, the middle and the last three batches."""
    found: dict[str, Any] = {}
    for way in WAYS:
        reward_SB, steps_SB = values(runs, way, "reward"), values(runs, way, "steps")
        middle = reward_SB.shape[1] // 2
        parts = {
            "first": slice(0, 3),
            "middle": slice(middle - 1, middle + 2),
            "last": slice(-3, None),
        }
        rows_SB = values(runs, way, "rows")
        found[way] = {
            "steps_min_mean_max": [
                int(steps_SB.min()),
                float(steps_SB.mean()),
                int(steps_SB.max()),
            ],
            "rows_min_mean_max": [int(rows_SB.min()), float(rows_SB.mean()), int(rows_SB.max())],
            **{
                name: [round(float(f(reward_SB[:, part].mean(1))), 3) for f in (np.mean, _spread)]
                for name, part in parts.items()
            },
            "last_by_seed": reward_SB[:, -3:].mean(1).round(3).tolist(),
            **{name: round(float(values(runs, way, name).mean()), 5) for name in MEASURED},
        }
    return found


def _spread(values_S: np.ndarray[Any, Any]) -> float:
    return float(values_S.std(ddof=1)) if len(values_S) > 1 else 0.0


def run_all(seeds: Sequence[int], num_batches: int, learning_rate: float, directory: Path) -> Runs:
    """All runs, from the directory where they are there."""
    found: Runs = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as scratch, redirect_stdout(sys.stderr):
        model = Path(scratch) / "model"
        toy_rl.build(model, toy_rl.Recipe())
        for seed in seeds:
            settings = toy_rl.Settings(
                seed=seed,
                num_batches=num_batches,
                num_mini_batches=4,
                ppo_epochs=1,
                learning_rate=learning_rate,
            )
            for way in WAYS:
                path = directory / f"{way.replace(' ', '-')}-{learning_rate:g}-{seed}.json"
                if not path.exists():
                    path.write_text(json.dumps(learn(model, settings, way)))
                found[way].append(json.loads(path.read_text())[:num_batches])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=toy_rl.Settings.learning_rate)
    parser.add_argument("--runs", type=Path, default=Path("figure1-runs"))
    parser.add_argument("--png", type=Path, default=Path("figure1.png"))
    options = parser.parse_args()
    from turnfold.trainer.backends import environment

    environment.prepare("cpu")
    toy_rl.torch.set_num_threads(1)
    options.runs.mkdir(parents=True, exist_ok=True)
    runs = run_all(options.seeds, options.batches, options.learning_rate, options.runs)
    draw(runs, options.png)
    print(json.dumps(summary(runs)))


if __name__ == "__main__":
    main()

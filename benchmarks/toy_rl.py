"""Does the toy task learn? GRPO in plain torch, with the embedded engine in-process, no Kafka and
no verl.

    python benchmarks/toy_rl.py --seed 0 --batches 20

It mirrors what `turnfold demo` does through the whole pipeline: groups of rollouts of one task, one
advantage per rollout broadcast over all of its sampled tokens, token-level PPO clipping against the
sampling logprobs, a fixed number of optimizer steps a batch, every batch sampled one policy version
behind. Prints one JSON object, with the mean reward of each batch and the share of tool calls that
the chat template would have written with other tokens.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from turnfold.embedded.inference.engine import Engine
from turnfold.embedded.inference.model import SlotModel
from turnfold.embedded.inference.sampling import SamplingParams
from turnfold.embedded.inference.sequences import Completion, GenerationRequest, StopRules
from turnfold.embedded.tiny import task
from turnfold.embedded.tiny.build import build
from turnfold.embedded.tiny.recipe import Recipe
from turnfold.embedded.tiny.tokenizer import render

MAX_CALL_TOKENS = 48
MAX_ANSWER_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The learning configuration; `turnfold demo` uses the same numbers."""

    groups_per_batch: int = 8
    rollouts_per_group: int = 8
    num_mini_batches: int = 2
    ppo_epochs: int = 2
    learning_rate: float = 5e-4
    clip_ratio: float = 0.2
    max_grad_norm: float = 1.0
    staleness: int = 1
    num_batches: int = 20
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One attempt as a training row, all lists of the same length."""

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    reward: float
    has_valid_call: bool
    has_drifted: bool
    """The call would be written with other tokens if it were parsed and rendered again."""


class Sampler:
    """Runs rollouts of the toy task on the engine, tokens in and tokens out."""

    def __init__(self, engine: Engine, tokenizer: Any, settings: Settings) -> None:
        self._engine, self._tokenizer, self._settings = engine, tokenizer, settings
        self._num_requests = 0

    def batch(self, payloads: list[dict[str, int]]) -> list[Rollout]:
        """All rollouts of these tasks, group after group."""
        attempts = [p for p in payloads for _ in range(self._settings.rollouts_per_group)]
        prompts = [self._prompt(payload) for payload in attempts]
        calls = self._generate(prompts, MAX_CALL_TOKENS)
        doors = [self._called_door(call) for call in calls]
        histories = [
            prompt + token_ids(call) + self._tool_result(payload, call, door)
            for payload, prompt, call, door in zip(attempts, prompts, calls, doors, strict=True)
            if door is not None
        ]
        answers = iter(zip(histories, self._generate(histories, MAX_ANSWER_TOKENS), strict=True))
        return [
            self._rollout(payload, prompt, call, door, next(answers) if door is not None else None)
            for payload, prompt, call, door in zip(attempts, prompts, calls, doors, strict=True)
        ]

    def _generate(self, prompts: list[list[int]], max_tokens: int) -> list[Completion]:
        futures = []
        for prompt in prompts:
            self._num_requests += 1
            seed = self._settings.seed * 1_000_000 + self._num_requests
            params = SamplingParams(max_tokens=max_tokens, seed=seed)
            request = GenerationRequest(
                request_id=str(self._num_requests), prompt_ids=tuple(prompt), params=params
            )
            futures.append(self._engine.submit(request))
        return [future.result() for future in futures]

    def _prompt(self, payload: dict[str, int]) -> list[int]:
        messages = [{"role": "user", "content": task.question(payload)}]
        return render(self._tokenizer, messages, add_generation_prompt=True)

    def _called_door(self, call: Completion) -> object | None:
        """The door that the sampled text asks for; None when it is no valid call."""
        text = str(self._tokenizer.decode(token_ids(call)))
        if "<tool_call>" not in text or "</tool_call>" not in text:
            return None
        body = text.split("<tool_call>", 1)[1].split("</tool_call>", 1)[0]
        try:
            parsed = json.loads(body)
            door: object = parsed["arguments"]["door"]
        except (ValueError, KeyError, TypeError):
            return None
        return door if parsed.get("name") == task.TOOL_NAME else None

    def _tool_result(self, payload: dict[str, int], call: Completion, door: object) -> list[int]:
        """The tokens between the call and the next answer, with a closer when the call was cut
        short.
        """
        result = task.lookup(payload, door)
        closer = "" if call.finish_reason == "stop" else "<|im_end|>"
        text = (
            f"{closer}\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        return self._encode(text)

    def _rollout(
        self,
        payload: dict[str, int],
        prompt: list[int],
        call: Completion,
        door: object | None,
        second: tuple[list[int], Completion] | None,
    ) -> Rollout:
        ids, mask, logprobs = list(prompt), [0] * len(prompt), [0.0] * len(prompt)
        text = None
        for history, completion in [(prompt, call), *([second] if second else [])]:
            num_between = len(history) - len(ids)
            ids = history + token_ids(completion)
            mask += [0] * num_between + [1] * len(completion.tokens)
            logprobs += [0.0] * num_between + [token.logprob for token in completion.tokens]
            text = str(self._tokenizer.decode(token_ids(completion), skip_special_tokens=True))
        return Rollout(
            token_ids=ids,
            loss_mask=mask,
            logprobs=logprobs,
            reward=task.reward(payload, door=door, answer=text if second else None),
            has_valid_call=door is not None,
            has_drifted=door is not None and self._has_drifted(call, door),
        )

    def _has_drifted(self, call: Completion, door: object) -> bool:
        canonical = json.dumps({"name": task.TOOL_NAME, "arguments": {"door": door}})
        rendered = self._encode(f"<tool_call>\n{canonical}\n</tool_call><|im_end|>")
        return rendered != token_ids(call)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class Trainer:
    """Token-level PPO on a model of its own, which is as stale as the settings say."""

    def __init__(self, model_dir: Path, settings: Settings) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._settings = settings
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.learning_rate, weight_decay=0.0
        )

    def train(self, rollouts: list[Rollout]) -> None:
        """A fixed number of optimizer steps: mini-batches times epochs."""
        advantages = group_advantages(rollouts, self._settings.rollouts_per_group)
        size = len(rollouts) // self._settings.num_mini_batches
        for _ in range(self._settings.ppo_epochs):
            for start in range(0, len(rollouts), size):
                part = slice(start, start + size)
                self._step(rollouts[part], advantages[part])

    def _step(self, rollouts: list[Rollout], advantages_B: torch.Tensor) -> None:
        loss = self._loss(rollouts, advantages_B)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_grad_norm)
        self._optimizer.step()

    def _loss(self, rollouts: list[Rollout], advantages_B: torch.Tensor) -> torch.Tensor:
        """Summed over tokens, divided by the number of rollouts: verl's seq-mean-token-sum."""
        ids_BT = _padded([r.token_ids for r in rollouts]).long()
        mask_BT = _padded([r.loss_mask for r in rollouts])[:, 1:]
        old_BT = _padded([r.logprobs for r in rollouts])[:, 1:]
        logits_BTV = self.model(input_ids=ids_BT).logits[:, :-1]
        logprobs_BT = torch.log_softmax(logits_BTV, -1).gather(-1, ids_BT[:, 1:, None])[..., 0]
        ratio_BT = ((logprobs_BT - old_BT) * mask_BT).exp()
        clip = self._settings.clip_ratio
        clipped_BT = ratio_BT.clamp(1 - clip, 1 + clip)
        advantages_B1 = advantages_B[:, None]
        gain_BT = torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
        return -(gain_BT * mask_BT).sum() / len(rollouts)


def group_advantages(rollouts: list[Rollout], group_size: int) -> torch.Tensor:
    """GRPO: each reward against the mean and the standard deviation of its group."""
    rewards_GN = torch.tensor([r.reward for r in rollouts]).view(-1, group_size)
    centred_GN = rewards_GN - rewards_GN.mean(1, keepdim=True)
    return (centred_GN / (rewards_GN.std(1, keepdim=True) + 1e-6)).flatten()


def token_ids(completion: Completion) -> list[int]:
    """The sampled ids."""
    return [token.token_id for token in completion.tokens]


def _padded(rows: list[list[int]] | list[list[float]]) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=torch.float)


def learn(model_dir: Path, settings: Settings) -> dict[str, Any]:
    """Train for the configured number of batches and report the curve."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    trainer = Trainer(model_dir, settings)
    model = SlotModel(model_dir, num_slots=64, max_len=512)
    report: dict[str, Any] = {
        "settings": asdict(settings),
        "reward": [],
        "valid": [],
        "drifted": [],
    }
    num_groups = settings.groups_per_batch
    payloads = task.tasks(num_groups * (settings.num_batches + settings.staleness), settings.seed)
    with Engine(model, StopRules(eos_token_ids=(tokenizer.eos_token_id,))) as engine:
        sampler = Sampler(engine, tokenizer, settings)
        queued: deque[list[Rollout]] = deque()
        for start in range(0, len(payloads), num_groups):
            queued.append(sampler.batch(payloads[start : start + num_groups]))
            if len(queued) <= settings.staleness:
                continue
            rollouts = queued.popleft()
            _record(report, rollouts)
            trainer.train(rollouts)
            engine.load_weights(trainer.model.state_dict()).result()
    return report


def _record(report: dict[str, Any], rollouts: list[Rollout]) -> None:
    called = [r for r in rollouts if r.has_valid_call]
    report["reward"].append(round(sum(r.reward for r in rollouts) / len(rollouts), 3))
    report["valid"].append(round(len(called) / len(rollouts), 3))
    report["drifted"].append(round(sum(r.has_drifted for r in called) / max(1, len(called)), 3))
    sys.stderr.write(f"batch {len(report['reward'])}: reward {report['reward'][-1]}\n")


def main() -> None:
    """Parse the command line, learn, print the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in asdict(Settings()).items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type(default), default=default)
    parser.add_argument(
        "--model", type=Path, help="tiny model; built in a temporary directory by default"
    )
    parser.add_argument("--model-seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    model_dir, model_seed = arguments.pop("model"), arguments.pop("model_seed")
    settings = replace(Settings(), **arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        model_dir = model_dir or Path(scratch) / "model"
        build(model_dir, Recipe(seed=model_seed))
        started = time.process_time()
        report = learn(model_dir, settings)
        report["cpu_seconds"] = round(time.process_time() - started, 1)
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()

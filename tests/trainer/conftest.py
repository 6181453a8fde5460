"""A tiny real model, rows for it, and verl's worker on a CPU (built once per distinct use)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnfold.schemas.run import RunConfig
from turnfold.schemas.testing import row
from turnfold.schemas.trajectories import Row

os.environ.setdefault("OMP_NUM_THREADS", "1")

VOCAB = 96


@pytest.fixture(scope="session", autouse=True)
def _composed_once() -> Iterator[None]:
    """Compose each configuration once: hydra takes a second for what no test changes."""
    from turnfold.trainer import config

    compose, found = config.compose, {}

    def cached(overrides: Sequence[str], run: RunConfig, **options: Any) -> Any:
        key = (tuple(overrides), run, tuple(sorted(options.items())))
        if key not in found:
            found[key] = compose(overrides, run, **options)
        return found[key]

    config.compose = cached
    yield
    config.compose = compose


@pytest.fixture(scope="session")
def run_config() -> RunConfig:
    return RunConfig(run_id="t", group_size=4, groups_per_batch=8, max_row_tokens=48)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with two layers and a word-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    torch.set_num_threads(1)
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    directory = tmp_path_factory.mktemp("tiny-model")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def verl_on_cpu() -> None:
    """verl imported with our CPU platform."""
    from turnfold.trainer.backends import environment

    assert environment.prepare("cpu") is False


@pytest.fixture(scope="session")
def make_backend(
    verl_on_cpu: None, tiny_model: Path, run_config: RunConfig
) -> Callable[..., tuple[Any, Any]]:
    """Build a backend and its schedule with overrides; plain SGD, so that a step is a gradient."""
    from turnfold.trainer import config
    from turnfold.trainer.backend import TrainerBackend

    sgd = [
        "actor_rollout_ref.actor.optim.optimizer=SGD",
        "actor_rollout_ref.actor.optim.lr=1.0",
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
        "actor_rollout_ref.actor.optim.clip_grad=1e9",
    ]
    adamw = [
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.optim.weight_decay=0.01",
    ]

    def make(*overrides: str, optimizer: str = "SGD") -> tuple[Any, Any]:
        budget = [
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=2048",
        ]
        chosen = [*budget, *(sgd if optimizer == "SGD" else adamw), *overrides]
        composed = config.compose(chosen, run_config, model=str(tiny_model))
        return TrainerBackend(composed), config.check(composed, run_config)

    return make


@pytest.fixture(scope="session")
def random_row() -> Callable[..., Row]:
    """A row of a two-turn rollout: prompt, output, a masked observation, output."""

    def make(rng: np.random.Generator, *, length: int | None = None) -> Row:
        n = length or int(rng.integers(14, 30))
        ids = rng.integers(3, VOCAB, n).tolist()
        mask = [0] * 4 + [1] * (n - 4)
        mask[7:9] = [0, 0]
        return row(ids, mask, (-4.5 * np.array(mask)).tolist())

    return make

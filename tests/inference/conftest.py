"""A model with random weights, and a second one that its weights can be swapped for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from turnfold.embedded.inference.engine import Engine
from turnfold.embedded.inference.model import SlotModel
from turnfold.embedded.inference.sequences import StopRules
from turnfold.embedded.tiny.build import build
from turnfold.embedded.tiny.recipe import Recipe


def random_model(directory: Path, seed: int) -> Path:
    """The tiny model without any training: enough for everything but learning."""
    build(directory, Recipe(seed=seed, num_learn_steps=0, max_weaken_steps=0))
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "first", seed=0)


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "second", seed=1)


@pytest.fixture(scope="session")
def plain_model(model_dir: Path) -> Any:
    return _load(model_dir)


@pytest.fixture(scope="session")
def other_plain_model(other_model_dir: Path) -> Any:
    return _load(other_model_dir)


@pytest.fixture
def engine(model_dir: Path) -> Iterator[Engine]:
    model = SlotModel(model_dir, num_slots=5, max_len=256)
    with Engine(model, StopRules()) as engine:
        yield engine


def _load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

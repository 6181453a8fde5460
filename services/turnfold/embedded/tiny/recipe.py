"""Everything that decides what the tiny model becomes."""

import hashlib
from dataclasses import dataclass

import msgspec

from turnfold.embedded.tiny import task
from turnfold.embedded.tiny.tokenizer import VOCAB_SIZE, chat_template, corpus


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Size, initialisation and warm-up of the tiny model.

    The warm-up first teaches the task (`num_learn_steps` on right answers: format, and the circuit
    that copies a number from the context), then makes the model doubt (right answers in
    `right_share` of the examples only, until it gives the right number `weak_probability` of the
    time). What is left is a model that knows the format and is mostly wrong, whose mean reward RL
    can raise in few steps.
    """

    revision: int = 1
    """Raised when the code of the warm-up changes, so that models of the old code are rebuilt."""
    seed: int = 0
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_len: int = 2048
    initializer_range: float = 0.1
    """Five times the usual: a small model finds the copying circuit in a fraction of the steps."""
    num_learn_steps: int = 150
    max_weaken_steps: int = 80
    conversations_per_step: int = 16
    learn_rate: float = 4e-3
    weaken_rate: float = 1e-3
    number_weight: float = 4.0
    """Weight of the digits in the loss: they are what is hard, and few of the tokens."""
    odd_call_share: float = 0.2
    """Calls written as the template would not: without spaces, or with their keys reversed."""
    right_share: float = 0.25
    weak_probability: float = 0.33


def digest(recipe: Recipe) -> str:
    """Hex digest over the recipe and over the texts and schemas that it is applied to."""
    ingredients = (recipe, VOCAB_SIZE, chat_template(), corpus(), task.TOOLS)
    return hashlib.sha256(msgspec.json.encode(ingredients)).hexdigest()

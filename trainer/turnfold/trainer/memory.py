"""About how much memory an update takes on each rank, before a model is built. Pure.

An estimate of what is there whatever the kernels do: parameters, gradients, the optimizer's moments,
activations and logits of the fullest micro-batch. Allocators and buffers of communication come on
top; leave a tenth of the device for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnfold.schemas.wire import Wire

GIB = 1 << 30


class Shape(Wire, frozen=True, kw_only=True):
    """What a model needs memory for."""

    num_parameters: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int


class Memory(Wire, frozen=True, kw_only=True):
    """Bytes on one rank."""

    parameters: int
    """Of the policy, and of a reference policy, in float32, sharded."""
    gradients: int
    optimizer: int
    """AdamW's two moments; none for SGD without momentum."""
    activations: int
    """Of one micro-batch, kept for the backward pass."""
    logits: int
    """Of one micro-batch: float32 logits, their log-softmax and its gradient."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits


def shape(config: Mapping[str, Any], num_parameters: int) -> Shape:
    """From the model's config.json; the text part of a model with several."""
    text = config.get("text_config", config)
    hidden = int(text["hidden_size"])
    return Shape(
        num_parameters=num_parameters,
        hidden_size=hidden,
        intermediate_size=int(text.get("intermediate_size") or 4 * hidden),
        num_layers=int(text["num_hidden_layers"]),
        vocab_size=int(text["vocab_size"]),
    )


def estimate(
    model: Shape,
    *,
    micro_batch_tokens: int,
    num_ranks: int,
    activation_bytes: int,
    has_moments: bool = True,
    is_checkpointed: bool = True,
    has_reference: bool = False,
) -> Memory:
    """Memory of a rank whose fullest micro-batch has `micro_batch_tokens` tokens.

    With gradient checkpointing a token leaves its hidden state at every layer and all of one layer;
    without, all of every layer: about 10 hidden states and 3 of the MLP.
    """
    sharded = model.num_parameters * 4 // num_ranks
    layer = (10 * model.hidden_size + 3 * model.intermediate_size) * activation_bytes
    per_token = (
        model.num_layers * model.hidden_size * activation_bytes + layer
        if is_checkpointed
        else model.num_layers * layer
    )
    return Memory(
        parameters=sharded * (2 if has_reference else 1),
        gradients=sharded,
        optimizer=2 * sharded if has_moments else 0,
        activations=per_token * micro_batch_tokens,
        logits=3 * 4 * model.vocab_size * micro_batch_tokens,
    )

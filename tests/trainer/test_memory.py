from __future__ import annotations

from typing import Any

from turnfold.trainer.memory import Memory, Shape, estimate, shape

SMALL = Shape(
    num_parameters=1000, hidden_size=8, intermediate_size=16, num_layers=4, vocab_size=100
)


def of_small(**changes: Any) -> Memory:
    chosen = {"micro_batch_tokens": 10, "num_ranks": 1, "activation_bytes": 2, **changes}
    return estimate(SMALL, **chosen)


def test_sixteen_bytes_a_parameter_are_shared_by_the_ranks_and_tokens_are_not() -> None:
    one, two = of_small(), of_small(num_ranks=2)
    assert one.parameters + one.gradients + one.optimizer == 16_000
    assert two.parameters + two.gradients + two.optimizer == 8_000
    assert two.activations == one.activations
    assert one.logits == 3 * 4 * 100 * 10
    assert one.total == 16_000 + one.activations + one.logits


def test_a_reference_policy_adds_parameters_and_sgd_has_no_moments() -> None:
    assert of_small(has_reference=True).parameters == 8_000
    assert of_small(has_moments=False).optimizer == 0


def test_gradient_checkpointing_keeps_one_layer_and_a_hidden_state_of_each() -> None:
    layer = (10 * 8 + 3 * 16) * 2
    assert of_small().activations == 10 * (4 * 8 * 2 + layer)
    assert of_small(is_checkpointed=False).activations == 10 * 4 * layer


def test_a_model_with_several_parts_is_measured_by_its_text_part() -> None:
    text = {"hidden_size": 8, "num_hidden_layers": 4, "vocab_size": 100}
    assert shape({"text_config": text | {"intermediate_size": 16}}, 1000) == SMALL
    assert shape(text, 1000).intermediate_size == 32

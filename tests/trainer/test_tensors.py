from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from turnfold.schemas.testing import row
from turnfold.schemas.trajectories import TurnSpan
from turnfold.trainer.plan import PlanError, Schedule
from turnfold.trainer.rows import TrainRow

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("verl_on_cpu")]


def lists(data: Any, name: str) -> list[list[float]]:
    return [part.tolist() for part in data[name].unbind()]


def test_a_row_is_cut_into_prompt_and_response_with_everything_aligned() -> None:
    from turnfold.trainer.tensors import to_verl

    made = row([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, -0.5, -0.75])
    turns = (TurnSpan(turn_id="t0", start=2, end=4, is_trained=False),)
    made = msgspec.structs.replace(made, turns=(*turns, *made.turns))
    data = to_verl([TrainRow("r", "g", made, 2.0), None], temperature=1.0, pad_token_id=7)
    assert lists(data, "prompts") == [[1, 2], [7]]
    assert lists(data, "responses") == [[3, 4, 5, 6], [7]]
    assert lists(data, "input_ids") == [[1, 2, 3, 4, 5, 6], [7, 7]]
    assert lists(data, "position_ids") == [[0, 1, 2, 3, 4, 5], [0, 1]]
    assert lists(data, "response_mask") == [[0, 0, 1, 1], [0]]
    assert lists(data, "loss_mask") == [[0, 0, 1, 1], [0]]
    assert lists(data, "rollout_log_probs") == [[0, 0, -0.5, -0.75], [0]]
    assert lists(data, "advantages") == [[0, 0, 2, 2], [0]]


def test_what_process_rewards_add_reaches_the_tokens_of_their_turn_alone() -> None:
    from turnfold.trainer.tensors import to_verl

    turns = tuple(
        TurnSpan(turn_id=f"t{i}", start=a, end=b) for i, (a, b) in enumerate([(1, 3), (4, 5)])
    )
    made = msgspec.structs.replace(row([1, 2, 3, 4, 5], [0, 1, 1, 0, 1]), turns=turns)
    train_row = TrainRow("r", "g", made, 2.0, by_turn={"t1": -0.5})
    data = to_verl([train_row, None], temperature=1.0, pad_token_id=0)
    assert lists(data, "advantages") == [[2, 2, 0, 1.5], [0]]


def test_an_update_carries_the_number_of_mini_batches_and_never_their_size() -> None:
    from verl.utils import tensordict_utils as tu

    from turnfold.trainer.tensors import for_update, to_verl

    rows = [TrainRow("r", "g", row([1, 2, 3], [0, 1, 1]), 1.0)] * 4
    data = to_verl(rows, temperature=0.5, pad_token_id=0)
    schedule = Schedule(
        num_mini_batches=2, num_epochs=3, rollouts_per_mini_batch=8, max_row_tokens=9
    )
    request = for_update(data, schedule, seed=1, is_entropy_wanted=False)
    assert tu.get(request, "num_mini_batch") == 2
    assert tu.get(request, "epochs") == 3
    assert tu.get(request, "global_batch_size") == 8
    assert tu.get(request, "temperature") == 0.5
    assert "mini_batch_size" not in request
    three = to_verl(rows[:3], temperature=0.5, pad_token_id=0)
    with pytest.raises(PlanError, match="3 rows do not divide into 2 mini-batches"):
        for_update(three, schedule, seed=1, is_entropy_wanted=False)


def test_rejected_tokens_leave_the_mask_and_a_batch_of_padding_passes() -> None:
    import torch
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    from turnfold.trainer.tensors import compared, correct_for_sampling, to_verl

    near, far = row([1, 2, 3], [0, 1, 1], [0, -1, -1]), row([1, 2, 3], [0, 1, 1], [0, -1, -9])
    rows = [TrainRow("a", "g", near, 1.0), TrainRow("b", "g", far, 1.0)]
    data = to_verl(rows, temperature=1.0, pad_token_id=0)
    data["old_log_probs"] = torch.nested.as_nested_tensor(
        [torch.full((2,), -1.0)] * 2, layout=torch.jagged
    )
    correction = RolloutCorrectionConfig(
        rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0"
    )
    rollouts = {0: ["a", "b"]}
    metrics = correct_for_sampling(data, {0: compared(data)}, rollouts, 0, correction)
    assert lists(data, "response_mask") == lists(data, "loss_mask") == [[1, 1], [1, 0]]
    assert lists(data, "rollout_is_weights")[0] == [1.0, 1.0]
    assert metrics["rollout_corr/k3_kl"] > 0
    empty = to_verl([None, None], temperature=1.0, pad_token_id=0)
    empty["old_log_probs"] = empty["rollout_log_probs"]
    rollouts = {0: ["", ""]}
    assert correct_for_sampling(empty, {0: compared(empty)}, rollouts, 0, correction) == {}


def corrected(rows: list[TrainRow | None], correction: Any) -> dict[str, list[list[float]]]:
    """Masks and weights of rows on two ranks, as each rank finds them for its own half."""
    import torch

    from turnfold.trainer.tensors import compared, correct_for_sampling, to_verl

    half = len(rows) // 2
    parts = {0: rows[:half], 1: rows[half:]}
    tensors = {r: to_verl(part, temperature=1.0, pad_token_id=0) for r, part in parts.items()}
    for data in tensors.values():
        data["old_log_probs"] = torch.nested.as_nested_tensor(
            [torch.full_like(t, -1.0) for t in data["rollout_log_probs"].unbind()],
            layout=torch.jagged,
        )
    everything = {r: compared(data) for r, data in tensors.items()}
    names = {r: ["" if x is None else x.rollout_id for x in part] for r, part in parts.items()}
    found: dict[str, list[list[float]]] = {"response_mask": [], "rollout_is_weights": []}
    for r, data in tensors.items():
        correct_for_sampling(data, everything, names, r, correction)
        for name in found:
            found[name] += lists(data, name)
    return found


def test_a_correction_per_sequence_takes_a_rollout_for_one_however_many_rows_it_has() -> None:
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    # Rollout a is e^0.5 likelier than when it was sampled, by two of its tokens in different rows,
    # on different ranks; rollout b is as likely as it was.
    a1 = TrainRow("a", "g", row([1, 2, 3], [0, 1, 1], [0, -1.25, -1]))
    a2 = TrainRow("a", "g", row([1, 2, 9, 8], [0, 0, 0, 1], [0, 0, 0, -1.25]))
    b = TrainRow("b", "g", row([1, 5], [0, 1], [0, -1]))
    correction = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=9.0)
    weights = corrected([a1, b, a2, None], correction)["rollout_is_weights"]
    likelier = pytest.approx(math.exp(0.5))
    assert [w[-1] for w in weights[:3]] == [likelier, pytest.approx(1.0), likelier]

    strict = RolloutCorrectionConfig(
        rollout_is="token", rollout_rs="seq_sum_k1", rollout_rs_threshold="0.7_1.4"
    )
    # e^0.25 of each row alone would pass; the rollout is rejected whole.
    assert corrected([a1, b, a2, None], strict)["response_mask"] == [[0, 0], [1], [0], [0]]

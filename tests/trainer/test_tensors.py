from __future__ import annotations

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
    metrics = correct_for_sampling(data, {0: compared(data)}, 0, correction)
    assert lists(data, "response_mask") == lists(data, "loss_mask") == [[1, 1], [1, 0]]
    assert lists(data, "rollout_is_weights")[0] == [1.0, 1.0]
    assert metrics["rollout_corr/k3_kl"] > 0
    empty = to_verl([None, None], temperature=1.0, pad_token_id=0)
    empty["old_log_probs"] = empty["rollout_log_probs"]
    assert correct_for_sampling(empty, {0: compared(empty)}, 0, correction) == {}

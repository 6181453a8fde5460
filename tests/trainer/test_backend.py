from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from turnfold.schemas.trajectories import Row
from turnfold.schemas.wire import Logprobs, LossMask
from turnfold.trainer.plan import PlanError, plan
from turnfold.trainer.rows import TrainRow

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("verl_on_cpu")]

Make = Callable[..., tuple[Any, Any]]
TWO_GROUPS = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
"""8 groups a batch in mini-batches of 2: 4 optimizer steps."""


@pytest.fixture(scope="module")
def batch(make_backend: Make, random_row: Callable[..., Row]) -> list[TrainRow]:
    """8 groups of 4 rollouts of one row; logprobs are those of the initial policy, with noise."""
    rng = np.random.default_rng(1)
    rows = [
        TrainRow(f"r{g}-{i}", f"g{g}", random_row(rng), float(rng.normal()))
        for g in range(8)
        for i in range(4)
    ]
    backend, _ = make_backend()
    return [
        with_logprobs(row, logprobs + 0.05 * rng.normal(size=len(logprobs)))
        for row, logprobs in zip(rows, map(np.array, backend.logprobs(rows)), strict=True)
    ]


def with_logprobs(row: TrainRow, response: np.ndarray[Any, Any]) -> TrainRow:
    """The row with these sampling logprobs after its prompt."""
    logprobs = np.concatenate([np.zeros(row.num_prompt), response]) * row.row.loss_mask.array
    inner = msgspec.structs.replace(row.row, logprobs=Logprobs.of(logprobs.astype(np.float32)))
    return TrainRow(row.rollout_id, row.group_id, inner, row.advantage)


def parameters(backend: Any) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in backend.weights()}


def step(
    make_backend: Make, rows: Sequence[TrainRow], *overrides: str, **options: Any
) -> tuple[dict[str, Any], dict[str, float]]:
    """What one update moved the parameters by, and its metrics."""
    backend, schedule = make_backend(*overrides, **options)
    before = parameters(backend)
    metrics = backend.update(rows, plan([row.size for row in rows], schedule))
    return {name: after - before[name] for name, after in parameters(backend).items()}, metrics


def assert_same(a: dict[str, Any], b: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Equal within `tolerance` of the largest entry, over all parameters."""
    assert a.keys() == b.keys()
    scale = max(float(tensor.abs().max()) for tensor in a.values())
    assert scale > 0
    assert max(float((a[name] - b[name]).abs().max()) for name in a) <= tolerance * scale


@pytest.mark.parametrize("num_rows", [32, 96, 37])
def test_any_number_of_rows_takes_the_same_optimizer_steps(
    make_backend: Make, batch: list[TrainRow], num_rows: int
) -> None:
    rows = [batch[i % 32] for i in range(num_rows)]
    _, metrics = step(make_backend, rows, TWO_GROUPS)
    assert metrics["actor/optimizer_steps"] == 4


def test_epochs_multiply_the_steps(make_backend: Make, batch: list[TrainRow]) -> None:
    _, metrics = step(make_backend, batch, TWO_GROUPS, "actor_rollout_ref.actor.ppo_epochs=2")
    assert metrics["actor/optimizer_steps"] == 8


def test_splitting_a_rollout_into_three_rows_leaves_the_gradient_unchanged(
    make_backend: Make, batch: list[TrainRow]
) -> None:
    whole, _ = step(make_backend, batch)
    parts = [part for row in batch for part in split(row, 3)]
    assert len(parts) == 96
    assert_same(whole, step(make_backend, parts)[0])


def split(row: TrainRow, count: int) -> list[TrainRow]:
    """Rows that train every count-th trained token each, cut after their last one."""
    trained = np.flatnonzero(row.row.loss_mask.array)
    rows = []
    for first in range(count):
        mask = np.zeros(len(row.row.token_ids), dtype=np.uint8)
        mask[trained[first::count]] = 1
        end = int(trained[first::count][-1]) + 1
        inner = msgspec.structs.replace(
            row.row,
            token_ids=row.row.token_ids[:end],
            loss_mask=LossMask.of(mask[:end]),
            logprobs=Logprobs.of(row.row.logprobs.array[:end] * mask[:end]),
            turns=(),
        )
        rows.append(TrainRow(row.rollout_id, row.group_id, inner, row.advantage))
    return rows


def test_padding_changes_nothing(make_backend: Make, batch: list[TrainRow]) -> None:
    backend, schedule = make_backend()
    rows = batch[:31]
    planned = plan([row.size for row in rows], schedule)
    padded = msgspec.structs.replace(planned, order=(*planned.order, None, None, None))
    before = parameters(backend)
    backend.update(rows, padded)
    moved = {name: after - before[name] for name, after in parameters(backend).items()}
    assert_same(step(make_backend, rows)[0], moved)


def test_one_step_equals_a_ppo_loss_written_by_hand(
    make_backend: Make, batch: list[TrainRow], tiny_model: Path
) -> None:
    # Bypass: the ratio is against the sampling logprobs, so that it is not 1 and clipping acts.
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    moved, metrics = step(
        make_backend, batch, bypass, "actor_rollout_ref.actor.clip_ratio_low=0.05"
    )
    assert metrics["actor/pg_clipfrac"] > 0
    expected = gradient_by_hand(tiny_model, batch, clip_low=0.05, clip_high=0.2)
    shared = {name: -expected[name] for name in moved}
    assert_same(shared, moved)


def gradient_by_hand(
    model: Path, rows: Sequence[TrainRow], clip_low: float, clip_high: float
) -> dict[str, Any]:
    """Gradient of sum over tokens of max(-A r, -A clip(r)), dual-clipped at 3, / rollouts."""
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total = torch.zeros(())
    for row in rows:
        ids_1T = torch.tensor([row.row.token_ids.tolist()])
        mask_T = torch.tensor(row.row.loss_mask.tolist()[1:]).float()
        old_T = torch.tensor(row.row.logprobs.tolist()[1:])
        logits_TV = policy(ids_1T).logits[0, :-1]
        new_T = torch.log_softmax(logits_TV, -1).gather(1, ids_1T[0, 1:, None])[:, 0]
        ratio_T = torch.where(mask_T > 0, new_T - old_T, 0.0).exp()
        a = row.advantage
        loss_T = torch.maximum(-a * ratio_T, -a * ratio_T.clamp(1 - clip_low, 1 + clip_high))
        if a < 0:
            loss_T = torch.minimum(loss_T, torch.tensor(-a * 3.0))
        total = total + (loss_T * mask_T).sum()
    (total / len(rows)).backward()
    return {name: p.grad for name, p in policy.named_parameters()}


def test_the_loss_divisor_is_configured_and_not_counted(
    make_backend: Make, batch: list[TrainRow]
) -> None:
    once, _ = step(make_backend, batch)
    twice, _ = step(make_backend, [*batch, *copy.copy(batch)])
    assert_same({name: 2 * tensor for name, tensor in once.items()}, twice)


def test_small_micro_batches_accumulate_to_the_same_gradient(
    make_backend: Make, batch: list[TrainRow]
) -> None:
    whole, _ = step(make_backend, batch)
    small, _ = step(make_backend, batch, *budget_of(128))
    assert_same(whole, small)


def budget_of(num_tokens: int) -> list[str]:
    return [
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={num_tokens}",
        f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={num_tokens}",
    ]


def test_advantage_zero_moves_nothing(make_backend: Make, batch: list[TrainRow]) -> None:
    rows = [TrainRow(row.rollout_id, row.group_id, row.row, 0.0) for row in batch]
    moved, metrics = step(make_backend, rows)
    assert metrics["actor/optimizer_steps"] == 1
    assert max(float(tensor.abs().max()) for tensor in moved.values()) == 0.0


def test_token_weights_correct_for_the_policy_that_sampled(
    make_backend: Make, batch: list[TrainRow]
) -> None:
    rows = [with_logprobs(row, row.row.logprobs.array[row.num_prompt :] - 0.5) for row in batch]
    plain, without = step(make_backend, rows, "algorithm.rollout_correction.rollout_is=null")
    weighted, metrics = step(make_backend, rows)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(np.exp(0.5), rel=0.02)
    assert metrics["rollout_corr/kl"] == pytest.approx(-0.5, rel=0.05)
    assert "rollout_corr/rollout_is_mean" not in without
    scale = max(float(t.abs().max()) for t in plain.values())
    assert max(float((plain[n] - weighted[n]).abs().max()) for n in plain) > 0.3 * scale


def test_a_gradient_that_is_not_finite_is_counted_and_skips_its_step_alone(
    make_backend: Make, batch: list[TrainRow], caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        TrainRow(row.rollout_id, row.group_id, row.row, float("inf") if i == 0 else row.advantage)
        for i, row in enumerate(batch)
    ]
    moved, metrics = step(make_backend, rows, TWO_GROUPS)
    assert metrics["actor/optimizer_steps"] == 3
    assert metrics["actor/nonfinite_grad_steps"] == 1
    assert "1 of 4 steps skipped: gradient not finite" in caplog.text
    assert all(bool(tensor.isfinite().all()) for tensor in moved.values())


def test_rows_that_were_not_padded_are_refused_before_verl_sees_them(
    make_backend: Make, batch: list[TrainRow]
) -> None:
    backend, schedule = make_backend(TWO_GROUPS)
    planned = plan([row.size for row in batch[:3]], schedule)
    short = msgspec.structs.replace(planned, order=planned.order[:3])
    with pytest.raises(PlanError, match="3 rows do not divide into 4 mini-batches"):
        backend.update(batch[:3], short)


def test_an_update_after_loading_equals_the_one_that_was_not_interrupted(
    make_backend: Make, batch: list[TrainRow], tmp_path: Path
) -> None:
    backend, schedule = make_backend(TWO_GROUPS, optimizer="AdamW")
    planned = plan([row.size for row in batch], schedule)
    backend.update(batch, planned)
    backend.save(tmp_path / "checkpoint")
    backend.update(batch, planned)
    undisturbed = parameters(backend)

    fresh, _ = make_backend(TWO_GROUPS, optimizer="AdamW")
    fresh.load(tmp_path / "checkpoint")
    fresh.update(batch, planned)
    resumed = parameters(fresh)
    assert all(bool((undisturbed[name] == resumed[name]).all()) for name in undisturbed)


@pytest.mark.field_case("SkyRL#872")
def test_the_learning_rate_moves_by_batches_whatever_their_number_of_steps(
    make_backend: Make, batch: list[TrainRow]
) -> None:
    warm_up = ("actor_rollout_ref.actor.optim.lr_warmup_steps=4",)
    rates: list[list[float]] = []
    for overrides in (warm_up, (*warm_up, TWO_GROUPS)):
        backend, schedule = make_backend(*overrides)
        planned = plan([row.size for row in batch], schedule)
        rates.append([])
        for _ in range(3):
            rates[-1].append(backend._engine.optimizer.param_groups[0]["lr"])
            backend.update(batch, planned)
    assert rates[0] == rates[1] == [0.0, 0.25, 0.5]

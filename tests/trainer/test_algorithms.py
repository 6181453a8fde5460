"""Algorithms by verl's configuration: a step moves the parameters as the formula says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from turnfold.schemas.trajectories import Row
from turnfold.schemas.wire import Logprobs
from turnfold.trainer.advantages import Score, rollout_advantages
from turnfold.trainer.plan import plan
from turnfold.trainer.rows import TrainRow

pytestmark = [pytest.mark.verl, pytest.mark.usefixtures("verl_on_cpu")]

Make = Callable[..., tuple[Any, Any]]
Loss = Callable[[Any, Any, float], Any]
"""(logprobs, sampling logprobs, advantage) of the trained tokens of a row -> its loss."""

ACTOR = "actor_rollout_ref.actor"
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
"""Ratios are against the sampling logprobs, so that they are not 1 and clipping acts."""


@pytest.fixture(scope="module")
def batch(make_backend: Make, random_row: Callable[..., Row]) -> list[TrainRow]:
    """8 groups of 4 rollouts of one row, sampled by a policy a little off the initial one."""
    rng = np.random.default_rng(1)
    rows = [
        TrainRow(f"r{g}-{i}", f"g{g}", random_row(rng), float(rng.normal()))
        for g in range(8)
        for i in range(4)
    ]
    backend, _ = make_backend()
    made = []
    for row, found in zip(rows, backend.logprobs(rows), strict=True):
        inner = with_logprobs(row, np.array(found) + 0.3 * rng.normal(size=len(found)))
        made.append(TrainRow(row.rollout_id, row.group_id, inner, row.advantage))
    return made


def with_logprobs(row: TrainRow, response: np.ndarray[Any, Any]) -> Row:
    """The row with these sampling logprobs after its prompt."""
    logprobs = np.concatenate([np.zeros(row.num_prompt), response]) * row.row.loss_mask.array
    return msgspec.structs.replace(row.row, logprobs=Logprobs.of(logprobs.astype(np.float32)))


def parameters(backend: Any) -> dict[str, Any]:
    return {name: tensor.detach().clone() for name, tensor in backend.weights()}


def step(
    make_backend: Make, rows: Sequence[TrainRow], *overrides: str
) -> tuple[dict[str, Any], dict[str, float]]:
    """What one SGD step of rate 1 moved the parameters by, and its metrics."""
    backend, schedule = make_backend(*overrides)
    before = parameters(backend)
    metrics = backend.update(rows, plan([row.size for row in rows], schedule))
    return {name: after - before[name] for name, after in parameters(backend).items()}, metrics


def assert_moved_against(
    model: Path,
    rows: Sequence[TrainRow],
    loss: Loss,
    moved: dict[str, Any],
    *,
    rate: float = 1.0,
    entropy_coeff: float = 0.0,
    start: dict[str, Any] | None = None,
) -> None:
    """The parameters moved by minus `rate` times the gradient of sum(loss of row) / rollouts,
    written by hand; from `start`, the parameters of `model` without it.
    """
    expected = gradient(model, rows, loss, entropy_coeff=entropy_coeff, start=start)
    scale = rate * max(float(tensor.abs().max()) for tensor in expected.values())
    assert scale > 0
    worst = max(float((moved[n] + rate * expected[n]).abs().max()) for n in moved)
    assert worst <= 1e-5 * scale


def gradient(
    model: Path,
    rows: Sequence[TrainRow],
    loss: Loss,
    *,
    entropy_coeff: float = 0.0,
    start: dict[str, Any] | None = None,
) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy.load_state_dict(start or {}, strict=False)
    total = torch.zeros(())
    for row in rows:
        ids_1T = torch.tensor([row.row.token_ids.tolist()])
        is_trained_T = torch.tensor(row.row.loss_mask.tolist()[1:]) == 1
        old_T = torch.tensor(row.row.logprobs.tolist()[1:])
        every_TV = torch.log_softmax(policy(ids_1T).logits[0, :-1], -1)
        new_T = every_TV.gather(1, ids_1T[0, 1:, None])[:, 0]
        total = total + loss(new_T[is_trained_T], old_T[is_trained_T], row.advantage)
        entropy_T = -(every_TV.exp() * every_TV).sum(-1)
        total = total - entropy_coeff * entropy_T[is_trained_T].sum()
    (total / len(rows)).backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def clipped(new_T: Any, old_T: Any, a: float, low: float = 0.2, high: float = 0.2) -> Any:
    """PPO's clipped loss, dual-clipped at 3 for a negative advantage."""
    import torch

    ratio_T = (new_T - old_T).exp()
    loss_T = torch.maximum(-a * ratio_T, -a * ratio_T.clamp(1 - low, 1 + high))
    return loss_T.clamp(max=-a * 3.0) if a < 0 else loss_T


def vanilla(new_T: Any, old_T: Any, a: float) -> Any:
    return clipped(new_T, old_T, a).sum()


def clip_higher(new_T: Any, old_T: Any, a: float) -> Any:
    return clipped(new_T, old_T, a, low=0.1, high=0.4).sum()


def gspo(new_T: Any, old_T: Any, a: float) -> Any:
    """The ratio of the row, the geometric mean of those of its tokens, at each token."""
    import torch

    row_ratio = (new_T - old_T).mean().detach()
    ratio_T = (new_T - new_T.detach() + row_ratio).exp()
    return torch.maximum(-a * ratio_T, -a * ratio_T.clamp(1 - 0.02, 1 + 0.02)).sum()


def cispo(new_T: Any, old_T: Any, a: float) -> Any:
    """REINFORCE weighted by the clipped ratio, through which no gradient flows."""
    weight_T = (new_T - old_T).exp().clamp(1 - 0.2, 1 + 0.2).detach()
    return (-a * weight_T * new_T).sum()


@pytest.mark.parametrize(
    ("overrides", "loss"),
    [
        ((), vanilla),
        ((f"{ACTOR}.clip_ratio_low=0.1", f"{ACTOR}.clip_ratio_high=0.4"), clip_higher),
        (
            (
                f"{ACTOR}.policy_loss.loss_mode=gspo",
                f"{ACTOR}.clip_ratio_low=0.02",
                f"{ACTOR}.clip_ratio_high=0.02",
            ),
            gspo,
        ),
        ((f"{ACTOR}.policy_loss.loss_mode=cispo",), cispo),
    ],
    ids=["vanilla", "clip-higher", "gspo", "cispo"],
)
def test_a_policy_loss_moves_the_parameters_as_its_formula_says(
    make_backend: Make,
    batch: list[TrainRow],
    tiny_model: Path,
    overrides: tuple[str, ...],
    loss: Loss,
) -> None:
    moved, metrics = step(make_backend, batch, BYPASS, *overrides)
    assert metrics["actor/pg_clipfrac"] > 0
    assert_moved_against(tiny_model, batch, loss, moved)


def by_group(rewards_GN: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Advantages of groups of N rollouts as the papers have them."""
    mean_G1 = rewards_GN.mean(1, keepdims=True)
    others_GN = (rewards_GN.sum(1, keepdims=True) - rewards_GN) / (rewards_GN.shape[1] - 1)
    return {
        "grpo": (rewards_GN - mean_G1) / (rewards_GN.std(1, ddof=1, keepdims=True) + 1e-6),
        "dr. grpo": rewards_GN - mean_G1,
        "rloo": rewards_GN - others_GN,
        "reinforce++": (rewards_GN - rewards_GN.mean()) / rewards_GN.std(ddof=1),
    }


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("grpo", ()),
        ("dr. grpo", ("algorithm.norm_adv_by_std_in_grpo=false",)),
        ("rloo", ("algorithm.adv_estimator=rloo",)),
        ("reinforce++", ("algorithm.adv_estimator=reinforce_plus_plus",)),
    ],
)
def test_an_estimator_moves_the_parameters_by_the_advantages_of_its_formula(
    make_backend: Make,
    batch: list[TrainRow],
    tiny_model: Path,
    name: str,
    overrides: tuple[str, ...],
) -> None:
    rewards_GN = np.random.default_rng(2).integers(0, 5, (8, 4)).astype(float)
    rewards_GN[0] = [0, 1, 2, 3]
    expected = by_group(rewards_GN)[name].ravel()
    backend, schedule = make_backend(BYPASS, *overrides)
    algorithm = backend.config.algorithm
    scores = [
        Score(rollout_id=r.rollout_id, group_id=r.group_id, reward=float(reward), num_trained=5)
        for r, reward in zip(batch, rewards_GN.ravel(), strict=True)
    ]
    found = rollout_advantages(scores, algorithm.adv_estimator, algorithm)
    rows = [TrainRow(r.rollout_id, r.group_id, r.row, found[r.rollout_id]) for r in batch]
    before = parameters(backend)
    backend.update(rows, plan([row.size for row in rows], schedule))
    moved = {name: after - before[name] for name, after in parameters(backend).items()}
    by_hand = [
        TrainRow(r.rollout_id, r.group_id, r.row, a) for r, a in zip(batch, expected, strict=True)
    ]
    assert_moved_against(tiny_model, by_hand, vanilla, moved)


def test_an_entropy_bonus_moves_the_policy_up_the_gradient_of_its_entropy(
    make_backend: Make, batch: list[TrainRow], tiny_model: Path
) -> None:
    bonus = (f"{ACTOR}.entropy_coeff=0.1", f"{ACTOR}.optim.lr=0.5")
    moved, metrics = step(make_backend, batch, BYPASS, *bonus)
    assert metrics["actor/entropy_loss"] > 0
    assert_moved_against(tiny_model, batch, vanilla, moved, rate=0.5, entropy_coeff=0.1)


def test_a_kl_term_moves_a_policy_that_left_by_the_gradient_of_its_distance(
    make_backend: Make, batch: list[TrainRow], tiny_model: Path
) -> None:
    kl = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.5", f"{ACTOR}.kl_loss_type=k3")
    backend, schedule = make_backend(*kl, f"{ACTOR}.optim.lr=0.3")
    planned = plan([row.size for row in batch], schedule)
    reference = backend.logprobs(batch)
    backend.update(batch, planned)
    left = parameters(backend)
    # Without an advantage only the distance moves it; the reference takes the place of `old`.
    silent = [
        TrainRow(row.rollout_id, row.group_id, with_logprobs(row, np.array(found)), 0.0)
        for row, found in zip(batch, reference, strict=True)
    ]
    backend.update(silent, planned)
    moved = {name: after - left[name] for name, after in parameters(backend).items()}
    assert_moved_against(tiny_model, silent, k3_distance, moved, rate=0.3, start=left)


def k3_distance(new_T: Any, reference_T: Any, a: float) -> Any:
    """Half of Schulman's third estimate of the KL from the policy to the reference."""
    del a
    return 0.5 * ((reference_T - new_T).exp() - (reference_T - new_T) - 1).sum()


def test_a_reference_policy_pulls_back_a_policy_that_left_it(
    make_backend: Make, batch: list[TrainRow], tiny_model: Path
) -> None:
    silent = [TrainRow(row.rollout_id, row.group_id, row.row, 0.0) for row in batch]
    kl = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=1.0", f"{ACTOR}.kl_loss_type=k3")
    backend, schedule = make_backend(*kl, f"{ACTOR}.optim.lr=0.02")
    planned = plan([row.size for row in batch], schedule)
    start = parameters(backend)
    at_home = backend.update(silent, planned)
    assert at_home["actor/kl_loss"] == pytest.approx(0.0, abs=1e-5)
    moved = parameters(backend)
    assert max(float((moved[n] - start[n]).abs().max()) for n in start) < 1e-6

    backend.update(batch, planned)
    away = backend.update(silent, planned)["actor/kl_loss"]
    back = backend.update(silent, planned)["actor/kl_loss"]
    assert away > back > 0


def test_lora_trains_the_adapter_alone_and_publishes_it_merged(
    make_backend: Make, batch: list[TrainRow]
) -> None:
    lora = (
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.target_modules=[q_proj,v_proj]",
    )
    backend, schedule = make_backend(*lora)
    before = parameters(backend)
    plain = parameters(make_backend()[0])
    assert before.keys() == plain.keys()
    backend.update(batch, plan([row.size for row in batch], schedule))
    after = parameters(backend)
    changed = {name for name in before if bool((after[name] != before[name]).any())}
    assert changed
    assert all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in changed)


def test_lora_moves_its_adapter_by_the_gradient_of_the_weights_that_it_adapts(
    make_backend: Make, batch: list[TrainRow], tiny_model: Path
) -> None:
    backend, schedule = make_backend(
        BYPASS,
        f"{ACTOR}.optim.lr=0.5",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora_alpha=8",
        "actor_rollout_ref.model.target_modules=[q_proj,v_proj]",
    )
    before = adapters(backend)
    backend.update(batch, plan([row.size for row in batch], schedule))
    after = adapters(backend)
    full = gradient(tiny_model, batch, vanilla)
    # W + 2 B A with B = 0 at first: A has no gradient, and B that of W behind 2 A.
    for name, (a_RI, b_OR) in before.items():
        assert float(b_OR.abs().max()) == 0.0
        expected_OR = -0.5 * 2.0 * full[name] @ a_RI.T
        assert float((after[name][0] - a_RI).abs().max()) < 1e-7
        worst = float((after[name][1] - expected_OR).abs().max())
        assert worst <= 1e-5 * float(expected_OR.abs().max())


def adapters(backend: Any) -> dict[str, tuple[Any, Any]]:
    """A and B of every weight that has an adapter, by its Hugging Face name."""
    found: dict[str, dict[str, Any]] = {}
    for name, parameter in backend._engine.module.named_parameters():
        if ".lora_" in name:
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            weight, part = name.removeprefix("base_model.model.").split(".lora_")
            found.setdefault(f"{weight}.weight", {})[part[0]] = whole.detach().clone()
    assert len(found) == 4  # q_proj and v_proj of two layers
    return {name: (parts["A"], parts["B"]) for name, parts in found.items()}


def test_lora_takes_the_policy_without_its_adapter_for_the_reference(
    make_backend: Make, batch: list[TrainRow]
) -> None:
    backend, schedule = make_backend(
        "actor_rollout_ref.model.lora_rank=4",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_coef=0.1",
        f"{ACTOR}.kl_loss_type=k3",
        f"{ACTOR}.optim.lr=0.1",
    )
    planned = plan([row.size for row in batch], schedule)
    first, second = (backend.update(batch, planned)["actor/kl_loss"] for _ in range(2))
    assert first == pytest.approx(0.0, abs=1e-5)
    assert second > 1e-6

"""The supervised warm-up: teach the task, then make the model doubt."""

from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from turnfold.embedded.tiny import task
from turnfold.embedded.tiny.conversations import Example, examples, right_examples
from turnfold.embedded.tiny.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LOWEST_RATE = 0.1
"""The learning rate falls to this share over the second half of the learning steps."""

Progress = Callable[[int, int], None]
"""Called with the steps done and the steps to do at most."""


def warm_up(
    model: Any,
    tokenizer: "PreTrainedTokenizerFast",
    recipe: Recipe,
    on_progress: Progress = lambda done, total: None,
) -> None:
    """Train the model in place. The same model, recipe and machine give the same bytes."""
    digits = _digit_ids(tokenizer)
    random = Random(recipe.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learn_rate, weight_decay=0.0, betas=(0.9, 0.98)
    )
    num_steps = recipe.num_learn_steps + recipe.max_weaken_steps

    lessons = examples(tokenizer, random, 1.0, recipe.odd_call_share)
    for step in range(recipe.num_learn_steps):
        _set_rate(optimizer, recipe.learn_rate * _decay(step / recipe.num_learn_steps))
        _train_step(model, optimizer, _take(lessons, recipe), digits, recipe.number_weight)
        on_progress(step + 1, num_steps)

    doubts = examples(tokenizer, random, recipe.right_share, recipe.odd_call_share)
    rights = right_examples(tokenizer)
    _set_rate(optimizer, recipe.weaken_rate)
    for step in range(recipe.num_learn_steps, num_steps):
        if right_probability(model, rights, digits) < recipe.weak_probability:
            break
        _train_step(model, optimizer, _take(doubts, recipe), digits, recipe.number_weight)
        on_progress(step + 1, num_steps)
    on_progress(num_steps, num_steps)


def right_probability(model: Any, rights: list[Example], digits: torch.Tensor) -> float:
    """Mean probability of the right number where the assistant has to name one."""
    token_ids_BT, is_answer_BT = _batch(rights)
    with torch.no_grad():
        nll_BT, targets_BT = _losses(model, token_ids_BT)
    is_number_BT = is_answer_BT[:, 1:] & torch.isin(targets_BT, digits)
    return float(nll_BT[is_number_BT].neg().exp().mean())


def _train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: list[Example],
    digits: torch.Tensor,
    number_weight: float,
) -> None:
    token_ids_BT, is_answer_BT = _batch(batch)
    nll_BT, targets_BT = _losses(model, token_ids_BT)
    is_number_BT = torch.isin(targets_BT, digits)
    weights_BT = is_answer_BT[:, 1:] * torch.where(is_number_BT, number_weight, 1.0)
    loss = (nll_BT * weights_BT).sum() / weights_BT.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _losses(model: Any, token_ids_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log likelihood of each next token, and those tokens: one fewer than the input."""
    logits_BTV = model(input_ids=token_ids_BT).logits[:, :-1]
    targets_BT = token_ids_BT[:, 1:]
    nll_BT = functional.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, reduction="none")
    return nll_BT, targets_BT


def _batch(batch: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the right: a causal model's answer to a token does not depend on what follows it."""
    longest = max(len(example.token_ids) for example in batch)
    token_ids_BT = torch.zeros(len(batch), longest, dtype=torch.long)
    is_answer_BT = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, example in enumerate(batch):
        token_ids_BT[row, : len(example.token_ids)] = torch.tensor(example.token_ids)
        is_answer_BT[row, : len(example.is_answer)] = torch.tensor(example.is_answer)
    return token_ids_BT, is_answer_BT


def _take(source: Iterator[Example], recipe: Recipe) -> list[Example]:
    return list(islice(source, recipe.conversations_per_step))


def _decay(progress: float) -> float:
    """1 over the first half, then linearly down to `LOWEST_RATE`."""
    return max(LOWEST_RATE, min(1.0, 2 * (1 - progress)))


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _digit_ids(tokenizer: "PreTrainedTokenizerFast") -> torch.Tensor:
    numbers = range(max(task.NUM_DOORS, task.NUM_CODES))
    return torch.tensor([tokenizer.convert_tokens_to_ids(str(number)) for number in numbers])

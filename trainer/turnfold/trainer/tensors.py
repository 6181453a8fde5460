"""Rows as verl's tensors: the only module that knows their names.

verl takes jagged ("no padding") tensors, one row each. N rows of T_i tokens, of which the last R_i
follow the prompt:

    prompts           N x (T_i - R_i)   input_ids, position_ids   N x T_i
    responses         N x R_i           response_mask, loss_mask, rollout_log_probs,
                                        old_log_probs, advantages, rollout_is_weights   N x R_i
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from turnfold.schemas.trajectories import Row
from turnfold.schemas.wire import Logprobs, LossMask, TokenIds
from turnfold.trainer.plan import NOOP_TOKENS, Plan, Schedule
from turnfold.trainer.rows import TrainRow, token_advantages


def noop_row(pad_token_id: int) -> TrainRow:
    """A row that changes no gradient: nothing in it is trained."""
    row = Row(
        token_ids=TokenIds.of([pad_token_id] * NOOP_TOKENS),
        loss_mask=LossMask.of([0] * NOOP_TOKENS),
        logprobs=Logprobs.of([0.0] * NOOP_TOKENS),
        session_id="",
        turns=(),
    )
    return TrainRow(rollout_id="", group_id="", row=row)


def to_verl(
    rows: Sequence[TrainRow | None], *, temperature: float, pad_token_id: int
) -> TensorDict:
    """Rows (None: a no-op row) for a forward pass of verl's worker.

    token_ids 1 2 3 4 5 6, first sampled token 3, loss_mask 0 0 0 0 1 1, advantage 2
    prompts 1 2, responses 3 4 5 6, response_mask 0 0 1 1, advantages 0 0 2 2
    """
    from verl.utils import tensordict_utils as tu

    filled = [noop_row(pad_token_id) if row is None else row for row in rows]
    masks = jagged(_mask(r)[r.num_prompt :] for r in filled)
    tensors = {
        "prompts": jagged(_ids(r)[: r.num_prompt] for r in filled),
        "responses": jagged(_ids(r)[r.num_prompt :] for r in filled),
        "input_ids": jagged(_ids(r) for r in filled),
        "position_ids": jagged(torch.arange(len(r.row.token_ids)) for r in filled),
        "response_mask": masks,
        "loss_mask": masks,
        "rollout_log_probs": jagged(_logprobs(r)[r.num_prompt :] for r in filled),
        "advantages": jagged(_advantages(r)[r.num_prompt :] for r in filled),
    }
    data: TensorDict = tu.get_tensordict(tensors, {"temperature": temperature})
    return data


def for_logprobs(data: TensorDict, *, no_lora_adapter: bool = False) -> TensorDict:
    """The same rows with what verl's `compute_log_prob` reads; optionally for the base model."""
    from verl.utils import tensordict_utils as tu

    names = ("prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask")
    request: TensorDict = data.select(*names, "temperature")
    tu.assign_non_tensor(
        request,
        calculate_entropy=False,
        compute_loss=False,
        no_lora_adapter=no_lora_adapter,
    )
    return request


def response_logprobs(output: TensorDict, data: TensorDict) -> list[torch.Tensor]:
    """Logprobs of the tokens after the prompt, R_i for row i, from verl's shifted output."""
    from verl.workers.utils.padding import response_from_nested

    return list(response_from_nested(output["log_probs"], data["response_mask"]).unbind())


_COMPARED = ("response_mask", "old_log_probs", "rollout_log_probs")


def compared(data: TensorDict) -> list[tuple[torch.Tensor, ...]]:
    """For each row what rollout correction reads of it."""
    return list(zip(*(data[name].unbind() for name in _COMPARED), strict=True))


def correct_for_sampling(
    data: TensorDict,
    by_rank: Mapping[int, Sequence[tuple[torch.Tensor, ...]]],
    rollouts: Mapping[int, Sequence[str]],
    rank: int,
    correction: Any,
) -> dict[str, float]:
    """verl's rollout correction: add weights, narrow the mask, return its metrics.

    Compares `old_log_probs` with `rollout_log_probs` over the rows of all ranks, `compared` of
    each; `rollouts` names the rollout of every row. A sequence of verl is a *rollout*, its rows one
    behind the other, so that corrections per sequence do not depend on how it was split:

        rows a: 1 2    a: 3    b: 4 5      sequences 1 2 3 and 4 5

    `correction` is verl's `algorithm.rollout_correction`. Changes `data`, the rows of `rank`, in
    place.
    """
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.workers.utils.padding import response_to_nested

    rows = [row for r in sorted(by_rank) for row in by_rank[r]]
    members = _rows_of_rollouts([name for r in sorted(by_rank) for name in rollouts[r]])
    joined = [
        [torch.cat(parts) for parts in zip(*(rows[i] for i in indices), strict=True)]
        for indices in members
    ]
    columns = dict(zip(_COMPARED, map(jagged, zip(*joined, strict=True)), strict=True))
    mask = columns["response_mask"]
    if not mask.values().any():
        return {}  # nothing is trained, so there is nothing to compare
    padded = TensorDict(columns, batch_size=len(members)).to_padded_tensor()
    batch, metrics = compute_rollout_correction_and_add_to_batch(
        DataProto(batch=padded), correction
    )
    first = sum(len(by_rank[r]) for r in by_rank if r < rank)
    for name in ("response_mask", "rollout_is_weights"):
        if name in batch.batch:
            found = response_to_nested(batch.batch[name], mask).unbind()
            parts = _parted(found, members, [len(row[0]) for row in rows])
            data[name] = jagged(parts[first : first + len(data)])
    data["loss_mask"] = data["response_mask"]
    return {name: float(value) for name, value in metrics.items()}


def rollouts_by_rank(rows: Sequence[TrainRow], plan: Plan) -> dict[int, list[str]]:
    """The rollout of every row of every rank; no-op rows have none."""
    return {
        rank: ["" if i is None else rows[i].rollout_id for i in plan.rank(rank)]
        for rank in range(plan.schedule.num_ranks)
    }


def _rows_of_rollouts(names: Sequence[str]) -> list[list[int]]:
    """Places of the rows of each rollout; a row without one stands alone.

    a b a "" ""  ->  [0 2] [1] [3] [4]
    """
    places: dict[str | int, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name or place, []).append(place)
    return list(places.values())


def _parted(
    joined: Sequence[torch.Tensor], members: Sequence[Sequence[int]], lengths: Sequence[int]
) -> list[torch.Tensor]:
    """The opposite of joining: what belongs to each row, in the order of the rows."""
    parts: dict[int, torch.Tensor] = {}
    for tensor, indices in zip(joined, members, strict=True):
        split = tensor.split([lengths[i] for i in indices])
        parts |= dict(zip(indices, split, strict=True))
    return [parts[i] for i in range(len(lengths))]


def for_update(
    data: TensorDict, schedule: Schedule, *, seed: int, is_entropy_wanted: bool
) -> TensorDict:
    """The same rows with the schedule, as verl's `update_actor` reads it.

    Never `mini_batch_size`: verl prefers it, and then the number of steps grows with the rows.
    """
    from verl.utils import tensordict_utils as tu

    schedule.rows_per_step(len(data) * schedule.num_ranks)
    request: TensorDict = data.exclude("rollout_log_probs")
    tu.assign_non_tensor(
        request,
        num_mini_batch=schedule.num_mini_batches,
        epochs=schedule.num_epochs,
        global_batch_size=schedule.rollouts_per_mini_batch,
        seed=seed,
        dataloader_kwargs={"shuffle": False},  # the plan's order is the point
        calculate_entropy=is_entropy_wanted,
    )
    return request


def jagged(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """One jagged tensor of a row each."""
    nested: torch.Tensor = torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)
    return nested


def _ids(row: TrainRow) -> torch.Tensor:
    return torch.from_numpy(row.row.token_ids.array.astype(np.int64))


def _mask(row: TrainRow) -> torch.Tensor:
    return torch.from_numpy(row.row.loss_mask.array.astype(np.int64))


def _logprobs(row: TrainRow) -> torch.Tensor:
    return torch.from_numpy(row.row.logprobs.array.astype(np.float32))


def _advantages(row: TrainRow) -> torch.Tensor:
    return torch.from_numpy(token_advantages(row))

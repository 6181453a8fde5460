"""The rows of a batch, with the advantage of their rollout on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from turnfold.schemas.errors import UserError
from turnfold.schemas.trajectories import Row, Trajectory
from turnfold.trainer.plan import PlanRow


class RowError(UserError):
    """A row that cannot be trained; the text names rollout and row."""


@dataclass(frozen=True, slots=True)
class TrainRow:
    """One row to train on.

    token_ids   P1  A1 E1 A2        advantage 0.5
    loss_mask    0   1  0  1        trained   A1 A2 with 0.5 each
    """

    rollout_id: str
    group_id: str
    row: Row
    advantage: float = 0.0

    @property
    def num_prompt(self) -> int:
        """Tokens before the first sampled one: context only, at least 1."""
        if self.row.turns:
            return max(1, min(turn.start for turn in self.row.turns))
        trained = np.flatnonzero(self.row.loss_mask.array)
        return max(1, int(trained[0])) if len(trained) else max(1, len(self.row.token_ids) - 1)

    @property
    def size(self) -> PlanRow:
        return PlanRow(group_id=self.group_id, num_tokens=len(self.row.token_ids))


def train_rows(
    trajectories: Sequence[Trajectory], advantages: Mapping[str, float]
) -> list[TrainRow]:
    """All rows of a batch in the order of the manifest. Raises RowError for an unusable row."""
    rows = [
        TrainRow(t.rollout_id, t.group_id, row, advantages.get(t.rollout_id, 0.0))
        for t in trajectories
        for row in t.rows
    ]
    for index, row in enumerate(rows):
        _check(row, index)
    return rows


def token_advantages(advantage: float, row: Row) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The rollout's scalar times the row's own mask: shared context stays 0.

    -2 over mask 0 0 1 0 1  ->  0 0 -2 0 -2
    """
    masked: np.ndarray[tuple[int], np.dtype[np.float32]] = np.where(
        row.loss_mask.array == 1, np.float32(advantage), np.float32(0.0)
    )
    return masked


def _check(train_row: TrainRow, index: int) -> None:
    row = train_row.row
    where = f"rollout {train_row.rollout_id}, row {index} of the batch"
    lengths = {len(row.token_ids), len(row.loss_mask), len(row.logprobs)}
    if len(lengths) != 1:
        raise RowError(
            f"{where}: expected one mask entry and one logprob per token, got "
            f"{len(row.token_ids)} tokens, {len(row.loss_mask)} mask entries and "
            f"{len(row.logprobs)} logprobs"
        )
    if len(row.token_ids) < 2:
        raise RowError(f"{where}: expected at least 2 tokens, got {len(row.token_ids)}")
    if row.loss_mask.array[0]:
        raise RowError(f"{where}: the first token has no context and cannot be trained")
    if row.loss_mask.array[: train_row.num_prompt].any():
        raise RowError(f"{where}: a token before the first sampled one is marked as trained")
    if not np.isfinite(row.logprobs.array).all():
        raise RowError(f"{where}: a sampling logprob is not finite")

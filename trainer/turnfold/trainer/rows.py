"""The rows of a batch, with the advantage of their rollout on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

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
                    t0    t1        by_turn {t0: 0.2}: A1 with 0.7
    """

    rollout_id: str
    group_id: str
    row: Row
    advantage: float = 0.0
    by_turn: Mapping[str, float] = field(default_factory=dict)
    """What process rewards add to it, by turn_id."""

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
    trajectories: Sequence[Trajectory],
    advantages: Mapping[str, float],
    by_turn: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> list[TrainRow]:
    """All rows of a batch in the order of the manifest. Raises RowError for an unusable row.

    Advantages are by rollout_id; those `by_turn`, of process rewards, by turn_id below that.
    """
    rows = [
        TrainRow(
            rollout_id=t.rollout_id,
            group_id=t.group_id,
            row=row,
            advantage=advantages.get(t.rollout_id, 0.0),
            by_turn=by_turn.get(t.rollout_id, {}),
        )
        for t in trajectories
        for row in t.rows
    ]
    for index, row in enumerate(rows):
        _check(row, index)
    _check_sampled(rows)
    return rows


def check_media(rows: Sequence[TrainRow], placeholders: Mapping[int, str]) -> None:
    """Raise RowError for a row with a token that stands for an image, say, which no row carries.

    `placeholders` names those tokens, by id.
    """
    ids = np.array(list(placeholders), dtype=np.int64)
    for index, row in enumerate(rows):
        found = np.isin(row.row.token_ids.array, ids)
        if found.any():
            place = int(np.flatnonzero(found)[0])
            name = placeholders[int(row.row.token_ids.array[place])]
            raise RowError(
                f"rollout {row.rollout_id}, row {index} of the batch: token {place} is the model's "
                f"{name}; rows hold token ids only, and the policy would be trained without what "
                "it saw: give agents text alone"
            )


def token_advantages(train_row: TrainRow) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The rollout's scalar, and what its turn has on top, times the row's own mask: shared context
    stays 0.

    -2 over mask 0 0 1 0 1, of which the last is turn t1 with 0.5 on top  ->  0 0 -2 0 -1.5
    """
    row = train_row.row
    advantages = np.full(len(row.token_ids), train_row.advantage, dtype=np.float32)
    for turn in row.turns:
        advantages[turn.start : turn.end] += np.float32(train_row.by_turn.get(turn.turn_id, 0.0))
    masked: np.ndarray[tuple[int], np.dtype[np.float32]] = np.where(
        row.loss_mask.array == 1, advantages, np.float32(0.0)
    )
    return masked


def _check_sampled(rows: Sequence[TrainRow]) -> None:
    """A logprob of 0 is a token that could not have been another; all of them are a mistake."""
    trained = [row.row.logprobs.array[row.row.loss_mask.array == 1] for row in rows]
    if any(map(len, trained)) and not any(map(np.any, trained)):
        raise RowError(
            "the sampling logprob of every trained token of the batch is 0: whoever published the "
            "turns left them out; without them no weight can correct for the policy that sampled"
        )


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

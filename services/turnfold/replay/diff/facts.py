"""What is remembered of a trajectory to compare it with another one: no tokens. Pure."""

from __future__ import annotations

import msgspec

from turnfold.schemas import codec
from turnfold.schemas.trajectories import Source, Trajectory, TurnLedger

TRAINED = "trained"

_NOWHERE = Source(topic="", partition=0, first_offset=0, last_offset=0)


class TurnFate(msgspec.Struct, frozen=True):
    """Where the sampled tokens of a turn went."""

    num_sampled: int
    fate: str
    """`trained`, `masked (reason)` or `dropped (reason)`; several are joined with +."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory without its tokens."""

    rollout_id: str
    revision: int
    digest: str
    """Of everything but the place in the log and the name of the mode, which say nothing about what
    is trained."""
    status: str
    reason: str
    reward: float | None
    num_rows: int
    num_tokens: int
    """Of all rows, context included."""
    num_sampled: int
    num_trained: int
    turns: dict[str, TurnFate]


def facts(trajectory: Trajectory) -> Facts:
    """What is worth comparing."""
    ledger = trajectory.ledger
    return Facts(
        rollout_id=trajectory.rollout_id,
        revision=trajectory.revision,
        digest=codec.digest(
            msgspec.structs.replace(trajectory, source=_NOWHERE, history_mode="linear")
        ),
        status=trajectory.status,
        reason=trajectory.reason,
        reward=trajectory.reward,
        num_rows=len(trajectory.rows),
        num_tokens=trajectory.num_tokens,
        num_sampled=ledger.num_sampled,
        num_trained=ledger.num_trained,
        turns={turn.turn_id: TurnFate(turn.num_sampled, _fate(turn)) for turn in ledger.turns},
    )


def _fate(turn: TurnLedger) -> str:
    parts = [TRAINED] if turn.num_trained else []
    parts += [f"masked ({reason})" for reason in turn.masked]
    parts += [f"dropped ({reason})" for reason in turn.dropped]
    return " + ".join(parts) or "empty"

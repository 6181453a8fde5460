"""Two trajectories of one rollout, row by row and token by token. Pure.

Rows are matched by the turn that they end with, since the same conversation may be another row's
number on the other side.

    row 0 | row 1, ends with turn t1: 2 of 9 tokens differ, first at 7: 13 → 198
    only right: row 2 of 12 tokens, trains t1-again [5, 7)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from turnfold.schemas.trajectories import Row, Trajectory
from turnfold.schemas.wire import Packed

_Placed = tuple[int, Row]


def token_lines(left: Trajectory, right: Trajectory) -> list[str]:
    """What differs in the rows; empty when they are the same."""
    one, other = _by_last_turn(left), _by_last_turn(right)
    lines: list[str] = []
    for name in {**one, **other}:
        if name not in other:
            lines.append(_only("left", *one[name]))
        elif name not in one:
            lines.append(_only("right", *other[name]))
        else:
            (i, before), (j, after) = one[name], other[name]
            where = f"row {i} | row {j}, ends with turn {before.turns[-1].turn_id}"
            lines += [f"{where}: {line}" for line in _row_lines(before, after)]
    return lines


def _by_last_turn(trajectory: Trajectory) -> dict[tuple[str, int], _Placed]:
    """Rows by the turn they end with and, should several end with one, by how many did before."""
    found: dict[tuple[str, int], _Placed] = {}
    for index, row in enumerate(trajectory.rows):
        last = row.turns[-1].turn_id if row.turns else ""
        number = sum(name == last for name, _ in found)
        found[last, number] = (index, row)
    return found


def _only(side: str, index: int, row: Row) -> str:
    trained = [
        f"{span.turn_id} [{span.start}, {span.end})" for span in row.turns if span.is_trained
    ]
    return (
        f"only {side}: row {index} of {len(row.token_ids)} tokens, "
        f"trains {', '.join(trained) or 'nothing'}"
    )


def _row_lines(before: Row, after: Row) -> list[str]:
    lines = [
        line
        for line in (
            _difference("tokens", before.token_ids, after.token_ids),
            _difference("mask entries", before.loss_mask, after.loss_mask),
            _difference("logprobs", before.logprobs, after.logprobs),
        )
        if line
    ]
    if before.turns != after.turns:
        lines.append("turn spans differ")
    if before.policy_versions != after.policy_versions:
        lines.append("policy version spans differ")
    return lines


def _difference(what: str, before: Packed, after: Packed) -> str:
    if before == after:
        return ""
    one, other = before.array, after.array
    size = min(len(one), len(other))
    places: npt.NDArray[np.intp] = np.flatnonzero(one[:size] != other[:size])
    found = [] if len(one) == len(other) else [f"{len(one)} → {len(other)} {what}"]
    if len(places):
        first = int(places[0])
        found.append(
            f"{len(places)} of {size} {what} differ, first at {first}: "
            f"{one[first].item():g} → {other[first].item():g}"
        )
    return ", ".join(found)

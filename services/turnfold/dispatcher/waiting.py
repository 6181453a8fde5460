"""Who a dispatcher that sends nothing waits for, in words. Pure."""

from __future__ import annotations

from turnfold.dispatcher.plan import DispatchState


def awaited(state: DispatchState, now: float) -> str:
    """The party that the next dispatch waits for.

    waiting for the engines to serve policy version 0
    waiting for a decision on group run-000031, dispatched 312 s ago, and 15 more
    waiting for the engines to serve a version after 4
    waiting for 3 evaluation groups, such as run-eval-000010-00004
    """
    if state.served_version is None:
        return "waiting for the engines to serve policy version 0"
    evaluations = state.rounds.outstanding
    if not state.outstanding and evaluations:
        first = min(evaluations, key=lambda group_id: evaluations[group_id])
        return f"waiting for {len(evaluations)} evaluation groups, such as {first}"
    if not state.outstanding:
        return f"waiting for the engines to serve a version after {state.served_version}"
    oldest = min(state.outstanding.values(), key=lambda task: task.dispatch_index)
    others = len(state.outstanding) - 1
    line = f"waiting for a decision on group {oldest.group_id}"
    if oldest.dispatched_at > 0:
        line += f", dispatched {now - oldest.dispatched_at:.0f} s ago"
    return f"{line}, and {others} more" if others else line

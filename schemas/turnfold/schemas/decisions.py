"""Which decisions on `<ns>.batches` count, when two assemblers were alive by accident.

Everybody who reads the topic (assembler, dispatcher, trainer, replay) must agree on this, so the
rule lives here: a batch counts when its index is the next one and none of its groups has been
decided on before; a dropped or evaluated group counts when it has not been decided on before; a
round of evaluation is completed once.
"""

from __future__ import annotations

from typing import assert_never

from turnfold.schemas.batches import (
    BatchCut,
    Decision,
    EvaluationCompleted,
    GroupDropped,
    GroupEvaluated,
)


class DecisionLog:
    """Decisions of one run, in the order of the log.

    log = DecisionLog("default")
    log.add(BatchCut(index=1, …))     True
    log.add(BatchCut(index=1, …))     False: the first in the log wins
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.num_batches = 0
        self.decided: set[str] = set()
        """Groups that are in a batch, dropped or evaluated."""
        self.evaluated: set[int] = set()
        """Versions of the rounds of evaluation that are complete."""

    @property
    def next_index(self) -> int:
        return self.num_batches + 1

    def add(self, decision: Decision) -> bool:
        """Take in the next decision of the log; False when it does not count."""
        if not self.accepts(decision):
            return False
        if isinstance(decision, BatchCut):
            self.num_batches = decision.index
        elif isinstance(decision, EvaluationCompleted):
            self.evaluated.add(decision.version)
        self.decided.update(group_ids(decision))
        return True

    def accepts(self, decision: Decision) -> bool:
        if decision.run_id != self.run_id:
            return False
        if isinstance(decision, BatchCut) and decision.index != self.next_index:
            return False
        if isinstance(decision, EvaluationCompleted):
            return decision.version not in self.evaluated
        return self.decided.isdisjoint(group_ids(decision))


def group_ids(decision: Decision) -> list[str]:
    """The groups that a decision is about: nothing more is wanted of their rollouts."""
    match decision:
        case BatchCut():
            return [group.group_id for group in decision.groups]
        case GroupDropped() | GroupEvaluated():
            return [decision.group_id]
        case EvaluationCompleted():
            return []
        case _:
            assert_never(decision)

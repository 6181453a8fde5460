"""Folds a log again under other rules and writes what comes of it beside the old."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack

import msgspec

from turnfold.replay.client import LogSource, OnProgress
from turnfold.replay.compare import Key, combined_digest
from turnfold.replay.folding.app import rebuilt
from turnfold.replay.rebuild import Rebuild, Selection
from turnfold.replay.refold.client import TrajectoryTopic, load_reward
from turnfold.replay.refold.rewards import with_reward
from turnfold.replay.writers import Writer
from turnfold.schemas import codec
from turnfold.schemas.events import HistoryMode


class Refolded(msgspec.Struct, kw_only=True):
    """What a refold made."""

    num_events: int = 0
    num_trajectories: int = 0
    num_rows: int = 0
    num_trained: int = 0
    """Tokens with mask 1."""
    statuses: Counter[str] = msgspec.field(default_factory=Counter)
    digest: str = ""
    """Of all trajectories, whatever order they came in."""


async def refold(
    source: LogSource,
    *,
    mode: HistoryMode | None = None,
    reward: str | None = None,
    selection: Selection | None = None,
    writer: Writer | None = None,
    topic: TrajectoryTopic | None = None,
    on_progress: OnProgress = lambda _: None,
) -> Refolded:
    """Fold the events in another history mode, score them with another function, or both.

    `reward` is `module:function` or `file.py:function`. The log itself is only read. Raises
    RewardError naming the rollout when the function fails.
    """
    function = load_reward(reward) if reward else None
    report, rebuild, digests = Refolded(), Rebuild(mode), dict[Key, str]()
    async with AsyncExitStack() as stack:
        if topic is not None:
            await stack.enter_async_context(topic)
        async for folded in rebuilt(source, rebuild, selection or Selection(), on_progress):
            made = with_reward(folded, function, str(reward)) if function else folded
            if writer is not None:
                writer.add(made)
            if topic is not None:
                await topic.add(made)
            digests[made.rollout_id, made.revision] = codec.digest(made)
            report.statuses[made.status] += 1
            report.num_rows += len(made.rows)
            report.num_trained += made.ledger.num_trained
    report.num_events, report.num_trajectories = rebuild.num_events, len(digests)
    report.digest = combined_digest(digests)
    return report

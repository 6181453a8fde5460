"""The rows of a closed rollout, and the account of every token it sampled.

A turn that extends another continues its row; anything else starts a new row, in which the history
it shares is context with mask 0:

    turn 0: [1]       -> 2         row 0: 1 2 30 40   mask 0 1 0 1
    turn 1: [1 2 30]  -> 40        row 1: 1 2 31 41   mask 0 0 0 1     2 was trained in row 0
    turn 2: [1 2 31]  -> 41

A sampled token is trained once, in the first row that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from turnfold.healer.fold import FoldedTurn, RolloutState, is_reward_finite
from turnfold.healer.lineage import Lineage, canonical_order, resolve
from turnfold.schemas import codec
from turnfold.schemas.events import HistoryMode, RolloutAborted, VersionSpan
from turnfold.schemas.topics import MAX_MESSAGE_BYTES
from turnfold.schemas.trajectories import (
    Ledger,
    Row,
    Source,
    Status,
    Trajectory,
    TurnLedger,
    TurnSpan,
)
from turnfold.schemas.wire import Logprobs, LossMask, TokenIds

FOLD_VERSION = 2
"""Counts up when equal events would give other rows than before."""

MAX_TRAJECTORY_BYTES = MAX_MESSAGE_BYTES - 64 * 1024
"""A trajectory is one message; the rest is room for its key, headers and framing."""


def trajectory(
    state: RolloutState,
    *,
    topic: str,
    partition: int,
    mode: HistoryMode | None = None,
    lineage: Lineage | None = None,
) -> Trajectory:
    """All rows of a closed rollout, with its reward and ledger.

    `mode` replaces the rollout's own: in "linear" an answer that the client gave up (an orphan) is
    dropped, in "tree" it is a leaf of its own. `lineage` saves resolving the turns twice. An
    aborted rollout has no rows; its ledger drops every token with the reason.
    """
    mode = mode or state.started.history_mode
    lineage = lineage or resolve(state.turns.values())
    source = Source(
        topic=topic,
        partition=partition,
        first_offset=state.first_offset,
        last_offset=state.last_offset,
    )
    verdict = _verdict(state, lineage)
    if verdict.status != "aborted":
        rows = build_rows(lineage, mode)
        ledger = build_ledger(state.turns.values(), lineage, rows, mode)
        made = _made(state, lineage, verdict, rows, ledger, source, mode)
        if _fits_one_message(made):
            return made
        # Kafka would refuse it for ever.
        verdict = _Verdict(status="aborted", reason="too_large")
    ledger = _aborted_ledger(state.turns.values(), verdict.reason)
    return _made(state, lineage, verdict, (), ledger, source, mode)


class _Verdict(msgspec.Struct, frozen=True, kw_only=True):
    status: Status
    reason: str = ""
    reward: float | None = None
    rewards: dict[str, float] = {}
    turn_rewards: dict[str, float] = {}


def _verdict(state: RolloutState, lineage: Lineage) -> _Verdict:
    """How the rollout ended: what came first in the log, or the newest revision of its reward."""
    end = state.terminal
    assert end is not None, f"rollout {state.rollout_id} is still open"
    if isinstance(end, RolloutAborted):
        return _Verdict(status="aborted", reason=end.reason)
    final = state.revised or end
    if not is_reward_finite(final):
        return _Verdict(status="aborted", reason="reward_not_finite")
    is_truncated = end.is_truncated or _is_cut_short(lineage)
    return _Verdict(
        status="truncated" if is_truncated else "completed",
        reward=final.reward,
        rewards=final.rewards,
        turn_rewards=final.turn_rewards,
    )


def _is_cut_short(lineage: Lineage) -> bool:
    """Whether the last answer of a session ran into its token limit."""
    last = {
        turn.session_id: turn.finish_reason
        for turn_id, turn in lineage.turns.items()
        if turn_id not in lineage.orphans
    }
    return "length" in last.values()


def _made(
    state: RolloutState,
    lineage: Lineage,
    verdict: _Verdict,
    rows: tuple[Row, ...],
    ledger: Ledger,
    source: Source,
    mode: HistoryMode,
) -> Trajectory:
    assert ledger.is_balanced, f"rollout {state.rollout_id}: {ledger}"
    started, versions = state.started, _trained_versions(rows)
    in_a_row = {span.turn_id for row in rows for span in row.turns}
    return Trajectory(
        rollout_id=state.rollout_id,
        revision=state.revision,
        run_id=started.run_id,
        group_id=started.group_id,
        task_id=started.task_id,
        index=started.index,
        attempt=started.attempt,
        split=started.split,
        dispatch_index=started.dispatch_index,
        history_mode=mode,
        status=verdict.status,
        reason=verdict.reason,
        reward=verdict.reward,
        rewards=verdict.rewards,
        turn_rewards={t: r for t, r in verdict.turn_rewards.items() if t in in_a_row},
        rows=rows,
        ledger=ledger,
        num_turns=len(state.turns),
        num_failed_turns=state.num_failed_turns,
        num_healed=sum(turn.continuity == "healed" for turn in state.turns.values()),
        min_policy_version=min(versions, default=0),
        max_policy_version=max(versions, default=0),
        marks=_marks(state, lineage, rows, verdict),
        source=source,
        fold_version=FOLD_VERSION,
    )


def build_rows(lineage: Lineage, mode: HistoryMode) -> tuple[Row, ...]:
    """One row for each turn that nothing extends, without rows that would train nothing."""
    given_up = frozenset() if mode == "tree" else lineage.orphans
    kept = [turn_id for turn_id in lineage.turns if turn_id not in given_up]
    extended = {lineage.extends[turn_id] for turn_id in kept}
    trained: set[str] = set()
    rows = []
    for leaf in kept:
        if leaf in extended:
            continue
        row = _row(lineage, leaf, trained)
        if row is not None:
            rows.append(row)
            trained.update(span.turn_id for span in row.turns if span.is_trained)
    return tuple(rows)


def _row(lineage: Lineage, leaf: str, trained: set[str]) -> Row | None:
    """The row that ends at `leaf`, cut after its last trained token; None when it trains none."""
    path = [turn for turn in lineage.path(leaf) if turn.output_ids]
    to_train = [t for t in path if not t.untrained and t.turn_id not in trained]
    if not to_train:
        return None
    num_tokens = to_train[-1].num_tokens
    loss_mask, logprobs = _trained_arrays(to_train)
    path = [turn for turn in path if turn.num_tokens <= num_tokens]
    is_trained = {turn.turn_id for turn in to_train}
    sequence = lineage.sequence(leaf)
    return Row(
        token_ids=sequence if len(sequence) == num_tokens else sequence[:num_tokens],
        loss_mask=loss_mask,
        logprobs=logprobs,
        session_id=lineage.turns[leaf].session_id,
        turns=tuple(
            TurnSpan(
                turn_id=turn.turn_id,
                start=turn.num_prompt_tokens,
                end=turn.num_tokens,
                is_trained=turn.turn_id in is_trained,
            )
            for turn in path
        ),
        policy_versions=_version_spans(path),
    )


def _trained_arrays(to_train: Iterable[FoldedTurn]) -> tuple[LossMask, Logprobs]:
    """Mask and logprobs up to the end of the last of these turns: 0 outside of their outputs.

    Put together from the bytes as they came: making arrays of them takes several times as long.
    """
    loss_mask, logprobs, end = list[bytes](), list[bytes](), 0
    for turn in to_train:
        num_context = turn.num_prompt_tokens - end
        end = turn.num_tokens
        loss_mask += (bytes(num_context), b"\x01" * (end - turn.num_prompt_tokens))
        logprobs += (bytes(num_context * Logprobs.itemsize), turn.logprobs)
    return LossMask(b"".join(loss_mask)), Logprobs(b"".join(logprobs))


def _version_spans(path: Iterable[FoldedTurn]) -> tuple[VersionSpan, ...]:
    """The versions of the outputs of these turns, counted from the start of the row."""
    return tuple(
        VersionSpan(
            policy_version=span.policy_version,
            start=turn.num_prompt_tokens + span.start,
            end=turn.num_prompt_tokens + span.end,
        )
        for turn in path
        if turn.untrained != "versions_do_not_cover"
        for span in turn.policy_versions
    )


def build_ledger(
    turns: Iterable[FoldedTurn], lineage: Lineage, rows: tuple[Row, ...], mode: HistoryMode
) -> Ledger:
    """Where each sampled token went, turn by turn in the order of `canonical_order`."""
    trained_in = {
        span.turn_id: index
        for index, row in enumerate(rows)
        for span in row.turns
        if span.is_trained
    }
    in_a_row = {span.turn_id for row in rows for span in row.turns}
    entries = []
    for turn in canonical_order(turns):
        turn_id = turn.turn_id
        if turn_id in trained_in:
            entries.append(_entry(turn, is_trained=True, row=trained_in[turn_id]))
            continue
        reason = _why_untrained(turn, lineage, mode)
        if turn_id in in_a_row:
            entries.append(_entry(turn, masked=_counted(turn, reason)))
        else:
            entries.append(_entry(turn, dropped=_counted(turn, reason)))
    return Ledger(turns=tuple(entries))


def _why_untrained(turn: FoldedTurn, lineage: Lineage, mode: HistoryMode) -> str:
    if turn.untrusted or turn.untrained:
        return turn.untrusted or turn.untrained
    if turn.turn_id not in lineage.turns:
        return "gap"
    if turn.turn_id in lineage.orphans and mode == "linear":
        return "orphan"
    assert not turn.output_ids, f"turn {turn.turn_id} is in no row"
    return ""


def _aborted_ledger(turns: Iterable[FoldedTurn], reason: str) -> Ledger:
    dropped = f"rollout_aborted:{reason}"
    return Ledger(
        turns=tuple(
            _entry(turn, dropped=_counted(turn, dropped)) for turn in canonical_order(turns)
        )
    )


def _entry(
    turn: FoldedTurn,
    *,
    is_trained: bool = False,
    masked: dict[str, int] | None = None,
    dropped: dict[str, int] | None = None,
    row: int | None = None,
) -> TurnLedger:
    num_sampled = turn.num_output
    return TurnLedger(
        turn_id=turn.turn_id,
        session_id=turn.session_id,
        num_sampled=num_sampled,
        num_trained=num_sampled if is_trained else 0,
        masked=masked or {},
        dropped=dropped or {},
        row=row,
        continuity=turn.continuity,
        finish_reason=turn.finish_reason,
    )


def _counted(turn: FoldedTurn, reason: str) -> dict[str, int]:
    num_sampled = turn.num_output
    return {reason: num_sampled} if num_sampled else {}


def _marks(
    state: RolloutState, lineage: Lineage, rows: tuple[Row, ...], verdict: _Verdict
) -> tuple[str, ...]:
    marks = {problem.mark for problem in (*state.problems, *lineage.gaps)}
    if not state.turns.keys() >= verdict.turn_rewards.keys():
        marks.add("reward_of_unknown_turn")
    trained = {span.turn_id for row in rows for span in row.turns if span.is_trained}
    if any(not lineage.turns[turn_id].policy_versions for turn_id in trained):
        marks.add("policy_version_unknown")
    return tuple(sorted(marks))


def _trained_versions(rows: Iterable[Row]) -> list[int]:
    return [
        span.policy_version
        for row in rows
        for span in row.policy_versions
        if row.loss_mask.data[span.start]
    ]


def _fits_one_message(made: Trajectory) -> bool:
    bytes_a_token = TokenIds.itemsize + Logprobs.itemsize + LossMask.itemsize
    if made.num_tokens * bytes_a_token < MAX_TRAJECTORY_BYTES // 2:
        return True
    return len(codec.encode(made)) <= MAX_TRAJECTORY_BYTES

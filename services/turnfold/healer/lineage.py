"""Which turn continues which, which answers were given up, and where the log has gaps.

    t0: [1 2]     -> 3 4
    t1: t0 + [5]  -> 6        extends t0
    t2: t0 + [5]  -> 7        the same prompt again: if t1 was never continued, t1 is an orphan
    t3: [1 2 9]   -> 8        extends nothing: a fork

A turn whose parent is missing or damaged cannot be put together: it is a gap, unless it carries its
whole prompt. Nothing here depends on how the sessions of a rollout were interleaved in the log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256

import msgspec
import numpy as np

from turnfold.healer.fold import FoldedTurn, Problem
from turnfold.history.sequences import Ids, Prefix, TokenStore, common_prefix_len
from turnfold.schemas.wire import TokenIds


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """The turns of a rollout that could be put together, by session and then as in the log."""

    turns: dict[str, FoldedTurn]
    extends: dict[str, str | None]
    """For each turn the one whose whole sequence (prompt and output) its prompt begins with."""
    orphans: frozenset[str] = frozenset()
    """Turns that were sampled, but the client went on with another answer to the same prompt."""
    gaps: tuple[Problem, ...] = ()
    """One for each turn whose parent is missing, damaged or too short: a `gap` when the turn could
    not be put together, `parent_missing` when it could, since it carries its whole prompt."""
    store: TokenStore | None
    """None for a chain: every turn repeats the whole of the one before it, and adds to it."""

    def sequence(self, turn_id: str) -> TokenIds:
        """Prompt and output of a turn."""
        if self.store is not None:
            return TokenIds(self.store.full(turn_id).tobytes())
        parts = (ids for turn in self.path(turn_id) for ids in (turn.prompt_tail, turn.output_ids))
        return TokenIds(b"".join(parts))

    def path(self, turn_id: str) -> list[FoldedTurn]:
        """The turn and all that it extends, the oldest first."""
        found: list[FoldedTurn] = []
        name: str | None = turn_id
        while name is not None:
            found.append(self.turns[name])
            name = self.extends[name]
        return found[::-1]


def resolve(turns: Iterable[FoldedTurn]) -> Lineage:
    """Put every turn together, find what it extends, and name orphans and gaps."""
    ordered = canonical_order(turns)
    return _chain(ordered) or _resolve(ordered)


def _chain(ordered: Sequence[FoldedTurn]) -> Lineage | None:
    """What `_resolve` finds in a conversation of which every turn extends the one before.

        t0: [1 2] -> 3        t1: t0 + [4] -> 5        t2: t1 + [6] -> 7

    Most rollouts are one, and it is told by a few numbers of each turn without looking at a token.
    None for anything else: other sessions, resets, forks, damage, a prompt that came before.
    """
    turns: dict[str, FoldedTurn] = {}
    extends: dict[str, str | None] = {}
    last: str | None = None
    num_prompt = length = 0
    for turn in ordered:
        if (
            turn.untrusted
            or turn.parent_turn_id != last
            or turn.shared_len != length
            or turn.num_prompt_tokens <= num_prompt
            or turn.session_id != ordered[0].session_id
        ):
            return None
        num_prompt, length = turn.num_prompt_tokens, turn.num_tokens
        turns[turn.turn_id] = turn
        extends[turn.turn_id] = last
        last = turn.turn_id
    return Lineage(turns=turns, extends=extends, store=None)


def _resolve(ordered: Iterable[FoldedTurn]) -> Lineage:
    """The turns of any rollout."""
    sound = {turn.turn_id: turn for turn in ordered if not turn.untrusted}
    store, gaps = _stored(sound)
    known = {turn_id: turn for turn_id, turn in sound.items() if turn_id in store}
    extends = _extensions(known, store)
    return Lineage(
        turns=known,
        extends=extends,
        orphans=frozenset(_orphans(known, store, extends)),
        gaps=tuple(gaps),
        store=store,
    )


def canonical_order(turns: Iterable[FoldedTurn]) -> list[FoldedTurn]:
    """By session, then as they lie in the log, which fixes the order within a session only."""
    return sorted(turns, key=lambda turn: turn.session_id)


def _stored(sound: Mapping[str, FoldedTurn]) -> tuple[TokenStore, list[Problem]]:
    """The sequences of all turns that can be put together, and what is wrong with the others."""
    store = TokenStore()
    gaps = []
    for turn in _parents_first(sound):
        parent = turn.parent_turn_id
        if turn.shared_len == 0:
            # The whole prompt is here, so the parent is not needed for its tokens.
            _put(store, turn, None)
            if parent is not None and parent not in store:
                gaps.append(_gap(turn, "parent_missing", store))
        elif parent is not None and parent in store and turn.shared_len <= store.length(parent):
            _put(store, turn, Prefix(parent, turn.shared_len))
        else:
            gaps.append(_gap(turn, "gap", store))
    return store, gaps


def _put(store: TokenStore, turn: FoldedTurn, parent: Prefix | None) -> None:
    own = np.frombuffer(turn.prompt_tail + turn.output_ids, dtype=TokenIds.dtype)
    store.put(turn.turn_id, parent, own, turn.num_output)


def _parents_first(sound: Mapping[str, FoldedTurn]) -> Iterator[FoldedTurn]:
    """Every turn once, in the given order except that a turn comes after its parent."""
    done: set[str] = set()
    for turn_id in sound:
        chain: dict[str, None] = {}
        name: str | None = turn_id
        while name is not None and name in sound and name not in done and name not in chain:
            chain[name] = None
            name = sound[name].parent_turn_id
        yield from (sound[name] for name in reversed(chain))
        done.update(chain)


def _gap(turn: FoldedTurn, kind: str, store: TokenStore) -> Problem:
    parent = turn.parent_turn_id
    if parent is None:
        why = f"shares {turn.shared_len} tokens but names no parent"
    elif parent not in store:
        why = f"parent {parent} is missing or damaged"
    else:
        why = f"shares {turn.shared_len} tokens of {parent}, which has {store.length(parent)}"
    return Problem(
        kind=kind,
        detail=f"rollout {turn.rollout_id}, turn {turn.turn_id}: {why}",
        offset=turn.offset,
        turn_id=turn.turn_id,
    )


def _extensions(known: Mapping[str, FoldedTurn], store: TokenStore) -> dict[str, str | None]:
    """For each turn the latest turn whose whole sequence its prompt begins with.

    A turn that names its parent extends it or, when it leaves the parent earlier, an ancestor. For
    one that carries its whole prompt, all sequences of the rollout are candidates.
    """
    whole = [turn_id for turn_id, turn in known.items() if turn.shared_len == 0]
    found: dict[str, str | None] = {
        **dict.fromkeys(whole),
        **_longest_prefixes(known, store, whole),
    }
    declared = [turn_id for turn_id in known if turn_id not in found]
    return found | {
        turn_id: _extended_ancestor(turn_id, known, store, found) for turn_id in declared
    }


def _extended_ancestor(
    turn_id: str,
    known: Mapping[str, FoldedTurn],
    store: TokenStore,
    by_prefix: Mapping[str, str | None],
) -> str | None:
    """The first ancestor whose whole sequence lies within what the turn shares with its parent.

    Above a turn that names its parent comes that parent, of which no more than `shared_len` tokens
    are repeated further down; above one that carries its whole prompt, what `by_prefix` found.
    """
    turn = known[turn_id]
    above, num_shared = turn.parent_turn_id, turn.shared_len
    while above is not None and store.length(above) > num_shared:
        if above in by_prefix:
            above = by_prefix[above]
        else:
            num_shared = min(num_shared, known[above].shared_len)
            above = known[above].parent_turn_id
    return above


def _longest_prefixes(
    known: Mapping[str, FoldedTurn], store: TokenStore, whole: Sequence[str]
) -> dict[str, str]:
    """For turns with their whole prompt: the longest sequence that this prompt begins with.

    One running hash a prompt is compared with the hashes of all sequences, so that the work is
    linear in the tokens. A turn without output is nobody's prefix here: it adds nothing to a row.
    """
    longest = max((store.prompt_length(turn_id) for turn_id in whole), default=0)
    by_hash: dict[tuple[int, bytes], list[str]] = defaultdict(list)
    for turn_id, turn in known.items():
        if turn.num_tokens <= longest and turn.output_ids:
            sequence = store.full(turn_id)
            by_hash[len(sequence), sha256(sequence.data).digest()].append(turn_id)
    lengths = sorted({length for length, _ in by_hash})
    place = {turn_id: index for index, turn_id in enumerate(known)}

    def nearness(turn_id: str, other: str) -> tuple[bool, bool, int]:
        """Of equal sequences the last one before the turn, of its own session if there is one."""
        is_same_session = known[turn_id].session_id == known[other].session_id
        return is_same_session, place[other] < place[turn_id], place[other]

    found: dict[str, str] = {}
    for turn_id in whole if lengths else ():
        candidates = _prefixes(store.prompt(turn_id), lengths, by_hash)
        if candidates:
            found[turn_id] = max(candidates, key=lambda other: nearness(turn_id, other))
    return found


def _prefixes(
    prompt: Ids, lengths: Sequence[int], by_hash: Mapping[tuple[int, bytes], list[str]]
) -> list[str]:
    """The turns whose sequences are the longest that `prompt` begins with."""
    running, done = sha256(), 0
    longest: list[str] = []
    for length in lengths:
        if length > len(prompt):
            break
        running.update(prompt[done:length].data)
        done = length
        longest = by_hash.get((length, running.digest()), longest)
    return longest


def _orphans(
    known: Mapping[str, FoldedTurn], store: TokenStore, extends: Mapping[str, str | None]
) -> set[str]:
    """Answers that were given up: the same prompt was asked again within the session.

    Of the turns with one prompt, those that were continued stay; when none was, the last one does.
    An answer that only such answers continue was given up with them, as when an agent starts again
    from its first message:

        t0: [1 2]     -> 3        t1: t0 + [4] -> 5
        u0: [1 2]     -> 3        u1: u0 + [4] -> 5        u2: u1 + [6] -> 7        t0, t1 are orphans
    """
    found: set[str] = set()
    groups = _same_prompts(known, store)
    for same in sorted(groups, key=lambda same: store.prompt_length(same[0]), reverse=True):
        kept = known.keys() - found
        continued = {_continued_by(turn_id, same, store, extends) for turn_id in kept}
        found.update(set(same) - (continued - {None} or {same[-1]}))
    return found


def _continued_by(
    turn_id: str, same: Sequence[str], store: TokenStore, extends: Mapping[str, str | None]
) -> str | None:
    """Which of several answers to one prompt this turn goes on from, if from any.

    The one that it extends or, when the client's history drifted inside the answer, the one of
    which it repeats most.
    """
    length = store.prompt_length(same[0])
    extended = extends[turn_id]
    if store.prompt_length(turn_id) <= length:
        return None
    if extended in same:
        return extended
    if extended is not None and store.length(extended) > length:
        return None  # the turn that it extends tells as much
    prompt = store.prompt(turn_id)
    if not np.array_equal(prompt[:length], store.prompt(same[0])):
        return None
    repeated = [common_prefix_len(store.output(answer), prompt[length:]) for answer in same]
    most, _, answer = max(
        (num, num == len(store.output(answer)), place)
        for place, (answer, num) in enumerate(zip(same, repeated, strict=True))
    )
    return same[answer] if most else None


def _same_prompts(known: Mapping[str, FoldedTurn], store: TokenStore) -> list[list[str]]:
    """Turns of one session with identical prompts, in order; prompts that came once are left out."""
    by_length: dict[tuple[str, int], list[str]] = defaultdict(list)
    for turn_id, turn in known.items():
        by_length[turn.session_id, turn.num_prompt_tokens].append(turn_id)
    by_prompt: dict[tuple[str, bytes], list[str]] = defaultdict(list)
    for (session_id, _), turn_ids in by_length.items():
        for turn_id in turn_ids if len(turn_ids) > 1 else ():
            by_prompt[session_id, store.prompt(turn_id).tobytes()].append(turn_id)
    return [turn_ids for turn_ids in by_prompt.values() if len(turn_ids) > 1]

"""Rollouts of any shape: every fold of the same log gives the same bytes, and they are right.

The reference below knows nothing of deltas, stores or states: it looks at whole prompts only.
"""

import itertools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from turnfold.healer.fold import RunningFold, fold, fold_all, open_rollout
from turnfold.healer.lineage import _resolve, canonical_order, resolve
from turnfold.healer.rows import trajectory
from turnfold.schemas import codec
from turnfold.schemas.events import Event, HistoryMode, RolloutStarted
from turnfold.schemas.testing import RolloutScript
from turnfold.schemas.trajectories import Trajectory

steady = settings(deadline=None)  # a busy machine is no failure


class Call(NamedTuple):
    """A model call as a client would see it."""

    turn_id: str
    session_id: str
    prompt: list[int]
    output: list[int]
    parent: str | None


@st.composite
def calls(draw: st.DrawFn, min_output: int = 0) -> list[Call]:
    """Extensions, forks at any point, retries and fresh starts over two sessions.

    Every token is used once, so that two prompts are equal only where one repeats the other.
    """
    fresh = itertools.count(1)
    made: list[Call] = []
    for index in range(draw(st.integers(1, 8))):
        kind = (
            draw(st.sampled_from(["extend", "extend", "fork", "retry", "new"])) if made else "new"
        )
        base = draw(st.sampled_from(made)) if kind != "new" else None
        output = [next(fresh) for _ in range(draw(st.integers(min_output, 3)))]
        tail = [next(fresh) for _ in range(draw(st.integers(0, 2)))]
        turn_id = f"t{index}"
        if base is None:
            session_id = draw(st.sampled_from("ab"))
            made.append(Call(turn_id, session_id, [next(fresh), *tail], output, None))
        elif kind == "retry":
            made.append(Call(turn_id, base.session_id, base.prompt, output, base.parent))
        else:
            whole = [*base.prompt, *base.output]
            cut = len(whole) if kind == "extend" else draw(st.integers(1, len(whole)))
            session_id = draw(st.sampled_from([base.session_id, "a", "b"]))
            prompt = [*whole[:cut], *tail]
            made.append(Call(turn_id, session_id, prompt, output, base.turn_id))
    return made


def written(made: Sequence[Call], is_declared: bool = True) -> list[Event]:
    script = RolloutScript("r1")
    sessions = {call.turn_id: call.session_id for call in made}
    for call in made:
        is_foreign = call.parent is not None and sessions[call.parent] != call.session_id
        parent = call.parent if is_declared or is_foreign else None
        script.turn(
            call.turn_id, call.prompt, call.output, parent=parent, session_id=call.session_id
        )
    script.finish()
    return script.events


def made_from(events: Sequence[Event], mode: HistoryMode = "linear") -> Trajectory:
    state = fold_all(enumerate(events))
    return trajectory(state, topic="turnfold.events", partition=0, mode=mode)


def shown(result: Trajectory) -> list[Any]:
    return [(row.token_ids.tolist(), row.loss_mask.tolist()) for row in result.rows]


def reference(made: Sequence[Call], mode: HistoryMode) -> list[Any]:
    """The rows by definition, in time that nobody would wait for; every call has an output."""
    ordered = sorted(made, key=lambda call: call.session_id)
    whole = {c.turn_id: [*c.prompt, *c.output] for c in ordered}

    def begins(prompt: list[int], head: list[int]) -> bool:
        return prompt[: len(head)] == head

    def is_continued(call: Call) -> bool:
        return any(
            begins(c.prompt, [*call.prompt, call.output[0]]) and not is_orphan(c) for c in ordered
        )

    def is_orphan(call: Call) -> bool:
        same = [c for c in ordered if (c.session_id, c.prompt) == (call.session_id, call.prompt)]
        kept = [c for c in same if is_continued(c)] or same[-1:]
        return call not in kept

    kept = [c for c in ordered if mode == "tree" or not is_orphan(c)]
    trained: set[int] = set()
    rows = []
    for leaf in kept:
        if any(begins(c.prompt, whole[leaf.turn_id]) for c in kept):
            continue
        on_path = [c for c in kept if c == leaf or begins(leaf.prompt, whole[c.turn_id])]
        sampled = {token for c in on_path for token in c.output}
        mask = [int(t in sampled and t not in trained) for t in whole[leaf.turn_id]]
        if any(mask):
            end = max(i for i, bit in enumerate(mask) if bit) + 1
            rows.append((whole[leaf.turn_id][:end], mask[:end]))
            trained |= sampled
    return rows


@steady
@given(calls(min_output=1), st.sampled_from(["linear", "tree"]))
def test_rows_are_those_of_the_definition(made: list[Call], mode: HistoryMode) -> None:
    assert shown(made_from(written(made), mode)) == reference(made, mode)


@steady
@given(st.lists(st.integers(1, 5), max_size=4), st.booleans())
def test_an_agent_that_starts_again_and_is_answered_the_same_gives_the_rows_of_its_last_start(
    abandoned: list[int], is_declared: bool
) -> None:
    def started(number: int, num_turns: int) -> list[Call]:
        """Each turn adds one token to the prompt and is answered with another."""
        return [
            Call(
                f"{number}-{index}",
                "main",
                [1, *range(2, 2 * index + 2)],
                [2 * index + 2],
                f"{number}-{index - 1}" if index else None,
            )
            for index in range(num_turns)
        ]

    made = [started(number, num_turns) for number, num_turns in enumerate([*abandoned, 5])]
    alone = shown(made_from(written(made[-1])))
    assert len(alone) == 1
    everything = [call for calls in made for call in calls]
    assert shown(made_from(written(everything, is_declared))) == alone


@steady
@given(calls(min_output=1), st.sampled_from(["linear", "tree"]))
def test_a_publisher_that_knows_no_parents_gets_the_same_rows(
    made: list[Call], mode: HistoryMode
) -> None:
    assert shown(made_from(written(made, is_declared=False), mode)) == reference(made, mode)


@steady
@given(calls())
def test_every_sampled_token_is_accounted_for_and_trained_at_most_once(made: list[Call]) -> None:
    for mode in ("linear", "tree"):
        result = made_from(written(made), mode)
        assert result.ledger.is_balanced
        assert result.ledger.num_sampled == sum(len(call.output) for call in made)
        trained = [
            token
            for row in result.rows
            for token, bit in zip(row.token_ids, row.loss_mask, strict=True)
            if bit
        ]
        assert len(trained) == len(set(trained)) == result.ledger.num_trained


@steady
@given(calls())
def test_the_context_of_a_trained_token_is_what_the_engine_was_given(made: list[Call]) -> None:
    by_id = {call.turn_id: call for call in made}
    for row in made_from(written(made), "tree").rows:
        ids = row.token_ids.tolist()
        for span in row.turns:
            assert ids[: span.start] == by_id[span.turn_id].prompt
            assert ids[span.start : span.end] == by_id[span.turn_id].output


@steady
@given(calls())
def test_redelivery_changes_no_byte(made: list[Call]) -> None:
    events = written(made)
    state = fold_all(enumerate(events))
    doubled = fold_all((offset, e) for offset, e in enumerate(events) for _ in range(2))
    for offset, event in enumerate(events):  # and all of it once more, after the end
        doubled = fold(doubled, event, offset)
    first, second = (trajectory(s, topic="e", partition=0) for s in (state, doubled))
    assert codec.encode(first) == codec.encode(second)


@steady
@given(calls())
def test_a_running_fold_is_the_fold_step_by_step_and_leaves_handed_out_states_alone(
    made: list[Call],
) -> None:
    first, *events = written(made)
    assert isinstance(first, RolloutStarted)
    state = open_rollout(first, 0)
    running, handed_out = RunningFold(state), [state]
    for offset, event in enumerate(events, start=1):
        running.add(event, offset)
        handed_out.append(running.state())
    for offset, (event, seen) in enumerate(zip(events, handed_out[1:], strict=True), start=1):
        state = fold(state, event, offset)
        assert seen == state


@steady
@given(calls(), st.randoms(use_true_random=False))
def test_the_interleaving_of_sessions_changes_no_byte(
    made: list[Call], order: random.Random
) -> None:
    events = written(made)
    turns = {s: [e for e in events if getattr(e, "session_id", "") == s] for s in "ab"}
    choices = [s for s in "ab" for _ in turns[s]]
    order.shuffle(choices)
    shuffled = [events[0], *(turns[s].pop(0) for s in choices), events[-1]]
    assert codec.encode(made_from(shuffled)) == codec.encode(made_from(events))


def plain_conversations() -> st.SearchStrategy[list[Call]]:
    """Mostly chains; some with a turn that adds nothing, or that was sent again."""

    def made(sizes: list[tuple[int, int]], retried: int) -> list[Call]:
        fresh, whole, found = itertools.count(1), [0], list[Call]()
        for index, (num_tail, num_output) in enumerate(sizes):
            prompt = [*whole, *(next(fresh) for _ in range(num_tail))]
            output = [next(fresh) for _ in range(num_output)]
            parent = f"t{index - 1}" if index else None
            found.append(Call(f"t{index}", "main", prompt, output, parent))
            whole = [*prompt, *output]
        if retried < len(found):
            found.append(found[retried]._replace(turn_id="again", output=[next(fresh)]))
        return found

    sizes = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=8)
    return st.builds(made, sizes, st.integers(0, 40))


@steady
@given(calls() | plain_conversations(), st.sampled_from(["linear", "tree"]))
def test_a_chain_told_by_its_numbers_gives_what_a_look_at_every_token_gives(
    made: list[Call], mode: HistoryMode
) -> None:
    state = fold_all(enumerate(written(made)))
    ordered = canonical_order(state.turns.values())
    by_tokens = trajectory(state, topic="e", partition=0, mode=mode, lineage=_resolve(ordered))
    assert trajectory(state, topic="e", partition=0, mode=mode) == by_tokens


def test_most_conversations_are_chains() -> None:
    chain = [Call("t0", "main", [1], [2], None), Call("t1", "main", [1, 2, 3], [4], "t0")]
    fork = Call("t2", "main", [1, 9], [5], "t0")
    assert resolve(fold_all(enumerate(written(chain))).turns.values()).store is None
    forked = fold_all(enumerate(written([*chain, fork])))
    assert resolve(forked.turns.values()).store is not None


@steady
@given(calls(), st.data())
def test_without_one_event_nothing_is_invented(made: list[Call], data: st.DataObject) -> None:
    events = written(made)
    lost = data.draw(st.integers(1, len(events) - 2))
    result = made_from([*events[:lost], *events[lost + 1 :]], "tree")
    assert result.ledger.is_balanced
    by_id = {call.turn_id: call for call in made}
    for row in result.rows:
        ids = row.token_ids.tolist()
        for span in row.turns:
            assert ids[: span.end] == [*by_id[span.turn_id].prompt, *by_id[span.turn_id].output]
    dropped = {turn.turn_id for turn in result.ledger.turns if "gap" in turn.dropped}
    assert dropped <= {mark.split(":")[1] for mark in result.marks}

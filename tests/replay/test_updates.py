"""Which updates a turn reached."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnfold.healer.fold import fold_all
from turnfold.healer.rows import trajectory as folded
from turnfold.log.records import Record
from turnfold.replay.assignments import Assignment, Assignments
from turnfold.replay.ledger import Accounts, total
from turnfold.replay.trace import lines, trace
from turnfold.replay.updates import Sizes, check_steps, placements, schedule_of
from turnfold.schemas import codec
from turnfold.schemas.batches import (
    BatchCut,
    GroupDropped,
    GroupRef,
    LeftOut,
    Positions,
    RolloutRef,
)
from turnfold.schemas.errors import UserError
from turnfold.schemas.policies import PolicyPublished, UpdateSchedule
from turnfold.schemas.run import RunConfig
from turnfold.schemas.testing import RolloutScript, started, turn
from turnfold.schemas.trajectories import Trajectory

NOWHERE = Positions(tasks={}, trajectories={})
CONFIG = RunConfig(group_size=2, groups_per_batch=4)


def ref(rollout_id: str, num_rows: int = 1) -> RolloutRef:
    return RolloutRef(
        rollout_id=rollout_id,
        index=0,
        partition=0,
        offset=0,
        digest="",
        reward=1.0,
        num_rows=num_rows,
        num_tokens=7,
        num_trained=3,
        max_row_tokens=7,
        min_policy_version=0,
        max_policy_version=0,
    )


def cut(index: int, *groups: GroupRef) -> BatchCut:
    return BatchCut(
        run_id="default",
        index=index,
        groups=groups,
        positions=NOWHERE,
        at=0.0,
        config_digest=CONFIG.digest,
        config=CONFIG,
    )


def group(group_id: str, *rollouts: str, left_out: tuple[LeftOut, ...] = ()) -> GroupRef:
    return GroupRef(
        group_id=group_id,
        dispatch_index=0,
        rollouts=tuple(ref(rollout) for rollout in rollouts),
        left_out=left_out,
    )


def dropped(group_id: str, reason: str, *left_out: LeftOut) -> GroupDropped:
    return GroupDropped(
        run_id="default",
        group_id=group_id,
        dispatch_index=0,
        reason=reason,
        left_out=left_out,
        positions=NOWHERE,
        at=0.0,
        config_digest="",
    )


def published(version: int, **metrics: float) -> PolicyPublished:
    return PolicyPublished(
        run_id="default", policy_version=version, weights_uri="", metrics=metrics
    )


def assigned() -> Assignments:
    """Batch 1 is trained, batch 2 is not; one group was stale."""
    found = Assignments()
    superseded = LeftOut(rollout_id="g1-again", reason="superseded")
    found.add_decision(cut(1, group("g1", "g1-00", "g1-01", left_out=(superseded,))))
    found.add_decision(cut(2, group("g2", "g2-00")))
    stale = LeftOut(rollout_id="g3-00", reason="stale")
    aborted = LeftOut(rollout_id="g3-01", reason="aborted:deadline")
    found.add_decision(dropped("g3", "stale", stale, aborted))
    found.add_policy(published(1))
    return found


@pytest.mark.parametrize(
    ("rollout_id", "expected"),
    [
        ("g1-00", Assignment(batch=1, is_trained=True)),
        ("g1-again", Assignment(reason="left_out:superseded")),
        ("g1-late", Assignment(reason="group_decided_before")),
        ("g2-00", Assignment(batch=2)),
        ("g3-00", Assignment(reason="group_dropped:stale")),
        ("g3-01", Assignment(reason="left_out:aborted:deadline")),
        ("g4-00", Assignment()),
    ],
)
def test_what_was_decided_about_a_rollout(rollout_id: str, expected: Assignment) -> None:
    assert assigned().of("default", rollout_id.split("-")[0], rollout_id) == expected


def test_the_first_of_two_manifests_with_one_index_counts() -> None:
    found = assigned()
    found.add_decision(cut(2, group("g9", "g9-00")))
    assert found.of("default", "g9", "g9-00") == Assignment()


def ended(rollout_id: str, num_sampled: int = 3) -> Trajectory:
    """A rollout of one turn with 3 sampled tokens and one without any."""
    script = RolloutScript(rollout_id, group_id=rollout_id.split("-")[0])
    script.turn("t0", [1, 2], [3] * num_sampled)
    script.turn("t1", [1, 2] + [3] * num_sampled + [4], [], parent="t0")
    script.finish(1.0)
    return folded(fold_all(enumerate(script.events)), topic="turnfold.events", partition=0)


def accounts(*rollouts: str) -> Accounts:
    found = Accounts(assigned())
    for rollout_id in rollouts:
        events = (started(rollout_id), turn(rollout_id, "t0", prompt=[1, 2], output=[3, 3, 3]))
        for offset, event in enumerate(events):
            found.add_event(
                Record(
                    topic="turnfold.events",
                    partition=0,
                    offset=offset,
                    key=rollout_id.encode(),
                    value=codec.encode(event),
                    timestamp=0.0,
                )
            )
        if rollout_id != "g5-00":
            found.add_trajectory(ended(rollout_id))
    return found


def test_the_account_follows_tokens_through_the_decisions() -> None:
    found = total(accounts("g1-00", "g1-again", "g2-00", "g3-00", "g4-00", "g5-00").by_rollout())
    assert found.trained == 3
    assert found.dropped == {"left_out:superseded": 3, "group_dropped:stale": 3}
    assert found.waiting == {"not_trained_yet": 3, "no_batch_yet": 3, "in_flight": 3}
    assert found.is_balanced
    assert found.num_sampled == 18


def test_a_turn_is_followed_to_its_optimizer_steps() -> None:
    found = trace(
        "t0",
        "g1-01",
        {"g1-00": ended("g1-00"), "g1-01": ended("g1-01")},
        assigned(),
        Sizes(groups_per_mini_batch=2, num_epochs=2),
    )
    assert (found.start, found.end, found.num_row_tokens) == (2, 5, 5)
    assert found.placement is not None
    assert found.placement.steps in ((1, 3), (2, 4))
    assert "batch        1, policy 0 → 1, trained" in "\n".join(lines(found))


def test_a_turn_of_a_dropped_group_reached_no_update() -> None:
    found = trace("t0", "g3-00", {"g3-00": ended("g3-00")}, assigned(), Sizes())
    assert found.placement is None
    assert "batch        none: group_dropped:stale" in "\n".join(lines(found))


def test_a_turn_that_is_not_in_the_trajectory_came_late() -> None:
    with pytest.raises(UserError, match="g1-00, turn t9: came after the rollout had ended"):
        trace("t9", "g1-00", {"g1-00": ended("g1-00")}, assigned(), Sizes())


def test_sizes_that_the_trainer_did_not_have_are_refused() -> None:
    schedule = schedule_of(cut(1), Sizes(groups_per_mini_batch=2))
    check_steps(schedule, published(1, optimizer_steps=2.0))
    check_steps(schedule, None)
    with pytest.raises(
        UserError, match=r"the trainer took 4 optimizer steps for batch 1, .* give 2"
    ):
        check_steps(schedule, published(1, optimizer_steps=4.0))


def logged(version: int, num_mini_batches: int = 2, epochs: int = 2) -> PolicyPublished:
    steps = num_mini_batches * epochs
    schedule = UpdateSchedule(num_mini_batches=num_mini_batches, epochs=epochs, steps=steps)
    return PolicyPublished(
        run_id="default", policy_version=version, weights_uri="", schedule=schedule
    )


def traced(decided: Assignments, sizes: Sizes) -> tuple[int, ...]:
    batch = {"g1-00": ended("g1-00"), "g1-01": ended("g1-01")}
    placement = trace("t0", "g1-01", batch, decided, sizes).placement
    assert placement is not None
    return placement.steps


def test_a_turn_needs_no_options_when_the_trainer_has_logged_its_schedule() -> None:
    decided = assigned()
    decided.add_policy(logged(1))
    given = Sizes(groups_per_mini_batch=2, num_epochs=2)
    assert traced(decided, Sizes()) == traced(assigned(), given)


def test_the_newest_schedule_stands_for_a_batch_whose_record_was_compacted() -> None:
    decided = assigned()
    decided.add_policy(logged(2))
    assert len(traced(decided, Sizes())) == 2


def test_a_schedule_of_its_own_counts_for_a_batch_before_a_newer_one() -> None:
    decided = assigned()
    decided.add_policy(logged(1, epochs=3))
    decided.add_policy(logged(2, epochs=1))
    assert len(traced(decided, Sizes())) == 3


def test_options_that_contradict_the_log_are_refused() -> None:
    decided = assigned()
    decided.add_policy(logged(1))
    with pytest.raises(UserError, match="num_epochs 5 was given, but the trainer logged 2"):
        traced(decided, Sizes(num_epochs=5))


def test_logged_mini_batches_that_do_not_divide_the_batch_are_an_error() -> None:
    decided = assigned()
    decided.add_policy(logged(1, num_mini_batches=3))
    with pytest.raises(UserError, match="3 mini-batches, which do not divide the 4 groups"):
        traced(decided, Sizes())


@given(
    rows=st.lists(st.lists(st.integers(2, 50), min_size=1, max_size=3), min_size=4, max_size=8),
    num_epochs=st.integers(1, 3),
    num_ranks=st.integers(1, 3),
)
def test_every_row_is_placed_once_and_a_rollout_stays_in_one_mini_batch(
    rows: list[list[int]], num_epochs: int, num_ranks: int
) -> None:
    lengths = {f"r{index}": sizes for index, sizes in enumerate(rows)}
    groups = [group(f"g{index % 4}", f"r{index}") for index in range(4)]
    manifest = cut(3, *groups)
    sizes = Sizes(groups_per_mini_batch=2, num_epochs=num_epochs, num_ranks=num_ranks)
    placed = placements(manifest, lengths, schedule_of(manifest, sizes))
    expected = {(f"r{i}", row) for i in range(4) for row in range(len(rows[i]))}
    assert placed.keys() == expected
    for index in range(4):
        assert len({placed[f"r{index}", row].mini_batch for row in range(len(rows[index]))}) == 1
    for placement in placed.values():
        assert len(placement.steps) == num_epochs
        assert placement.run_steps[0] == 2 * 2 * num_epochs + placement.steps[0]

"""The account of a log, counted from its events."""

import msgspec
import pytest

from turnfold.healer.partition import PartitionFold, Released
from turnfold.log.records import Record
from turnfold.replay.ledger import Account, Accounts, total
from turnfold.schemas import codec
from turnfold.schemas.events import Event
from turnfold.schemas.testing import RolloutScript, turn
from turnfold.schemas.trajectories import Trajectory


def records(*events: Event) -> list[Record]:
    return [
        Record(
            topic="turnfold.events",
            partition=0,
            offset=offset,
            key=event.rollout_id.encode(),
            value=codec.encode(event),
            timestamp=0.0,
        )
        for offset, event in enumerate(events)
    ]


def accounted(log: list[Record]) -> Accounts:
    accounts, fold = Accounts(), PartitionFold("turnfold.events", 0)
    for record in log:
        accounts.add_event(record)
        for outcome in fold.feed(record):
            if isinstance(outcome, Released):
                accounts.add_trajectory(outcome.trajectory)
    return accounts


def example() -> list[Record]:
    done = RolloutScript("done", run_id="a")
    done.turn("t0", [1, 2], [3])
    done.turn("t1", [1, 2, 3, 4], [5, 6], parent="t0")
    done.turn("t1-again", [1, 2, 3, 4], [7], parent="t0")
    done.finish()
    lost = RolloutScript("lost", run_id="a")
    lost.turn("t0", [1], [2, 3, 4])
    lost.abort("deadline")
    running = RolloutScript("running", run_id="b")
    running.turn("t0", [1], [2])
    late = turn("done", "t9", prompt=[1], output=[2, 3])
    nobody = turn("nobody", "t0", prompt=[1], output=[2])
    return records(*done.events, *lost.events, *running.events, late, late, nobody)


def test_every_token_of_a_log_is_accounted_for() -> None:
    accounts = {a.name: a for a in accounted(example()).by_rollout()}
    assert all(account.is_balanced for account in accounts.values())
    assert (accounts["done"].num_sampled, accounts["done"].trained) == (6, 2)
    assert accounts["done"].dropped == {"orphan": 2, "after_the_end": 2}
    assert accounts["lost"].dropped == {"rollout_aborted:deadline": 3}
    assert accounts["running"].waiting == {"in_flight": 1}
    assert accounts["nobody"].dropped == {"never_started": 1}


@pytest.mark.field_case("NeMo Gym#2750")
def test_finished_failed_and_unresolved_rollouts_are_told_apart() -> None:
    accounts = {a.name: a for a in accounted(example()).by_rollout()}
    assert {name: account.status for name, account in accounts.items()} == {
        "done": "completed",
        "lost": "aborted",
        "running": "in_flight",
        "nobody": "never_started",
    }


def test_runs_are_the_sum_of_their_rollouts() -> None:
    runs = {a.name: a for a in accounted(example()).by_run()}
    assert {name: (a.num_rollouts, a.num_sampled) for name, a in runs.items()} == {
        "?": (1, 1),
        "a": (2, 9),
        "b": (1, 1),
    }
    everything = total(runs.values())
    assert (everything.num_sampled, everything.num_accounted) == (11, 11)
    assert everything.is_balanced


def test_a_ledger_that_lost_a_token_is_noticed() -> None:
    accounts = Accounts()
    log = example()
    for record in log:
        accounts.add_event(record)
    accounts.add_trajectory(without_a_token(finished(log)))
    (account,) = (a for a in accounts.by_rollout() if a.name == "done")
    assert not account.is_balanced


def finished(log: list[Record]) -> Trajectory:
    fold = PartitionFold("turnfold.events", 0)
    outcomes = [outcome for record in log for outcome in fold.feed(record)]
    return next(o.trajectory for o in outcomes if isinstance(o, Released))


def without_a_token(made: Trajectory) -> Trajectory:
    first, *others = made.ledger.turns
    poorer = msgspec.structs.replace(first, num_sampled=0, num_trained=0)
    ledger = msgspec.structs.replace(made.ledger, turns=(poorer, *others))
    return msgspec.structs.replace(made, ledger=ledger)


def test_an_empty_account_is_balanced() -> None:
    assert Account(name="nothing").is_balanced

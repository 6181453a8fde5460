"""What is done to whom is a function of the seed."""

from collections import Counter
from itertools import islice

from turnfold.embedded.chaos import faults
from turnfold.embedded.chaos.faults import (
    BROKER,
    KILL,
    KINDS,
    SERVICES,
    every_fault,
    one_of_each_kind,
    schedule,
    usual_faults,
    without_broker,
)
from turnfold.embedded.chaos.report import Report


def test_the_same_seed_gives_the_same_faults() -> None:
    first = list(islice(schedule(7, usual_faults()), 300))
    assert first == list(islice(schedule(7, usual_faults()), 300))
    assert first != list(islice(schedule(8, usual_faults()), 300))


def test_each_fault_comes_as_often_as_the_others_and_a_kill_three_times_as_often() -> None:
    two_rounds = islice(schedule(7, usual_faults()), 2 * len(usual_faults()))
    counts = Counter(fault.name for fault in two_rounds)
    assert set(counts) == {fault.name for fault in every_fault()}
    assert {n for name, n in counts.items() if name.startswith(KILL)} == {6}
    assert {n for name, n in counts.items() if not name.startswith(KILL)} == {2}


def test_every_service_is_killed_and_every_kind_of_fault_comes() -> None:
    assert {fault.kind for fault in every_fault()} == set(KINDS)
    few = one_of_each_kind(every_fault())
    assert {fault.kind for fault in few} == set(KINDS)
    assert len(few) == len(SERVICES) + len(KINDS) - 1
    for chosen in (every_fault(), few):
        assert {fault.target for fault in chosen if fault.kind == KILL} == set(SERVICES)


def test_a_broker_that_is_not_ours_is_left_alone() -> None:
    left = without_broker(usual_faults())
    assert BROKER not in {fault.target for fault in left}
    assert {fault.kind for fault in left} == set(KINDS) - {faults.DISK_FILLS}


def test_the_report_counts_faults_by_kind_and_names_what_does_not_hold() -> None:
    report = Report(seed=7, problems={"all is well": [], "nothing is lost": ["turn t0"]})
    report.faults.update({"kill -9: broker": 3, "kill -9: healer": 2, "slow broker": 1})
    text = "\n".join(report.lines())
    assert "| kill -9 | 5 | 3 broker, 2 healer |" in text
    assert "| slow broker | 1 |  |" in text
    assert "| all | 6 | |" in text
    assert "all is well: yes" in text
    assert "nothing is lost: NO, 1, such as turn t0" in text
    assert report.failed == {"nothing is lost": ["turn t0"]}

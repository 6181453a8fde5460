"""A pipeline with every kind of fault: nothing acknowledged is lost, nothing is doubled.

`make chaos` runs the long form and prints its report. TURNFOLD_CHAOS_SEED, TURNFOLD_CHAOS_FAULTS and
TURNFOLD_CHAOS_SECONDS set other sizes; TURNFOLD_CHAOS_REPORT names a file for the report as JSON.
With TURNFOLD_TEST_BOOTSTRAP=host:port the same runs on that broker, in topics of their own, and leave
the broker itself alone.
"""

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient

from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.embedded.chaos.app import Options, run
from turnfold.embedded.chaos.faults import (
    BROKER,
    CLOCK_AHEAD,
    CLOCK_BEHIND,
    every_fault,
    one_of_each_kind,
    without_broker,
)
from turnfold.embedded.chaos.report import Report

pytestmark = [pytest.mark.pipeline]

JUMPS = (CLOCK_AHEAD, CLOCK_BEHIND)
BOOTSTRAP = os.environ.get("TURNFOLD_TEST_BOOTSTRAP", "")


def disturbed(run_dir: Path, options: Options) -> Report:
    report = asyncio.run(run(run_dir, options))
    print("\n".join(["", *report.lines()]))
    if path := os.environ.get("TURNFOLD_CHAOS_REPORT"):
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return report


def short(bootstrap: str) -> Options:
    """Every process is killed and everything else happens once, closely packed."""
    possible = without_broker(every_fault()) if bootstrap else every_fault()
    # A clock that is wrong by less, so that no deadline lies far ahead when the faults are over.
    faults = [
        msgspec.structs.replace(fault, amount=2.0) if fault.kind in JUMPS else fault
        for fault in one_of_each_kind(possible)
    ]
    return Options(
        seed=1,
        num_faults=len(faults),
        max_seconds=90,
        faults=faults,
        longest_gap_s=1.0,
        rollout_timeout_s=12.0,
        bootstrap=bootstrap,
    )


# Nothing finished is lost with the trainer (verl#7579), no group with the worker that held it
# (miles#2254), no row of the data set is skipped or taken twice (NeMo RL#3599), and agents go on
# when the gateway that knew their sessions is another one (miles#888).
@pytest.mark.field_case("verl#7579")
@pytest.mark.field_case("miles#2254")
@pytest.mark.field_case("NeMo RL#3599")
@pytest.mark.field_case("miles#888")
@pytest.mark.timeout(600)
def test_a_pipeline_survives_each_kind_of_fault(tmp_path: Path) -> None:
    options = short(BOOTSTRAP)
    report = disturbed(tmp_path, options)
    assert report.failed == {}
    # A process that is down from one fault can not be paused, say, by the next.
    missing = {fault.name for fault in options.faults} - set(report.faults)
    assert len(missing) <= 3
    assert report.num_turns > 30


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_broker_of_somebody_else_is_left_as_it_was(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "broker", auto_create_topics=False) as broker:
        pid = broker.pid
        report = disturbed(tmp_path, short(broker.bootstrap))
        assert report.failed == {}
        assert report.broker == broker.bootstrap
        assert BROKER not in {name.partition(": ")[2] for name in report.faults}
        assert asyncio.run(topics_of(broker.bootstrap)) == []
        assert broker.pid == pid
        assert broker.stop() == 0


async def topics_of(bootstrap: str) -> list[str]:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        return [name for name in await admin.list_topics() if not name.startswith("__")]
    finally:
        await admin.close()


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_a_pipeline_survives_faults_without_a_pause(tmp_path: Path) -> None:
    options = Options(
        seed=int(os.environ.get("TURNFOLD_CHAOS_SEED", "1")),
        num_faults=int(os.environ.get("TURNFOLD_CHAOS_FAULTS", "1000")),
        num_rollouts=200,
        max_seconds=float(os.environ.get("TURNFOLD_CHAOS_SECONDS", "5400")),
        bootstrap=BOOTSTRAP,
        is_verbose=True,
    )
    report = disturbed(tmp_path, options)
    assert report.failed == {}
    assert report.num_rollouts >= 200
    assert report.num_faults >= options.num_faults

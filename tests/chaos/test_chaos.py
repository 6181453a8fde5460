"""A pipeline with every kind of fault: nothing acknowledged is lost, nothing is doubled.

`make chaos` runs the long form and prints its report. TURNFOLD_CHAOS_SEED, TURNFOLD_CHAOS_FAULTS and
TURNFOLD_CHAOS_SECONDS set other sizes.
"""

import asyncio
import os
from pathlib import Path

import pytest

from turnfold.embedded.chaos.app import Options, run
from turnfold.embedded.chaos.faults import FULL_DISK, KILL, PAUSE, REDELIVER, Fault, every_kind
from turnfold.embedded.chaos.findings import Report

pytestmark = [pytest.mark.pipeline, pytest.mark.timeout(900)]

SHORT = [
    *(fault for fault in every_kind() if fault.kind == KILL and fault.service != "engine"),
    Fault(kind=PAUSE, service="broker", seconds=1.0),
    Fault(kind=FULL_DISK, service="broker", seconds=0.5),
    Fault(kind=REDELIVER, num_events=50),
]


def disturbed(run_dir: Path, options: Options) -> Report:
    report = asyncio.run(run(run_dir, options))
    print("\n".join(report.lines()))
    return report


def test_a_pipeline_survives_each_fault_once(tmp_path: Path) -> None:
    options = Options(seed=1, num_faults=len(SHORT), num_rollouts=0, max_seconds=120, kinds=SHORT)
    report = disturbed(tmp_path, options)
    assert report.num_faults >= len(SHORT)
    assert report.num_acknowledged > 30
    assert {claim: wrong for claim, wrong in report.problems.items() if wrong} == {}


@pytest.mark.slow
def test_a_pipeline_survives_faults_without_a_pause(tmp_path: Path) -> None:
    options = Options(
        seed=int(os.environ.get("TURNFOLD_CHAOS_SEED", "1")),
        num_faults=int(os.environ.get("TURNFOLD_CHAOS_FAULTS", "1000")),
        num_rollouts=200,
        max_seconds=float(os.environ.get("TURNFOLD_CHAOS_SECONDS", "420")),
    )
    report = disturbed(tmp_path, options)
    assert report.num_rollouts >= 200
    assert {claim: wrong for claim, wrong in report.problems.items() if wrong} == {}

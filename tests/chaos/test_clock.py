"""A process under a clock that is set wrong sees the wrong time, and nothing else differs."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from turnfold.embedded.chaos.clock import Clocks

PROGRAM = """
import sys, time
from time import time as imported
for line in sys.stdin:
    print(time.time(), imported(), time.monotonic(), *sys.argv[1:], __name__, flush=True)
"""


@pytest.fixture
def clocks(tmp_path: Path) -> Clocks:
    return Clocks(tmp_path / "clocks", ["healer", "gateway"])


def shown_by(program: subprocess.Popen[str]) -> list[str]:
    assert program.stdin is not None
    assert program.stdout is not None
    program.stdin.write("\n")
    program.stdin.flush()
    return program.stdout.readline().split()


def test_a_running_process_follows_its_clock(
    clocks: Clocks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    launcher = ("-m", "turnfold.embedded.chaos.clock", str(clocks.paths["healer"]))
    with subprocess.Popen(
        [sys.executable, *launcher, "told", "--option"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        for shift, expected in ((0.0, 0.0), (1000.0, 1000.0), (-3000.0, -2000.0)):
            clocks.shift("healer", shift)
            clocks.shift("gateway", 5.0)  # another process
            begun, begun_monotonic = time.time(), time.monotonic()
            now, imported, monotonic, *rest = shown_by(program)
            ended, ended_monotonic = time.time(), time.monotonic()
            assert begun + expected <= float(now) <= float(imported) <= ended + expected
            assert begun_monotonic <= float(monotonic) <= ended_monotonic
            assert rest == ["--option", "__main__"]


def test_all_clocks_move_by_the_same(clocks: Clocks) -> None:
    clocks.shift("healer", 1.0)
    clocks.shift_all(10.0)
    assert clocks.paths["healer"].read_bytes() != clocks.paths["gateway"].read_bytes()
    clocks.shift("healer", -1.0)
    assert clocks.paths["healer"].read_bytes() == clocks.paths["gateway"].read_bytes()

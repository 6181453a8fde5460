"""Jobs in processes of their own: what they return, how they fail, and that none is left behind."""

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest

from turnfold.replay.client import OnProgress
from turnfold.replay.processes import app as processes
from turnfold.replay.processes.app import Job, Share, divided
from turnfold.schemas.errors import UserError

T = TypeVar("T")

FOLDER = Path(__file__).parent
PATIENCE_S = 20.0


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("jobs")


def run(job: Job[T], number: int, on_progress: OnProgress = lambda _: None) -> list[T]:
    return asyncio.run(divided(job, number, on_progress))


@pytest.mark.parametrize("number", [1, 3])
def test_each_share_is_done_once_and_what_was_read_is_told(jobs: ModuleType, number: int) -> None:
    told: list[int] = []
    found = run(partial(jobs.describe, told=2), number, told.append)
    assert [index for index, _ in found] == list(range(number))
    assert len({pid for _, pid in found}) == number
    assert (os.getpid() in {pid for _, pid in found}) == (number == 1)
    assert sum(told) == 4 * number


def test_the_shares_of_all_processes_are_the_whole() -> None:
    shares = [Share(index, 3).of_partitions(range(8)) for index in range(3)]
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert Share().of_partitions(range(8)) == list(range(8))


def test_an_error_for_users_keeps_its_text_and_ends_the_others(jobs: ModuleType) -> None:
    with pytest.raises(UserError, match=r"^nothing in there$"):
        run(partial(jobs.fail, is_for_users=True), 2)


def test_any_other_error_comes_with_its_traceback(jobs: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)in a process of its own:.*KeyError: 'lost'"):
        run(partial(jobs.fail, is_for_users=False), 2)


def test_a_process_that_dies_is_named(jobs: ModuleType) -> None:
    with pytest.raises(UserError, match=r"ended by itself \(exit code -9\)"):
        run(jobs.die, 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_command(tmp_path: Path, number: signal.Signals) -> None:
    """SIGINT as from a terminal, to all of them; the others to the command alone."""
    code = "import jobs, pathlib, sys; jobs.main(pathlib.Path(sys.argv[1]))"
    command = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=FOLDER,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    if number == signal.SIGINT:
        os.killpg(command.pid, number)
    else:
        command.send_signal(number)
    # The pipe ends with the last process that holds it.
    _, said = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == (130 if number == signal.SIGINT else -number)
    assert said == b""
    until(lambda: not any(is_running(int(file.name)) for file in tmp_path.iterdir()))


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_several_processes_are_for_a_long_log(monkeypatch: pytest.MonkeyPatch) -> None:
    class Log:
        async def num_records(self, _: str) -> int:
            return 100

        async def num_partitions(self, _: object) -> dict[str, int]:
            return {"events": 3}

    def suitable() -> int:
        return asyncio.run(processes.suitable_number(Log(), "events"))  # type: ignore[arg-type]

    assert suitable() == 1
    monkeypatch.setattr(processes, "_WORTHWHILE_RECORDS", 100)
    assert suitable() == min(len(os.sched_getaffinity(0)), 3)

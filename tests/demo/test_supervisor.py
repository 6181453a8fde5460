"""Processes are started, watched, started again and stopped."""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from turnfold.embedded.demo.supervisor import ServiceFailed, ServiceSpec, Supervisor


def python(name: str, code: str, **fields: object) -> ServiceSpec:
    return ServiceSpec(name=name, argv=(sys.executable, "-c", code), **fields)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


SLEEP = "import time; print('up', flush=True); time.sleep(600)"


async def test_a_killed_service_is_started_again(tmp_path: Path) -> None:
    async with Supervisor([python("a", SLEEP)], tmp_path, os.environ) as services:
        services["a"].kill9()
        await until(lambda: services["a"].num_starts == 2 and services["a"].is_running)
    assert not services["a"].is_running


async def test_a_service_that_ends_well_is_not_started_again(tmp_path: Path) -> None:
    async with Supervisor([python("a", "pass")], tmp_path, os.environ) as services:
        await services["a"].wait()
        await asyncio.sleep(0)
        assert services["a"].num_starts == 1


async def test_a_service_that_keeps_failing_is_reported_with_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    spec = python("a", "import sys; sys.exit('no such model')")
    services = Supervisor([spec], tmp_path, os.environ, max_restarts=2, restart_delay_s=0)
    async with services:
        await asyncio.wait_for(services.wait_failed(), 30)
    assert services["a"].num_starts == 3
    assert "no such model" in str(services.failure)


async def test_services_stop_in_reverse_order(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "def stop(*_):\n"
        "    open({path!r}, 'a').write({name!r}); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)"
    )
    order = tmp_path / "order"
    specs = [python(name, code.format(path=str(order), name=name)) for name in "ab"]
    async with Supervisor(specs, tmp_path, os.environ) as services:
        for name in "ab":
            await until(lambda name=name: "up" in services[name].log_path.read_text())
    assert order.read_text() == "ba"


async def test_a_service_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
    spec = python("a", code, stop_timeout_s=0.3)
    async with Supervisor([spec], tmp_path, os.environ) as services:
        await until(lambda: "up" in services["a"].log_path.read_text())
    assert services["a"].returncode == -9


async def test_waiting_for_a_service_that_ended_says_so(tmp_path: Path) -> None:
    spec = python("a", "print('port taken')", ready_url="http://127.0.0.1:9/")
    async with Supervisor([spec], tmp_path, os.environ) as services:
        with pytest.raises(ServiceFailed, match=r"ended with code 0 before it was ready"):
            await services.wait_until_ready()

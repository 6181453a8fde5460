"""Real brokers for tests: each is a process of its own, which can be killed and started again.

@pytest.fixture(scope="session")
def broker(tmp_path_factory):
    with BrokerProcess(tmp_path_factory.mktemp("broker")) as broker:
        yield broker

def test_survives_a_crash(broker):
    ...
    broker.kill9()
    broker.start()     # same port, same data
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

import turnfold

BOOTSTRAP_VARIABLE = "TURNFOLD_TEST_BOOTSTRAP"
"""Names a broker that is not ours, host:port, for the tests that can do with any."""

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class ExternalBroker:
    """A broker that somebody else runs: it can be used, and neither killed nor configured."""

    bootstrap: str
    """`host:port` for clients."""


class BrokerProcess:
    """A development broker in a subprocess, with its data in `directory`.

    The first start takes a free port, later ones the same again. The process ends with the one that started
    it, whatever happens to that. Its output is in `broker.log` in the directory. `options` are further ones
    of `turnfold broker`.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        port: int = 0,
        fsync: bool = False,
        auto_create_topics: bool = True,
        options: Sequence[str] = (),
    ) -> None:
        self.directory = Path(directory)
        self.host = "127.0.0.1"
        self.port = port
        self.fsync = fsync
        self.auto_create_topics = auto_create_topics
        self.options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients. There is none before the first start."""
        assert self.port, "the broker has not been started"
        return f"{self.host}:{self.port}"

    @property
    def data(self) -> Path:
        """The broker's data directory."""
        return self.directory / "data"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker has not been started"
        return self._process.pid

    def start(self) -> Self:
        """Start the process and wait until it listens. Raises RuntimeError with its output if it does not."""
        assert self._process is None, "the broker is running"
        self.directory.mkdir(parents=True, exist_ok=True)
        ready_file = self.directory / "ready"
        ready_file.unlink(missing_ok=True)
        with (self.directory / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(ready_file),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(),
            )
        self._wait_until_ready(ready_file)
        self.port = int(ready_file.read_text(encoding="utf-8").rpartition(":")[2])
        return self

    def kill9(self) -> None:
        """Kill the process without a warning."""
        if self._process is not None:
            self._process.kill()
            self._reap()

    def stop(self) -> int:
        """Ask the process to shut down, wait for it, and return its exit status."""
        assert self._process is not None, "the broker is not running"
        self._process.terminate()
        return self._reap()

    def wait(self) -> int:
        """Wait for the process to end by itself, and return its exit status."""
        return self._reap()

    def output(self) -> str:
        """What the process, and its predecessors, printed."""
        return (self.directory / "broker.log").read_text(encoding="utf-8")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self.stop()

    def _command(self, ready_file: Path) -> list[str]:
        command = [sys.executable, "-m", "turnfold.embedded.broker", "--exit-with-parent"]
        command += ["--data", str(self.data), "--host", self.host, "--port", str(self.port)]
        command += ["--ready-file", str(ready_file), *self.options]
        command += [
            "--auto-create-topics" if self.auto_create_topics else "--no-auto-create-topics"
        ]
        return [*command, "--fsync"] if self.fsync else command

    def _wait_until_ready(self, ready_file: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill9()
                raise RuntimeError(f"the broker did not start:\n{self.output()}")
            time.sleep(0.01)

    def _reap(self) -> int:
        assert self._process is not None
        process, self._process = self._process, None
        try:
            status = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        assert process.stdin is not None
        process.stdin.close()
        return status


RunningBroker: TypeAlias = BrokerProcess | ExternalBroker


def _environment() -> dict[str, str]:
    """Our environment, in which the child finds the same `turnfold` that we have imported."""
    roots = [str(Path(path).parent) for path in turnfold.__path__]
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*roots, *([inherited] if inherited else [])]),
    }

"""For tests and benchmarks: a tiny model, and a real server as a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
POLL_INTERVAL_S = 0.05


def tiny_model(directory: Path, seed: int = 0) -> Path:
    """The tiny model in `directory`, built in about half a minute unless it is there already."""
    from turnfold.embedded.tiny.build import build
    from turnfold.embedded.tiny.recipe import Recipe

    build(directory, Recipe(seed=seed))
    return directory


@dataclass(frozen=True)
class ServerProcess:
    """A running inference server."""

    base_url: str
    process: "subprocess.Popen[bytes]"
    log_path: Path
    """Everything the server printed."""

    def stop(self) -> int:
        """Ask it to end, wait, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill9(self) -> None:
        """End it without warning, as a crash would."""
        self.process.kill()
        self.process.wait(STOP_TIMEOUT_S)


@contextlib.contextmanager
def inference_server(model_dir: Path, *options: str, port: int = 0) -> Iterator[ServerProcess]:
    """A server on a free port, or on `port`, that is gone when the block ends.

    `options` are further ones of `turnfold inference`, such as `"--slots", "4"`.

    Raises:
        RuntimeError: it ended or was not ready in time; the message holds what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="turnfold-inference-") as scratch:
        ready_file, log_path = Path(scratch) / "ready.json", Path(scratch) / "server.log"
        command = [sys.executable, "-m", "turnfold.embedded.inference", "--model", str(model_dir)]
        command += ["--port", str(port), "--ready-file", str(ready_file), *options]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=_environment())
        try:
            base_url = _wait_until_ready(process, ready_file, log_path)
            yield ServerProcess(base_url, process, log_path)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(STOP_TIMEOUT_S)


def _wait_until_ready(process: "subprocess.Popen[bytes]", ready_file: Path, log_path: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready_file.exists():
        if process.poll() is not None:
            raise RuntimeError(
                f"the server ended with {process.returncode}: {log_path.read_text()}"
            )
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"the server was not ready in {START_TIMEOUT_S} s: {log_path.read_text()}"
            )
        time.sleep(POLL_INTERVAL_S)
    return str(json.loads(ready_file.read_bytes())["base_url"])


def _environment() -> dict[str, str]:
    """This environment with our import paths, so that an uninstalled checkout works too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

"""Weights through a checkpoint engine of verl, next to the directory of a version."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from turnfold.trainer import weights

pytestmark = pytest.mark.verl

EXAMPLES = Path(__file__).parents[2] / "examples"
ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"

NewLog = Callable[[], Awaitable[Any]]
Train = Callable[..., Awaitable[None]]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@pytest.mark.timeout(1500)
async def test_a_backend_named_in_verls_configuration_sends_every_version_before_it_is_published(
    new_log: NewLog, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.syspath_prepend(str(EXAMPLES))
    log, port = await new_log(), free_port()
    await log.add_batch(1)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    receiver = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLES / "weights_over_gloo.py"), "--port", str(port)),
        *("--versions", "2", "--to", str(tmp_path / "received")),
        env=environment,
    )
    try:
        await train(
            log,
            tmp_path / "run",
            1,
            overrides=(
                f"{ENGINE}.backend=gloo",
                f"{ENGINE}.custom_backend_module=gloo_engine",
                f"+{ENGINE}.engine_kwargs.gloo.port={port}",
            ),
        )
        assert await asyncio.wait_for(receiver.wait(), 60) == 0
    finally:
        if receiver.returncode is None:
            receiver.kill()
    assert [event.policy_version for event in await log.published()] == [0, 1]
    for version in (0, 1):
        sent = load_file(tmp_path / "received" / f"{version}.safetensors")
        written = load_file(
            weights.version_dir(tmp_path / "run" / "weights", version) / "model.safetensors"
        )
        assert written.keys() <= sent.keys()  # tied parameters are sent twice and written once
        assert all(bool((sent[name] == written[name]).all()) for name in written)

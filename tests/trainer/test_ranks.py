"""Several ranks: the same updates, one set of files, and a restart on another number of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from turnfold.trainer import checkpoints

pytestmark = [pytest.mark.verl, pytest.mark.slow]

NewLog = Callable[[], Awaitable[Any]]
Train = Callable[..., Awaitable[None]]
Start = Callable[..., Awaitable[asyncio.subprocess.Process]]

SGD = (
    "actor_rollout_ref.actor.optim.optimizer=SGD",
    "actor_rollout_ref.actor.optim.lr=0.01",
    "actor_rollout_ref.actor.optim.weight_decay=0.0",
    "actor_rollout_ref.actor.optim.clip_grad=1e9",
)
"""Nothing but the gradient moves a parameter, and no moments are lost in a restart."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FULL = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"


@pytest.mark.parametrize(
    ("launcher", "overrides", "driver"),
    [
        (TORCHRUN, (), "process"),
        ((), ("trainer.n_gpus_per_node=2",), "ray"),
    ],
    ids=["torchrun", "ray"],
)
@pytest.mark.timeout(600)
async def test_two_ranks_train_as_one_does_and_one_goes_on_where_two_stopped(
    launcher: tuple[str, ...],
    overrides: tuple[str, ...],
    driver: str,
    new_log: NewLog,
    train: Train,
    start_process: Start,
    tmp_path: Path,
) -> None:
    one, two = await new_log(), await new_log()
    for log in (one, two):
        for index in (1, 2, 3):
            await log.add_batch(index)
    (tmp_path / "two").mkdir()
    process = await start_process(
        two,
        tmp_path / "two",
        num_batches=2,
        launcher=launcher,
        overrides=(*SGD, FULL, *overrides),
        TURNFOLD_DRIVER=driver,
    )
    await train(one, tmp_path / "one", 3, overrides=SGD, keep_weights=9)
    assert await asyncio.wait_for(process.wait(), 400) == 0, output(tmp_path / "two")
    assert_same_weights(tmp_path, 2)
    found = checkpoints.newest_good(tmp_path / "two" / "checkpoints")
    assert found is not None
    assert (found.state.batch, found.state.num_processes) == (2, 2)
    assert len(list(found.actor_dir.glob("model_world_size_2_rank_*.pt"))) == 2
    measured = [event.metrics for event in await two.published()]
    alone = [event.metrics for event in await one.published()]
    for name in ("rows", "optimizer_steps", "mismatch_kl", "grad_norm", "actor/pg_loss"):
        assert measured[2][name] == pytest.approx(alone[2][name], rel=1e-4), name

    await train(two, tmp_path / "two", 3, overrides=(*SGD, FULL))
    assert [event.policy_version for event in await two.published()] == [0, 1, 2, 3]
    assert_same_weights(tmp_path, 3)


@pytest.mark.timeout(600)
async def test_when_one_rank_is_killed_all_end_and_the_run_goes_on_where_it_was(
    new_log: NewLog, start_process: Start, tmp_path: Path
) -> None:
    log = await new_log()
    await log.add_batch(1)
    options = {"num_batches": 2, "launcher": TORCHRUN, "overrides": SGD}
    process = await start_process(log, tmp_path, **options)
    checkpoint = tmp_path / "checkpoints" / "b00000001"
    async with asyncio.timeout(300):
        while not checkpoint.exists():
            assert process.returncode is None, output(tmp_path)
            await asyncio.sleep(0.05)
    # It waits for batch 2 now, and so does the other rank, for the word of the first.
    (second,) = (p for p in psutil.Process(process.pid).children() if rank_of(p) == "1")
    second.kill()
    assert await asyncio.wait_for(process.wait(), 120) != 0
    await log.add_batch(2)
    process = await start_process(log, tmp_path, **options)
    assert await asyncio.wait_for(process.wait(), 300) == 0, output(tmp_path)
    assert [event.policy_version for event in await log.published()] == [0, 1, 2]


def rank_of(process: psutil.Process) -> str | None:
    return process.environ().get("RANK")


def output(run_dir: Path) -> str:
    return (run_dir / "trainer.log").read_text()[-4000:]


def assert_same_weights(root: Path, version: int) -> None:
    """Within 1e-6 of the largest parameter."""
    from safetensors.torch import load_file

    one, two = (
        load_file(root / name / "weights" / f"v{version:08d}" / "model.safetensors")
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    scale = max(float(tensor.abs().max()) for tensor in one.values())
    assert max(float((one[name] - two[name]).abs().max()) for name in one) <= 1e-6 * scale

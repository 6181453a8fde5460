"""The whole trainer on a real log: hand-made trajectories and manifests in, policy versions out."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from turnfold.schemas.batches import GroupDropped
from turnfold.schemas.errors import UserError
from turnfold.schemas.policies import PolicyPublished, PolicyServed, UpdateSchedule
from turnfold.trainer import checkpoints, weights
from turnfold.trainer.checkpoints import Checkpoint, State
from turnfold.trainer.client import PolicyLog
from turnfold.trainer.source import SourceError

pytestmark = pytest.mark.verl

NewLog = Callable[[], Awaitable[Any]]
Train = Callable[..., Awaitable[None]]
Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


def parameter_bytes(run_dir: Path, version: int) -> bytes:
    return (weights.version_dir(run_dir / "weights", version) / "model.safetensors").read_bytes()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(
    make_log: Callable[[str], Awaitable[Any]],
    train: Train,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Run directory of three batches trained without a stop."""
    log = await make_log("undisturbed")
    for index in (1, 2, 3):
        await log.add_batch(index)
    run_dir = tmp_path_factory.mktemp("undisturbed")
    await train(log, run_dir, 3, keep_weights=9)
    return run_dir


async def test_every_batch_makes_one_version_in_order_with_its_metrics(
    new_log: NewLog, train: Train, tmp_path: Path
) -> None:
    log = await new_log()
    await log.add_batch(1)
    await log.add_batch(2)
    await train(log, tmp_path, 2)
    published = await log.published()
    assert [event.policy_version for event in published] == [0, 1, 2]
    assert all(weights.is_valid(Path(event.weights_uri)) for event in published)
    metrics = published[2].metrics
    assert metrics["rows"] == 12
    assert metrics["padding_rows"] == 0
    assert metrics["optimizer_steps"] == 2
    assert metrics["reward_mean"] == 0.5
    assert (metrics["staleness_mean"], metrics["staleness_max"]) == (1.0, 1.0)
    assert metrics["mismatch_kl"] > 0
    assert metrics["grad_norm"] > 0
    assert metrics["ledger/trained"] == 1.0
    assert metrics["split_rollouts"] == 4
    assert published[0].schedule is None
    assert published[2].schedule == UpdateSchedule(num_mini_batches=2, steps=2)
    lines = (tmp_path / "metrics" / "from-batch-00000001.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["step"] for line in lines] == [1, 2]


async def test_the_first_manifest_of_an_index_wins_and_dropped_groups_are_passed_over(
    new_log: NewLog,
    train: Train,
    undisturbed: Path,
    tmp_path: Path,
) -> None:
    log = await new_log()
    dropped = GroupDropped(
        run_id="t",
        group_id="gone",
        dispatch_index=0,
        reason="stale",
        positions=log.positions,
        at=0.0,
        config_digest=log.run.digest,
    )
    await log.send(log.topics.batches, dropped)
    first = await log.add_batch(1)
    await log.send(log.topics.batches, msgspec.structs.replace(first, groups=first.groups[:1]))
    await log.send(log.topics.batches, msgspec.structs.replace(first, run_id="other", index=2))
    await log.add_batch(2)
    await train(log, tmp_path, 2)
    assert parameter_bytes(tmp_path, 2) == parameter_bytes(undisturbed, 2)


class Crash(Exception):
    """Stands for the death of the process at this point."""


@pytest.mark.parametrize(
    ("owner", "name"),
    [(checkpoints, "commit"), (weights, "write"), (PolicyLog, "publish")],
    ids=["before the checkpoint", "before the weights", "before the announcement"],
)
@pytest.mark.field_case("NeMo RL#3480")
async def test_a_crash_at_any_step_of_publishing_trains_no_batch_twice_and_skips_none(
    owner: Any,
    name: str,
    new_log: NewLog,
    train: Train,
    undisturbed: Path,
    tmp_path: Path,
) -> None:
    log = await new_log()
    for index in (1, 2, 3):
        await log.add_batch(index)
    original, calls = getattr(owner, name), 0

    def crashing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:  # the first call is for version 0, this one is for batch 2
            raise Crash
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, crashing)
        with pytest.raises(Crash):
            await train(log, tmp_path, 3)
    assert [event.policy_version for event in await log.published()] == [0, 1]
    await train(log, tmp_path, 3, keep_weights=9)
    published = await log.published()
    assert [event.policy_version for event in published] == [0, 1, 2, 3]
    # Also when it was announced after the restart.
    assert published[2].metrics["rows"] == 12
    assert published[2].schedule is not None
    for version in (1, 2, 3):
        assert parameter_bytes(tmp_path, version) == parameter_bytes(undisturbed, version)


@pytest.mark.timeout(600)
async def test_kill_9_and_resume_gives_the_weights_of_the_undisturbed_run(
    new_log: NewLog, start_process: Start, undisturbed: Path, tmp_path: Path
) -> None:
    log = await new_log()
    process = await start_process(log, tmp_path, num_batches=3)
    await log.add_batch(1)
    await log.add_batch(2)
    # Killed between its checkpoint and its weights, or shortly after: all must come out the same.
    checkpoint = tmp_path / "checkpoints" / "b00000002"
    await until(checkpoint.exists, lambda: process.returncode is not None)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await log.add_batch(3)
    process = await start_process(log, tmp_path, num_batches=3)
    assert await asyncio.wait_for(process.wait(), 240) == 0
    assert [event.policy_version for event in await log.published()] == [0, 1, 2, 3]
    assert parameter_bytes(tmp_path, 3) == parameter_bytes(undisturbed, 3)


async def test_a_stop_finishes_the_batch_and_leaves_a_checkpoint(
    new_log: NewLog, train: Train, tmp_path: Path
) -> None:
    log, stop = await new_log(), asyncio.Event()
    await log.add_batch(1)
    training = asyncio.ensure_future(train(log, tmp_path, 9, stop=stop, checkpoint_every=5))
    await until((tmp_path / "weights" / "v00000001").exists, training.done)
    stop.set()  # as SIGTERM does
    await training
    found = checkpoints.newest_good(tmp_path / "checkpoints")
    assert found is not None
    assert found.state.batch == 1
    assert [event.policy_version for event in await log.published()] == [0, 1]


@pytest.mark.field_case("AReaL#1290")
async def test_a_mismatch_above_the_limit_stops_the_run_before_the_batch_is_kept(
    new_log: NewLog, train: Train, tmp_path: Path
) -> None:
    log = await new_log()
    await log.add_batch(1)
    with pytest.raises(UserError, match=r"batch 1: KL between .* limit is 1e-06: engines and tr"):
        await train(log, tmp_path, 1, max_mismatch_kl=1e-6)
    assert [event.policy_version for event in await log.published()] == [0]
    await train(log, tmp_path, 1, max_mismatch_kl=1.0)
    assert [event.policy_version for event in await log.published()] == [0, 1]


async def until(
    condition: Callable[[], bool], has_ended: Callable[[], bool], deadline_s: float = 240
) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            assert not has_ended(), "the trainer ended before its time"
            await asyncio.sleep(0.002)


@pytest.mark.field_case("prime-rl#1712")
async def test_a_damaged_checkpoint_falls_back_and_retrains_to_the_same_weights(
    new_log: NewLog,
    train: Train,
    undisturbed: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = await new_log()
    for index in (1, 2, 3):
        await log.add_batch(index)
    await train(log, tmp_path, 2)
    (damaged,) = (tmp_path / "checkpoints" / "b00000002" / "actor").glob("optim_*.pt")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    await train(log, tmp_path, 3)
    assert "damaged checkpoint, taking the one before" in caplog.text
    assert [event.policy_version for event in await log.published()] == [0, 1, 2, 3]
    assert parameter_bytes(tmp_path, 3) == parameter_bytes(undisturbed, 3)


async def test_old_weights_go_but_never_those_that_engines_serve(
    new_log: NewLog, train: Train, tmp_path: Path
) -> None:
    log = await new_log()
    await log.send(log.topics.policies, PolicyServed(run_id="t", policy_version=1))
    for index in (1, 2, 3, 4):
        await log.add_batch(index)
    await train(log, tmp_path, 4, keep_weights=2, keep_checkpoints=2)
    assert weights.versions(tmp_path / "weights") == [1, 2, 3, 4]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "b00000003",
        "b00000004",
    ]
    assert (tmp_path / "weights" / "LATEST").read_text() == "v00000004"


async def test_a_run_directory_without_the_checkpoints_of_a_published_run_is_refused(
    new_log: NewLog, train: Train, tmp_path: Path
) -> None:
    log = await new_log()
    await train(log, tmp_path / "a", 0)
    with pytest.raises(UserError, match=r"run t has published policy version 0, but .* --run-dir"):
        await train(log, tmp_path / "b", 0)
    # Nor may weights that nobody knows pass for those of a new run.
    (tmp_path / "c" / "weights" / "v00000000").mkdir(parents=True)
    with pytest.raises(UserError, match="holds weights of some run"):
        await train(await new_log(), tmp_path / "c", 0)


async def test_a_run_directory_of_another_log_is_refused(
    new_log: NewLog, train: Train, tmp_path: Path
) -> None:
    log, other = await new_log(), await new_log()
    await log.add_batch(1)
    await train(log, tmp_path, 1)
    with pytest.raises(UserError, match=r"policy version 1, but the newest on .* is None"):
        await train(other, tmp_path, 2)
    await other.add_batch(1, at=5.0)
    await other.send(
        other.topics.policies, PolicyPublished(run_id="t", policy_version=1, weights_uri="")
    )
    with pytest.raises(SourceError, match="the run directory belongs to another log"):
        await train(other, tmp_path, 2)


async def test_a_batch_cut_under_another_configuration_is_refused(
    new_log: NewLog, train: Train, tmp_path: Path
) -> None:
    log = await new_log()
    await log.add_batch(1, config_digest="f00")
    with pytest.raises(SourceError, match="batch 1 was cut under run configuration f00"):
        await train(log, tmp_path, 1)


async def test_a_trajectory_that_differs_from_the_manifest_is_named(
    new_log: NewLog, train: Train, tmp_path: Path
) -> None:
    log = await new_log()
    cut = await log.add_batch(2)
    ref = msgspec.structs.replace(cut.groups[0].rollouts[0], digest="beef")
    group = msgspec.structs.replace(cut.groups[0], rollouts=(ref,))
    await log.send(log.topics.batches, msgspec.structs.replace(cut, index=1, groups=(group,)))
    with pytest.raises(SourceError, match=r"rollout b2g0-0 has digest \w+, the manifest says beef"):
        await train(log, tmp_path, 1)


async def test_a_trajectory_that_the_topic_no_longer_holds_is_named(
    new_log: NewLog, train: Train, tmp_path: Path
) -> None:
    log = await new_log()
    cut = await log.add_batch(2)
    ref = msgspec.structs.replace(cut.groups[0].rollouts[0], partition=0, offset=999)
    group = msgspec.structs.replace(cut.groups[0], rollouts=(ref,))
    await log.send(log.topics.batches, msgspec.structs.replace(cut, index=1, groups=(group,)))
    with pytest.raises(
        SourceError,
        match=rf"batch 1 trains 1 rollouts .*: {ref.rollout_id}\. .*trajectories/0@999,",
    ):
        await train(log, tmp_path, 1)


async def test_the_next_batch_trains_while_the_one_before_is_written(
    new_log: NewLog, train: Train, undisturbed: Path, tmp_path: Path
) -> None:
    from turnfold.trainer.backend import TrainerBackend

    log = await new_log()
    await log.add_batch(1)
    await log.add_batch(2)
    update, commit = TrainerBackend.update, checkpoints.commit
    num_updates, is_training_second = 0, threading.Event()

    def observed_update(*args: Any) -> dict[str, float]:
        nonlocal num_updates
        num_updates += 1
        if num_updates == 2:
            is_training_second.set()
        return update(*args)

    def held_commit(root: Path, state: State, draft: Path) -> Checkpoint:
        assert state.batch != 1 or is_training_second.wait(60)
        return commit(root, state, draft)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainerBackend, "update", observed_update)
        patch.setattr(checkpoints, "commit", held_commit)
        await train(log, tmp_path, 2)
    published = await log.published()
    assert [event.policy_version for event in published] == [0, 1, 2]
    assert 0 < published[2].metrics["idle_share"] < 1
    for version in (1, 2):
        assert parameter_bytes(tmp_path, version) == parameter_bytes(undisturbed, version)


async def test_without_overlap_every_batch_is_published_before_the_next_is_trained(
    new_log: NewLog, train: Train, undisturbed: Path, tmp_path: Path
) -> None:
    from turnfold.trainer.backend import TrainerBackend

    log = await new_log()
    await log.add_batch(1)
    await log.add_batch(2)
    update, write, found = TrainerBackend.update, weights.write, []

    def observed_update(*args: Any) -> dict[str, float]:
        found.append(("update", weights.versions(tmp_path / "weights")))
        return update(*args)

    def observed_write(publication: Any, parameters: Any) -> Path:
        kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("b*"))
        found.append(("write", kept))
        return write(publication, parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainerBackend, "update", observed_update)
        patch.setattr(weights, "write", observed_write)
        await train(log, tmp_path, 2, is_overlapped=False)
    names = ["b00000000", "b00000001", "b00000002"]
    assert found == [
        ("write", names[:1]),
        ("update", [0]),
        ("write", names[:2]),
        ("update", [0, 1]),
        ("write", names),
    ]
    assert parameter_bytes(tmp_path, 2) == parameter_bytes(undisturbed, 2)


@pytest.mark.field_case("trl#6796")
async def test_a_version_that_cannot_be_published_ends_the_run_though_no_batch_comes(
    new_log: NewLog, train: Train, tmp_path: Path
) -> None:
    log = await new_log()
    await log.add_batch(1)
    publish, calls = PolicyLog.publish, 0

    async def failing(self: PolicyLog, event: PolicyPublished) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Crash
        await publish(self, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolicyLog, "publish", failing)
        with pytest.raises(Crash):
            await train(log, tmp_path, 2)

"""The whole trainer on a real log: hand-made trajectories and manifests in, policy versions out."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.log.client import Producer, create_topics, reader_from_start
from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, GroupDropped, GroupRef, Positions, RolloutRef
from turnfold.schemas.errors import UserError
from turnfold.schemas.policies import PolicyEvent, PolicyPublished, PolicyServed
from turnfold.schemas.run import RunConfig
from turnfold.schemas.testing import trajectory
from turnfold.schemas.topics import Topics
from turnfold.schemas.trajectories import Row
from turnfold.trainer import app, checkpoints, weights
from turnfold.trainer.client import PolicyLog
from turnfold.trainer.settings import Settings
from turnfold.trainer.source import SourceError

pytestmark = pytest.mark.verl

RUN = RunConfig(run_id="t", group_size=2, groups_per_batch=4, max_row_tokens=64)
OVERRIDES = (
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker")) as started:
        yield started


class Log:
    """A namespace of its own, with batches that are the same in every namespace."""

    def __init__(self, bootstrap: str, namespace: str, random_row: Callable[..., Row]) -> None:
        self.bootstrap, self.topics = bootstrap, Topics(namespace=namespace)
        self.random_row = random_row
        self.positions = Positions(tasks={}, trajectories={})

    async def create(self) -> Log:
        # Nothing is compacted away, so that a test sees every version that was published.
        specs = [
            msgspec.structs.replace(spec, config=spec.config | {"cleanup.policy": "delete"})
            for spec in self.topics.specs(num_partitions=2)
        ]
        await create_topics(self.bootstrap, specs)
        return self

    async def add_batch(self, index: int, **changes: Any) -> BatchCut:
        """Four groups of two rollouts, some of two rows, over two partitions; then the manifest."""
        rng = np.random.default_rng(index)
        groups = []
        async with Producer(self.bootstrap) as producer:
            for g in range(4):
                group_id = f"b{index}g{g}"
                refs = [await self._add_rollout(producer, group_id, i, rng) for i in range(2)]
                groups.append(GroupRef(group_id=group_id, dispatch_index=g, rollouts=tuple(refs)))
            cut = BatchCut(
                run_id="t",
                index=index,
                groups=tuple(groups),
                positions=self.positions,
                at=0.0,
                config_digest=RUN.digest,
            )
            cut = msgspec.structs.replace(cut, **changes)
            await producer.send(self.topics.batches, key="t", message=cut)
        return cut

    async def _add_rollout(
        self, producer: Producer, group_id: str, index: int, rng: np.random.Generator
    ) -> RolloutRef:
        made = trajectory(
            f"{group_id}-{index}",
            group_id=group_id,
            rows=[self.random_row(rng) for _ in range(1 + index)],
            reward=float(index),
            run_id="t",
        )
        partition = int(rng.integers(2))
        ack = await producer.send(
            self.topics.trajectories, key=group_id, message=made, partition=partition
        )
        return RolloutRef(
            rollout_id=made.rollout_id,
            index=index,
            partition=ack.partition,
            offset=ack.offset,
            digest=codec.digest(made),
            reward=float(index),
            num_rows=len(made.rows),
            num_tokens=made.num_tokens,
            num_trained=sum(row.num_trained for row in made.rows),
            max_row_tokens=max(len(row.token_ids) for row in made.rows),
            min_policy_version=0,
            max_policy_version=0,
        )

    async def send(self, topic: str, message: msgspec.Struct) -> None:
        async with Producer(self.bootstrap) as producer:
            await producer.send(topic, key="t", message=message)

    async def published(self) -> list[PolicyPublished]:
        """Versions on the topic in the order in which they were published."""
        async with reader_from_start(self.bootstrap, self.topics.policies) as reader:
            events = [
                codec.decode(PolicyEvent, record.value or b"")
                async for record in reader.read_to_end()
            ]
        return [event for event in events if isinstance(event, PolicyPublished)]


@pytest.fixture
async def new_log(
    broker: BrokerProcess, random_row: Callable[..., Row], request: pytest.FixtureRequest
) -> Callable[[], Awaitable[Log]]:
    names = (f"{abs(hash(request.node.name))}-{i}" for i in range(9))

    async def make() -> Log:
        return await Log(broker.bootstrap, f"t{next(names)}", random_row).create()

    return make


@pytest.fixture
def train(verl_on_cpu: None, tiny_model: Path) -> Callable[..., Awaitable[None]]:
    """The trainer in this process, up to a number of batches."""

    async def run(log: Log, run_dir: Path, num_batches: int, **more: Any) -> None:
        stop = more.pop("stop", None) or asyncio.Event()
        settings = Settings(
            bootstrap=log.bootstrap,
            namespace=log.topics.namespace,
            run_dir=str(run_dir),
            model=str(tiny_model),
            num_batches=num_batches,
            device="cpu",
            **more,
        )
        await asyncio.wait_for(app.train(settings, RUN, OVERRIDES, Health("train"), stop), 120)

    return run


def parameter_bytes(run_dir: Path, version: int) -> bytes:
    return (weights.version_dir(run_dir / "weights", version) / "model.safetensors").read_bytes()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(
    broker: BrokerProcess,
    random_row: Callable[..., Row],
    tiny_model: Path,
    verl_on_cpu: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Run directory of three batches trained without a stop."""
    log = await Log(broker.bootstrap, "undisturbed", random_row).create()
    for index in (1, 2, 3):
        await log.add_batch(index)
    run_dir = tmp_path_factory.mktemp("undisturbed")
    settings = Settings(
        bootstrap=log.bootstrap,
        namespace="undisturbed",
        run_dir=str(run_dir),
        model=str(tiny_model),
        num_batches=3,
        keep_weights=9,
        device="cpu",
    )
    await app.train(settings, RUN, OVERRIDES, Health("train"), asyncio.Event())
    return run_dir


async def test_every_batch_makes_one_version_in_order_with_its_metrics(
    new_log: Callable[[], Awaitable[Log]], train: Callable[..., Awaitable[None]], tmp_path: Path
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
    lines = (tmp_path / "metrics" / "from-batch-00000001.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["step"] for line in lines] == [1, 2]


async def test_the_first_manifest_of_an_index_wins_and_dropped_groups_are_passed_over(
    new_log: Callable[[], Awaitable[Log]],
    train: Callable[..., Awaitable[None]],
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
        config_digest=RUN.digest,
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
    [(checkpoints, "write"), (weights, "write"), (PolicyLog, "publish")],
    ids=["before the checkpoint", "before the weights", "before the announcement"],
)
async def test_a_crash_at_any_step_of_publishing_trains_no_batch_twice_and_skips_none(
    owner: Any,
    name: str,
    new_log: Callable[[], Awaitable[Log]],
    train: Callable[..., Awaitable[None]],
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
    assert published[2].metrics["rows"] == 12  # also when it was announced after the restart
    for version in (1, 2, 3):
        assert parameter_bytes(tmp_path, version) == parameter_bytes(undisturbed, version)


async def test_kill_9_and_resume_gives_the_weights_of_the_undisturbed_run(
    new_log: Callable[[], Awaitable[Log]], tiny_model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    log = await new_log()
    process = await start_process(log, tiny_model, tmp_path, num_batches=3)
    await log.add_batch(1)
    await log.add_batch(2)
    # Killed between its checkpoint and its weights, or shortly after: all must come out the same.
    checkpoint = tmp_path / "checkpoints" / "b00000002"
    await until(checkpoint.exists, lambda: process.returncode is not None)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    await log.add_batch(3)
    process = await start_process(log, tiny_model, tmp_path, num_batches=3)
    assert await asyncio.wait_for(process.wait(), 90) == 0
    assert [event.policy_version for event in await log.published()] == [0, 1, 2, 3]
    assert parameter_bytes(tmp_path, 3) == parameter_bytes(undisturbed, 3)


async def test_a_stop_finishes_the_batch_and_leaves_a_checkpoint(
    new_log: Callable[[], Awaitable[Log]], train: Callable[..., Awaitable[None]], tmp_path: Path
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


async def test_a_mismatch_above_the_limit_stops_the_run_before_the_batch_is_kept(
    new_log: Callable[[], Awaitable[Log]], train: Callable[..., Awaitable[None]], tmp_path: Path
) -> None:
    log = await new_log()
    await log.add_batch(1)
    with pytest.raises(UserError, match=r"batch 1: KL between .* limit is 1e-06: engines and tr"):
        await train(log, tmp_path, 1, max_mismatch_kl=1e-6)
    assert [event.policy_version for event in await log.published()] == [0]
    await train(log, tmp_path, 1, max_mismatch_kl=1.0)
    assert [event.policy_version for event in await log.published()] == [0, 1]


async def start_process(
    log: Log, model: Path, run_dir: Path, *, num_batches: int, **environment: str
) -> asyncio.subprocess.Process:
    """`turnfold train` as a process; its output goes to a file in the run directory."""
    variables = {
        "TURNFOLD_RUN_ID": RUN.run_id,
        "TURNFOLD_GROUP_SIZE": str(RUN.group_size),
        "TURNFOLD_GROUPS_PER_BATCH": str(RUN.groups_per_batch),
        "TURNFOLD_MAX_ROW_TOKENS": str(RUN.max_row_tokens),
        "TURNFOLD_NAMESPACE": log.topics.namespace,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "turnfold.trainer", "--bootstrap", log.bootstrap]
    command += ["--run-dir", str(run_dir), "--model", str(model), "--device", "cpu"]
    command += ["--num-batches", str(num_batches), *OVERRIDES]
    with (run_dir / "trainer.log").open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, env=os.environ | variables | environment
        )


async def until(
    condition: Callable[[], bool], has_ended: Callable[[], bool], deadline_s: float = 90
) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():
            assert not has_ended(), "the trainer ended before its time"
            await asyncio.sleep(0.002)


async def test_a_damaged_checkpoint_falls_back_and_retrains_to_the_same_weights(
    new_log: Callable[[], Awaitable[Log]],
    train: Callable[..., Awaitable[None]],
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
    new_log: Callable[[], Awaitable[Log]], train: Callable[..., Awaitable[None]], tmp_path: Path
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
    new_log: Callable[[], Awaitable[Log]], train: Callable[..., Awaitable[None]], tmp_path: Path
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
    new_log: Callable[[], Awaitable[Log]], train: Callable[..., Awaitable[None]], tmp_path: Path
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
    new_log: Callable[[], Awaitable[Log]], train: Callable[..., Awaitable[None]], tmp_path: Path
) -> None:
    log = await new_log()
    await log.add_batch(1, config_digest="f00")
    with pytest.raises(SourceError, match="batch 1 was cut under run configuration f00"):
        await train(log, tmp_path, 1)


async def test_a_trajectory_that_differs_from_the_manifest_is_named(
    new_log: Callable[[], Awaitable[Log]], train: Callable[..., Awaitable[None]], tmp_path: Path
) -> None:
    log = await new_log()
    cut = await log.add_batch(2)
    ref = msgspec.structs.replace(cut.groups[0].rollouts[0], digest="beef")
    group = msgspec.structs.replace(cut.groups[0], rollouts=(ref,))
    await log.send(log.topics.batches, msgspec.structs.replace(cut, index=1, groups=(group,)))
    with pytest.raises(SourceError, match=r"rollout b2g0-0 has digest \w+, the manifest says beef"):
        await train(log, tmp_path, 1)


async def test_a_trajectory_that_the_topic_no_longer_holds_is_named(
    new_log: Callable[[], Awaitable[Log]], train: Callable[..., Awaitable[None]], tmp_path: Path
) -> None:
    log = await new_log()
    cut = await log.add_batch(2)
    ref = msgspec.structs.replace(cut.groups[0].rollouts[0], partition=0, offset=999)
    group = msgspec.structs.replace(cut.groups[0], rollouts=(ref,))
    await log.send(log.topics.batches, msgspec.structs.replace(cut, index=1, groups=(group,)))
    with pytest.raises(
        SourceError, match=r"batch 1 names .*trajectories/0@999, but .*turnfold rep"
    ):
        await train(log, tmp_path, 1)

"""A tiny real model, rows for it, and verl's worker on a CPU (built once per distinct use)."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from turnfold.embedded.broker.testing import RunningBroker
from turnfold.log.client import Producer, create_topics, reader_from_start
from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas.batches import BatchCut, GroupRef, Positions, RolloutRef
from turnfold.schemas.policies import PolicyEvent, PolicyPublished
from turnfold.schemas.run import RunConfig
from turnfold.schemas.testing import row, trajectory
from turnfold.schemas.topics import Topics
from turnfold.schemas.trajectories import Row

os.environ.setdefault("OMP_NUM_THREADS", "1")

VOCAB = 96


RUN = RunConfig(run_id="t", group_size=2, groups_per_batch=4, max_row_tokens=64)
OVERRIDES = (
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)


@pytest.fixture(scope="session", autouse=True)
def _composed_once() -> Iterator[None]:
    """Compose each configuration once: hydra takes a second for what no test changes."""
    from turnfold.trainer import config

    compose, found = config.compose, {}

    def cached(overrides: Sequence[str], run: RunConfig, **options: Any) -> Any:
        key = (tuple(overrides), run, tuple(sorted(options.items())))
        if key not in found:
            found[key] = compose(overrides, run, **options)
        return found[key]

    config.compose = cached
    yield
    config.compose = compose


@pytest.fixture(scope="session")
def run_config() -> RunConfig:
    return RunConfig(run_id="t", group_size=4, groups_per_batch=8, max_row_tokens=48)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with two layers and a word-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    torch.set_num_threads(1)
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    directory = tmp_path_factory.mktemp("tiny-model")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def verl_on_cpu() -> None:
    """verl imported with our CPU platform."""
    from turnfold.trainer.backends import environment

    assert environment.prepare("cpu") is False


@pytest.fixture(scope="session")
def make_backend(
    verl_on_cpu: None, tiny_model: Path, run_config: RunConfig
) -> Callable[..., tuple[Any, Any]]:
    """Build a backend and its schedule with overrides; plain SGD, so that a step is a gradient."""
    from turnfold.trainer import config
    from turnfold.trainer.backend import TrainerBackend

    sgd = [
        "actor_rollout_ref.actor.optim.optimizer=SGD",
        "actor_rollout_ref.actor.optim.lr=1.0",
        "actor_rollout_ref.actor.optim.weight_decay=0.0",
        "actor_rollout_ref.actor.optim.clip_grad=1e9",
    ]
    adamw = [
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.optim.weight_decay=0.01",
    ]

    def make(*overrides: str, optimizer: str = "SGD") -> tuple[Any, Any]:
        budget = [
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=2048",
        ]
        chosen = [*budget, *(sgd if optimizer == "SGD" else adamw), *overrides]
        composed = config.compose(chosen, run_config, model=str(tiny_model))
        return TrainerBackend(composed), config.check(composed, run_config)

    return make


@pytest.fixture(scope="session")
def random_row() -> Callable[..., Row]:
    """A row of a two-turn rollout: prompt, output, a masked observation, output."""

    def make(rng: np.random.Generator, *, length: int | None = None) -> Row:
        n = length or int(rng.integers(14, 30))
        ids = rng.integers(3, VOCAB, n).tolist()
        mask = [0] * 4 + [1] * (n - 4)
        mask[7:9] = [0, 0]
        return row(ids, mask, (-4.5 * np.array(mask)).tolist())

    return make


@pytest.fixture(scope="session")
def broker(broker_of: Callable[[Path], RunningBroker]) -> RunningBroker:
    return broker_of(Path(__file__).parent)


class Log:
    """A namespace of its own, with batches that are the same in every namespace."""

    run = RUN

    def __init__(self, bootstrap: str, namespace: str, random_row: Callable[..., Row]) -> None:
        self.bootstrap, self.topics = bootstrap, Topics(namespace=namespace)
        self.random_row = random_row
        self.positions = Positions(tasks={}, trajectories={})

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a process of this run."""
        return {
            "TURNFOLD_RUN_ID": RUN.run_id,
            "TURNFOLD_GROUP_SIZE": str(RUN.group_size),
            "TURNFOLD_GROUPS_PER_BATCH": str(RUN.groups_per_batch),
            "TURNFOLD_MAX_ROW_TOKENS": str(RUN.max_row_tokens),
            "TURNFOLD_NAMESPACE": self.topics.namespace,
        }

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


@pytest.fixture(scope="session")
def make_log(
    broker: RunningBroker, random_row: Callable[..., Row], new_namespace: Callable[[str], str]
) -> Callable[[str], Awaitable[Log]]:
    async def make(word: str) -> Log:
        return await Log(broker.bootstrap, new_namespace(word), random_row).create()

    return make


@pytest.fixture
def new_log(
    make_log: Callable[[str], Awaitable[Log]], request: pytest.FixtureRequest
) -> Callable[[], Awaitable[Log]]:
    """Logs of this test alone."""
    names = (f"t{abs(hash(request.node.nodeid))}-{i}" for i in range(9))
    return lambda: make_log(next(names))


@pytest.fixture(scope="session")
def train(verl_on_cpu: None, tiny_model: Path) -> Callable[..., Awaitable[None]]:
    """The trainer in this process, up to a number of batches."""

    async def run(log: Log, run_dir: Path, num_batches: int, **more: Any) -> None:
        stop = more.pop("stop", None) or asyncio.Event()
        overrides = (*OVERRIDES, *more.pop("overrides", ()))
        from turnfold.trainer import app
        from turnfold.trainer.settings import Settings

        settings = Settings(
            bootstrap=log.bootstrap,
            namespace=log.topics.namespace,
            run_dir=str(run_dir),
            model=str(tiny_model),
            num_batches=num_batches,
            device="cpu",
            **more,
        )
        await asyncio.wait_for(app.train(settings, RUN, overrides, Health("train"), stop), 280)

    return run


@pytest.fixture
def start_process(tiny_model: Path) -> Callable[..., Awaitable[asyncio.subprocess.Process]]:
    """`turnfold train` as a process; its output goes to a file in the run directory."""

    async def start(
        log: Log,
        run_dir: Path,
        *,
        num_batches: int,
        launcher: Sequence[str] = (),
        overrides: Sequence[str] = (),
        **environment: str,
    ) -> asyncio.subprocess.Process:
        variables = log.variables | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [
            sys.executable,
            *launcher,
            "-m",
            "turnfold.trainer",
            "--bootstrap",
            log.bootstrap,
        ]
        command += ["--run-dir", str(run_dir), "--model", str(tiny_model), "--device", "cpu"]
        command += ["--num-batches", str(num_batches), *OVERRIDES, *overrides]
        with (run_dir / "trainer.log").open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=output, env=os.environ | variables | environment
            )

    return start

"""Which processes make a pipeline on one machine, with which settings; pure."""

from __future__ import annotations

from pathlib import Path

import msgspec

from turnfold.embedded.demo.supervisor import ServiceSpec
from turnfold.log.settings import KAFKA_ACCESS
from turnfold.schemas.run import RunConfig
from turnfold.schemas.settings import variable
from turnfold.schemas.wire import Wire


class Ports(Wire, frozen=True, kw_only=True):
    """TCP ports of the parts that listen."""

    broker: int
    inference: int
    gateway: int


class Training(Wire, frozen=True, kw_only=True):
    """How each batch is trained: optimizer steps = mini-batches × epochs."""

    num_batches: int
    num_mini_batches: int
    ppo_epochs: int
    learning_rate: float

    @property
    def num_steps_a_batch(self) -> int:
        return self.num_mini_batches * self.ppo_epochs


class Layout(Wire, frozen=True, kw_only=True):
    """Everything that the processes of one pipeline are told."""

    run_dir: Path
    model_dir: Path
    ports: Ports
    config: RunConfig
    training: Training
    control_key: str
    key_secret: str
    python: str
    """Interpreter that runs the services."""
    agent: str
    """The agent as `module:function` or `path.py:function`; empty when it is a command."""
    command: str = ""
    """The agent as a command instead."""
    own_dataset: Path | None = None
    """Tasks of the user's; without it `dataset` is made for the demo's own."""
    num_concurrent: int = 32
    """Rollouts that the worker runs at a time."""

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.ports.broker}"

    @property
    def inference_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.inference}"

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.gateway}"

    @property
    def dataset(self) -> Path:
        return self.own_dataset or self.run_dir / "tasks.jsonl"

    @property
    def num_steps(self) -> int:
        """Optimizer steps that the whole run must take."""
        return self.training.num_batches * self.training.num_mini_batches * self.training.ppo_epochs


def environment(layout: Layout) -> dict[str, str]:
    """TURNFOLD_* variables for all services; each reads the ones that it knows."""
    run = {name: str(value) for name, value in msgspec.structs.asdict(layout.config).items()}
    values = {
        **run,
        "bootstrap": layout.bootstrap,
        # Another broker's, from the environment that this was started in.
        **dict.fromkeys(KAFKA_ACCESS, ""),
        "model": str(layout.model_dir),
        "engines": msgspec.json.encode([layout.inference_url]).decode(),
        "gateway_url": layout.gateway_url,
        "control_key": layout.control_key,
        "key_secret": layout.key_secret,
        "run_dir": str(layout.run_dir),
    }
    return {
        **{variable(name): value for name, value in values.items()},
        # Two cores run ten processes: one thread each.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def broker_spec(layout: Layout) -> ServiceSpec:
    """The broker, which has to answer before anything else starts."""
    return ServiceSpec(
        name="broker",
        argv=_turnfold(
            layout,
            "broker",
            "--data",
            layout.run_dir / "log",
            "--port",
            layout.ports.broker,
            # A service that asks early must not make a topic with one partition.
            "--no-auto-create-topics",
        ),
    )


def service_specs(layout: Layout) -> tuple[ServiceSpec, ...]:
    """All other services in the order to start them; the slowest to come up is first."""
    ports = layout.ports
    return (
        ServiceSpec(name="trainer", argv=_turnfold(layout, "train", *_train_arguments(layout))),
        ServiceSpec(
            name="inference",
            argv=_turnfold(
                layout,
                "inference",
                "--model",
                layout.model_dir,
                "--port",
                ports.inference,
                "--slots",
                layout.num_concurrent,
            ),
            ready_url=f"{layout.inference_url}/health",
        ),
        ServiceSpec(
            name="gateway",
            argv=_turnfold(layout, "gateway", "--port", ports.gateway),
            ready_url=f"{layout.gateway_url}/healthz",
        ),
        ServiceSpec(name="relay", argv=_turnfold(layout, "relay")),
        ServiceSpec(name="healer", argv=_turnfold(layout, "healer")),
        ServiceSpec(name="assembler", argv=_turnfold(layout, "assembler")),
        ServiceSpec(
            name="dispatcher",
            argv=_turnfold(
                layout,
                "dispatcher",
                "--dataset",
                layout.dataset,
                "--num-batches",
                layout.training.num_batches,
            ),
        ),
        ServiceSpec(
            name="worker",
            argv=_turnfold(
                layout,
                "worker",
                *(("--command", layout.command) if layout.command else ("--agent", layout.agent)),
                "--concurrency",
                layout.num_concurrent,
            ),
            # Running agents get their grace, and those that do not end then get theirs.
            stop_timeout_s=30.0,
        ),
    )


def _train_arguments(layout: Layout) -> tuple[str, ...]:
    training, config = layout.training, layout.config
    prompts_per_mini_batch = config.groups_per_batch // training.num_mini_batches
    return (
        "--num-batches",
        str(training.num_batches),
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts_per_mini_batch}",
        f"actor_rollout_ref.actor.ppo_epochs={training.ppo_epochs}",
        f"actor_rollout_ref.actor.optim.lr={training.learning_rate}",
    )


def _turnfold(layout: Layout, *arguments: object) -> tuple[str, ...]:
    return (layout.python, "-m", "turnfold.cli", *(str(argument) for argument in arguments))

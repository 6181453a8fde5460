"""Which processes make the pipeline that is disturbed, and what each of them is told. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from turnfold.embedded.chaos.agent import RECORD_FILE
from turnfold.embedded.chaos.faults import BROKER, BROKER_LINKS, LINKS
from turnfold.embedded.chaos.network import Address, Link
from turnfold.embedded.demo.supervisor import ServiceSpec
from turnfold.log.settings import KafkaSettings
from turnfold.schemas.run import RunConfig
from turnfold.schemas.settings import load, variable
from turnfold.schemas.topics import Topics
from turnfold.schemas.wire import Wire

NUM_TASKS = 4
_NUM_CONCURRENT = 16
_HOST = "127.0.0.1"


class Site(Wire, frozen=True, kw_only=True):
    """One pipeline: where its files and servers are."""

    run_dir: Path
    broker: Address
    engine_port: int
    gateway_port: int
    namespace: str
    config: RunConfig
    python: str
    """Interpreter that runs the services."""
    environment: dict[str, str]
    """What the processes inherit."""

    @property
    def kafka(self) -> KafkaSettings:
        """The broker itself, not through a link."""
        return load(KafkaSettings, self.environment, bootstrap="{}:{}".format(*self.broker))

    @property
    def topics(self) -> Topics:
        return Topics(namespace=self.namespace)

    @property
    def data_dir(self) -> Path:
        """The broker's, when it is ours."""
        return self.run_dir / "log"

    @property
    def model_dir(self) -> Path:
        return self.run_dir / "model"

    @property
    def dataset(self) -> Path:
        return self.run_dir / "tasks.jsonl"

    @property
    def record_file(self) -> Path:
        """What the agents got acknowledged."""
        return self.run_dir / "acknowledged.txt"

    @property
    def version_file(self) -> Path:
        """The policy version that the engine serves."""
        return self.run_dir / "version"


def make_links(site: Site) -> list[Link]:
    """The connections that can be disturbed."""
    servers = {
        "worker to gateway": (_HOST, site.gateway_port),
        "gateway to engine": (_HOST, site.engine_port),
    }
    return [
        Link(name, servers.get(name, site.broker), is_kafka=name in BROKER_LINKS) for name in LINKS
    ]


def environment(site: Site) -> dict[str, str]:
    """What every service is told; each reads the variables that it knows."""
    run = {name: str(value) for name, value in msgspec.structs.asdict(site.config).items()}
    values = {
        **run,
        "namespace": site.namespace,
        "model": str(site.model_dir),
        "control_key": "chaos-control",
        "key_secret": "chaos-secret",
        "run_dir": str(site.run_dir),
    }
    return {
        **site.environment,
        **{variable(name): value for name, value in values.items()},
        RECORD_FILE: str(site.record_file),
        # Two cores run ten processes: one thread each.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def broker_spec(site: Site, clock_file: Path) -> ServiceSpec:
    """A broker of our own. A service that asks early must not make a topic with one partition."""
    options = ("--data", site.data_dir, "--port", site.broker[1], "--no-auto-create-topics")
    return ServiceSpec(
        name=BROKER,
        argv=_under_clock(site, clock_file, "turnfold.embedded.broker", *options),
    )


def service_specs(
    site: Site, links: Mapping[str, Link], clock_files: Mapping[str, Path]
) -> tuple[ServiceSpec, ...]:
    """All other processes, in the order to start them."""

    def turnfold(name: str, *arguments: object, **environment: str) -> ServiceSpec:
        argv = _under_clock(site, clock_files[name], "turnfold.cli", name, *arguments)
        return ServiceSpec(name=name, argv=argv, env={**_bootstrap(links, name), **environment})

    engines = msgspec.json.encode([_url(links["gateway to engine"])]).decode()
    agent = ("--agent", "turnfold.embedded.chaos.agent:run", "--concurrency", _NUM_CONCURRENT)
    return (
        _engine(site),
        turnfold("gateway", "--port", site.gateway_port, TURNFOLD_ENGINES=engines),
        _trainer(site, links, clock_files["trainer"]),
        turnfold("healer"),
        turnfold("assembler"),
        turnfold("dispatcher", "--dataset", site.dataset),
        turnfold("worker", *agent, TURNFOLD_GATEWAY_URL=_url(links["worker to gateway"])),
    )


def _engine(site: Site) -> ServiceSpec:
    module = "turnfold.embedded.chaos.engine"
    model = ("--model", str(site.model_dir), "--port", str(site.engine_port))
    version = ("--version-file", str(site.version_file))
    return ServiceSpec(name="engine", argv=(site.python, "-m", module, *model, *version))


def _trainer(site: Site, links: Mapping[str, Link], clock_file: Path) -> ServiceSpec:
    argv = _under_clock(site, clock_file, "turnfold.embedded.chaos.trainer")
    return ServiceSpec(name="trainer", argv=argv, env=_bootstrap(links, "trainer"))


def _under_clock(site: Site, clock_file: Path, module: str, *arguments: object) -> tuple[str, ...]:
    clock = "turnfold.embedded.chaos.clock"
    return (site.python, "-m", clock, str(clock_file), module, *map(str, arguments))


def _bootstrap(links: Mapping[str, Link], name: str) -> dict[str, str]:
    return {variable("bootstrap"): "{}:{}".format(*links[f"{name} to broker"].address)}


def _url(link: Link) -> str:
    return "http://{}:{}".format(*link.address)

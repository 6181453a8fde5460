"""New policies reach every engine, in the safe order, and the log says so."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from turnfold.embedded.broker.testing import RunningBroker
from turnfold.gateway.backends.sglang_weights import SglangWeights
from turnfold.gateway.backends.vllm_weights import VllmWeights
from turnfold.gateway.backends.weights import UpdateFailed
from turnfold.gateway.backends.weights_directory import UnusableWeights
from turnfold.gateway.relay.app import Relay, create_broker
from turnfold.gateway.relay.policies import PolicyView, fold
from turnfold.gateway.relay.settings import Settings
from turnfold.log.client import Producer, create_topics, reader_from_start
from turnfold.log.service import Health
from turnfold.schemas import codec
from turnfold.schemas.policies import PolicyEvent, PolicyPublished, PolicyServed


class WeightServer:
    """vLLM's weight-update routes, noting what came; over real HTTP."""

    def __init__(self) -> None:
        self.version = "0"
        self.weights = "initial"
        self.root = "a name"
        self.calls: list[str] = []
        self.bad_paths: set[str] = set()
        self.bad_status = 500
        self.url = ""

    def app(self) -> Starlette:
        async def handle(request: Request) -> JSONResponse:
            body = await request.body()
            call = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            if call == "/weight_info":
                return JSONResponse({"weight_version": self.version})
            if call == "/v1/models":
                return JSONResponse({"data": [{"id": "m", "root": self.root}]})
            self.calls.append(call)
            if call == "/collective_rpc":
                path = json.loads(body)["kwargs"]["weights_path"]
                self.calls[-1] = f"reload {Path(path).name}"
                if path in self.bad_paths:
                    return JSONResponse({"error": {"message": "bad"}}, self.bad_status)
                self.weights = path
            if call == "/update_weight_version":
                self.version = json.loads(body)["new_version"]
            return JSONResponse({})

        return Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST"])])


S = TypeVar("S", "WeightServer", "SglangServer")


@asynccontextmanager
async def serving(server: S, port: int = 0) -> AsyncIterator[S]:
    import uvicorn

    from turnfold.gateway.app import listen

    listening = listen("127.0.0.1", port)
    server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    runner = uvicorn.Server(uvicorn.Config(server.app(), log_level="critical", lifespan="off"))
    task = asyncio.create_task(runner._serve([listening]))
    try:
        yield server
    finally:
        runner.should_exit = runner.force_exit = True
        await task


def weights(tmp_path: Path, name: str, shapes: dict[str, list[int]] | None = None) -> Path:
    """A directory that passes for whole weights, of empty tensors unless shapes are given."""
    directory = tmp_path / name
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    entries, end = {}, 0
    for tensor, shape in (shapes or {}).items():
        size = 4 * math.prod(shape)
        entries[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(end)
    (directory / "model.safetensors").write_bytes(content)
    return directory


SAFE_ORDER = ["/pause?mode=keep&clear_cache=true", "reload w1", "/update_weight_version", "/resume"]


async def test_weights_are_loaded_in_the_safe_order(tmp_path: Path) -> None:
    async with serving(WeightServer()) as server:
        engine = VllmWeights(server.url, timeout_s=5)
        await engine.update(str(weights(tmp_path, "w1")), 1)
        assert server.calls == SAFE_ORDER
        assert await engine.version() == "1"
        await engine.aclose()


async def test_a_failed_reload_puts_the_old_weights_back_and_resumes(tmp_path: Path) -> None:
    async with serving(WeightServer()) as server:
        engine = VllmWeights(server.url, timeout_s=5)
        await engine.update(str(weights(tmp_path, "w1")), 1)
        bad = weights(tmp_path, "w2")
        server.bad_paths.add(str(bad))
        server.calls.clear()
        with pytest.raises(UpdateFailed, match="500"):
            await engine.update(str(bad), 2)
        assert server.calls == [SAFE_ORDER[0], "reload w2", "reload w1", "/resume"]
        assert await engine.version() == "1"
        await engine.aclose()


async def test_a_damaged_directory_never_reaches_the_engine(tmp_path: Path) -> None:
    async with serving(WeightServer()) as server:
        engine = VllmWeights(server.url, timeout_s=5)
        with pytest.raises(UnusableWeights):
            await engine.update(str(tmp_path / "missing"), 1)
        assert server.calls == []
        await engine.aclose()


async def test_an_engine_whose_weights_nobody_knows_stays_paused(tmp_path: Path) -> None:
    async with serving(WeightServer()) as server:
        engine = VllmWeights(server.url, timeout_s=5)
        bad = weights(tmp_path, "w1")
        server.bad_paths.add(str(bad))
        with pytest.raises(UpdateFailed, match="what it served before is not known"):
            await engine.update(str(bad), 1)
        assert server.calls == [SAFE_ORDER[0], "reload w1"]
        server.bad_paths.clear()
        await engine.update(str(bad), 1)
        assert server.calls[-1] == "/resume"
        await engine.aclose()


async def test_an_engine_that_refuses_weights_untouched_goes_on(tmp_path: Path) -> None:
    async with serving(WeightServer()) as server:
        engine = VllmWeights(server.url, timeout_s=5)
        bad = weights(tmp_path, "w1")
        server.bad_paths.add(str(bad))
        server.bad_status = 400
        with pytest.raises(UpdateFailed, match="400"):
            await engine.update(str(bad), 1)
        assert server.calls == [SAFE_ORDER[0], "reload w1", "/resume"]
        await engine.aclose()


async def test_weights_that_do_not_fit_the_served_ones_never_reach_the_engine(
    tmp_path: Path,
) -> None:
    async with serving(WeightServer()) as server:
        engine = VllmWeights(server.url, timeout_s=5)
        server.root = str(weights(tmp_path, "base", {"a": [2, 3], "lm_head": [3]}))
        with pytest.raises(UnusableWeights, match=r"a has shape \[3, 2\], expected \[2, 3\]"):
            await engine.update(str(weights(tmp_path, "turned", {"a": [3, 2]})), 1)
        # A fine-tuned copy may lack what its base has, later versions may not.
        await engine.update(str(weights(tmp_path, "w1", {"a": [2, 3], "b": [1]})), 1)
        server.calls.clear()
        with pytest.raises(UnusableWeights, match="has no tensor b"):
            await engine.update(str(weights(tmp_path, "part", {"a": [2, 3]})), 2)
        assert server.calls == []
        await engine.aclose()


class SglangServer:
    """SGLang's weight-update routes, noting what came; over real HTTP."""

    def __init__(self, *, is_loading: bool = True) -> None:
        self.version = "default"
        self.is_loading = is_loading
        self.calls: list[Any] = []
        self.url = ""

    def app(self) -> Starlette:
        async def handle(request: Request) -> JSONResponse:
            if request.url.path == "/model_info":
                return JSONResponse({"weight_version": self.version, "model_path": "a name"})
            body = await request.json()
            self.calls.append((request.url.path, body))
            if request.url.path != "/update_weights_from_disk":
                return JSONResponse({"status": "ok"})
            if self.is_loading:
                self.version = body["weight_version"]
            return JSONResponse({"success": self.is_loading, "message": "said why"})

        return Starlette(routes=[Route("/{path:path}", handle, methods=["GET", "POST"])])


async def test_sglang_is_updated_in_the_safe_order(tmp_path: Path) -> None:
    async with serving(SglangServer()) as server:
        engine = SglangWeights(server.url, timeout_s=5)
        assert await engine.version() == "default"
        directory = weights(tmp_path, "w1")
        await engine.update(str(directory), 1)
        load = {
            "model_path": str(directory),
            "weight_version": "1",
            "flush_cache": True,
            "abort_all_requests": False,
        }
        assert server.calls == [
            ("/pause_generation", {"mode": "retract"}),
            ("/update_weights_from_disk", load),
            ("/continue_generation", {}),
        ]
        assert await engine.version() == "1"
        await engine.aclose()


async def test_an_sglang_that_does_not_load_goes_on(tmp_path: Path) -> None:
    async with serving(SglangServer(is_loading=False)) as server:
        engine = SglangWeights(server.url, timeout_s=5)
        with pytest.raises(UpdateFailed, match="said why"):
            await engine.update(str(weights(tmp_path, "w1")), 1)
        assert server.calls[-1] == ("/continue_generation", {})
        assert engine.loaded_uri is None
        await engine.aclose()


def published(version: int, uri: object = "w", run_id: str = "r") -> PolicyPublished:
    return PolicyPublished(run_id=run_id, policy_version=version, weights_uri=str(uri))


def test_the_newest_policy_is_the_one_published_last() -> None:
    view = PolicyView()
    for offset, event in enumerate([published(7), published(0, run_id="next")]):
        view = fold(view, offset, event)
    assert view.newest == published(0, run_id="next")
    assert fold(view, 0, published(7)) == view
    assert not view.is_newest_served
    view = fold(view, 2, PolicyServed(run_id="next", policy_version=0))
    assert view.is_newest_served


def test_what_an_engine_serves_is_one_of_the_last_two_policies() -> None:
    view = PolicyView()
    served = PolicyServed(run_id="r", policy_version=3)
    events: list[PolicyEvent] = [published(3, "a"), served, published(4, "b")]
    for offset, event in enumerate(events):
        view = fold(view, offset, event)
    assert view.policy_of("3") == published(3, "a")
    assert view.policy_of("4") == published(4, "b")
    assert view.policy_of("2") is None


class Log:
    """The policies topic of one test."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    async def publish(self, event: PolicyPublished) -> None:
        async with Producer(self.settings.bootstrap) as producer:
            topic = self.settings.topics.policies
            await producer.send(topic, key=event.run_id, message=event)

    async def served(self) -> list[int]:
        found = []
        topic = self.settings.topics.policies
        async with reader_from_start(self.settings.bootstrap, topic) as reader:
            async for record in reader.read_to_end():
                event = codec.decode(cast(type[PolicyEvent], PolicyEvent), record.value or b"")
                if isinstance(event, PolicyServed):
                    found.append(event.policy_version)
        return found


@pytest.fixture
async def log(broker: RunningBroker, new_namespace: Callable[[], str]) -> Log:
    settings = Settings(bootstrap=broker.bootstrap, namespace=new_namespace(), engine_poll_s=0.1)
    topics = settings.topics
    wanted = (topics.policies, topics.dead_letters)
    await create_topics(broker.bootstrap, [s for s in topics.specs(1) if s.name in wanted])
    return Log(settings)


@asynccontextmanager
async def relaying(log: Log, *servers: WeightServer) -> AsyncIterator[Health]:
    settings = msgspec.structs.replace(log.settings, engines=tuple(s.url for s in servers))
    stop, health = asyncio.Event(), Health("relay")
    task = asyncio.create_task(Relay(settings).run(health, stop))
    try:
        yield health
    finally:
        stop.set()
        await task


async def test_policies_are_served_by_every_engine_and_said_to_be(
    log: Log, tmp_path: Path, eventually: Any
) -> None:
    async with (
        serving(WeightServer()) as one,
        serving(WeightServer()) as two,
        relaying(log, one, two),
    ):
        await log.publish(published(1, weights(tmp_path, "w1")))

        async def is_served() -> bool:
            return await log.served() == [1]

        await eventually(is_served)
        assert (one.version, two.version) == ("1", "1")
        assert one.calls == two.calls == SAFE_ORDER


async def test_what_was_published_before_the_relay_began_is_served(
    log: Log, tmp_path: Path, eventually: Any
) -> None:
    for version in (1, 2):
        await log.publish(published(version, weights(tmp_path, f"w{version}")))
    async with serving(WeightServer()) as server:
        for _ in range(2):  # the second relay finds nothing to do
            async with relaying(log, server) as health:

                async def is_served(health: Health = health) -> bool:
                    return await log.served() == [2] and "is served" in health.detail

                await eventually(is_served)
        assert server.calls.count("/pause?mode=keep&clear_cache=true") == 1
        # The first relay may have been killed before the engine went on.
        assert server.calls.count("/resume") == 2
    assert await log.served() == [2]


async def test_an_engine_that_restarts_gets_the_newest_weights_again(
    log: Log, tmp_path: Path, eventually: Any
) -> None:
    await log.publish(published(3, weights(tmp_path, "w3")))
    async with serving(WeightServer()) as server, relaying(log, server):

        async def is_current() -> bool:
            return server.version == "3" and await log.served() == [3]

        await eventually(is_current)
        server.version = "0"
        await eventually(is_current)
        assert server.calls.count("reload w3") == 2


async def test_nothing_is_said_to_be_served_while_one_engine_is_down(
    log: Log, tmp_path: Path, eventually: Any
) -> None:
    await log.publish(published(1, weights(tmp_path, "w1")))
    down = WeightServer()
    async with serving(down):
        pass  # its port is free again, and known
    port = int(down.url.rpartition(":")[2])
    async with serving(WeightServer()) as up, relaying(log, up, down) as health:

        async def is_up_current() -> bool:
            return up.version == "1" and not health.is_ready

        await eventually(is_up_current)
        assert await log.served() == []
        async with serving(down, port):

            async def is_served() -> bool:
                return await log.served() == [1]

            await eventually(is_served)


def test_the_topic_is_documented() -> None:
    from faststream.specification import AsyncAPI

    async def ignore(offset: int, event: PolicyEvent) -> None:
        pass

    schema = AsyncAPI(create_broker(Settings(), ignore)).to_specification().to_json()
    assert "turnfold.policies" in schema
    assert "PolicyPublished" in schema

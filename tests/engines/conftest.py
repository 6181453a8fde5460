"""The engines under test: each a real server in a process of its own, one at a time.

A test that takes `server` runs once for each kind. pytest groups tests by it, so each server starts
once, and again where a test has killed it.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import pytest

from turnfold.embedded.tiny.build import build
from turnfold.embedded.tiny.recipe import Recipe
from turnfold.gateway.backends import sglang, vllm
from turnfold.gateway.backends.engine import EngineKind, GenerateRequest, Generation
from turnfold.gateway.backends.kinds import engines_of, weights_of
from turnfold.gateway.backends.model_directory import load_model_directory
from turnfold.gateway.backends.replicas import ReplicatedEngines
from turnfold.gateway.backends.weights import EngineWeights
from turnfold.gateway.calls import CallParams
from turnfold.gateway.testing import free_port
from turnfold.schemas.wire import TokenIds

ROOT = Path(__file__).parent.parent.parent
START_TIMEOUT_S = 600.0
MAX_LEN = 4096
NUM_SLOTS = 16

ENDS_WITH_US = 'exec 3<&0; { cat <&3; kill -9 -- -$$; } & "$@" 3<&- & wait $!'
"""A shell command that kills its process group when the tests are gone, however they ended: then
its standard input ends."""

Kind = Literal["embedded", "vllm", "sglang"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(2 * START_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: Any, call: Any
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and server is not None:
        report.sections.append((f"the end of {server.log_path}", server.log()[-8000:]))
    return report


@dataclass
class Server:
    """A real inference server on a port that stays the same from one start to the next."""

    kind: Kind
    model: Path
    log_path: Path
    port: int
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it samples."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                ["nice", "-n", "5", "bash", "-c", ENDS_WITH_US, "server", *command(self)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(self.kind),
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.kind} ended at start:\n{self.log()[-8000:]}")
            if time.monotonic() > deadline:
                self.kill9()
                raise RuntimeError(f"{self.kind} does not start:\n{self.log()[-8000:]}")
            time.sleep(0.5)

    def kill9(self) -> None:
        """End it and all of its processes without a warning."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        self.process = None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def _is_ready(self) -> bool:
        try:
            return self._get("/health").status_code == 200
        except httpx.HTTPError:
            return False

    def _get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, trust_env=False)


def python_of(kind: Kind) -> str:
    if kind == "embedded":
        return sys.executable
    home = Path(os.environ.get(f"{kind.upper()}_ENV", ROOT / f".env-{kind}"))
    return str(home / "bin" / "python")


def command(server: Server) -> list[str]:
    """How each server is started; docs/operations.md says what turnfold needs of these options."""
    python, model, port = python_of(server.kind), str(server.model), str(server.port)
    if server.kind == "embedded":
        options = ["--model", model, "--port", port, "--max-len", str(MAX_LEN)]
        return [python, "-m", "turnfold.embedded.inference", *options, "--slots", str(NUM_SLOTS)]
    if server.kind == "vllm":
        return [
            *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
            *("--host", "127.0.0.1", "--port", port, "--served-model-name", "tiny"),
            *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
            *("--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details"),
            *("--max-model-len", str(MAX_LEN), "--max-num-seqs", str(NUM_SLOTS)),
        ]
    return [
        *(python, "-m", "sglang.launch_server", "--model-path", model),
        *("--host", "127.0.0.1", "--port", port, "--served-model-name", "tiny"),
        *("--incremental-streaming-output", "--sleep-on-idle", "--context-length", str(MAX_LEN)),
        *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--disable-cuda-graph"),
        *("--max-total-tokens", "80000", "--mem-fraction-static", "0.1"),
        *("--skip-server-warmup", "--disable-overlap-schedule"),
        *("--max-running-requests", str(NUM_SLOTS)),
    ]


def environment(kind: Kind) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")
    }
    if kind == "embedded":
        return {**inherited, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return {
        **inherited,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # registers the routes that change weights
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "0",
    }


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one architecture and one tokenizer; the first has learnt to call a tool.

    The size of their heads is one that both servers' attention can do.
    """
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "max_len": MAX_LEN}
    recipes = [
        Recipe(seed=0, **heads),
        Recipe(seed=1, **heads, initializer_range=0.2, num_learn_steps=0, max_weaken_steps=0),
    ]
    directory = tmp_path_factory.mktemp("weights")
    for number, recipe in enumerate(recipes):
        build(directory / str(number), recipe)
    return [directory / str(number) for number in range(len(recipes))]


@pytest.fixture(scope="session")
def vocab_size(weights: list[Path]) -> int:
    return load_model_directory(str(weights[0])).vocab_size


@pytest.fixture(scope="session", params=["embedded", "vllm", "sglang"])
def server(
    request: pytest.FixtureRequest, weights: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A running server of each kind with the first weights."""
    kind: Kind = request.param
    if not Path(python_of(kind)).exists():
        pytest.skip(f"no environment with {kind}: `make test-engines` makes one")
    log_path = tmp_path_factory.mktemp("logs") / f"{kind}.log"
    running = Server(kind, weights[0], log_path, free_port())
    try:
        running.start()
        yield running
    finally:
        running.kill9()


@pytest.fixture
async def engines(server: Server, vocab_size: int) -> AsyncIterator[ReplicatedEngines]:
    """The server as the gateway sees it."""
    kind: EngineKind = "sglang" if server.kind == "sglang" else "vllm"
    opened = engines_of(kind, [server.url], vocab_size=vocab_size, timeout_s=300)
    yield opened
    await opened.aclose()


@pytest.fixture
async def engine_weights(server: Server) -> AsyncIterator[EngineWeights]:
    """The server's weights as the relay sees them."""
    kind: EngineKind = "sglang" if server.kind == "sglang" else "vllm"
    opened = weights_of(kind, server.url, timeout_s=300)
    yield opened
    await opened.aclose()


@pytest.fixture
async def first_weights(weights: list[Path], engine_weights: EngineWeights) -> None:
    """The server samples from the first weights, as version 1, whatever an earlier test did."""
    await engine_weights.update(str(weights[0]), 1)


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies end at their limit only: the servers are asked to ignore the token that ends one."""
    for dialect in (vllm._VllmDialect, sglang._SglangDialect):
        monkeypatch.setattr(dialect, "request_body", _ignoring_eos(dialect.request_body))


def _ignoring_eos(request_body: Callable[..., bytes]) -> Callable[..., bytes]:
    def body(*arguments: Any, **named: Any) -> bytes:
        sent = msgspec.json.decode(request_body(*arguments, **named))
        sent["sampling_params"]["ignore_eos"] = True
        return msgspec.json.encode(sent)

    return body


TakePlaces = Callable[[int], Awaitable[list["asyncio.Task[Generation]"]]]


@pytest.fixture
async def take_places(engines: ReplicatedEngines, endless: None) -> AsyncIterator[TakePlaces]:
    """`await take_places(14)` takes so many of the NUM_SLOTS places that the server samples in.

    The calls are sampled when it returns; each would give 3,000 tokens.
    """
    calls: list[asyncio.Task[Generation]] = []

    async def take(number: int) -> list["asyncio.Task[Generation]"]:
        begun = [asyncio.Event() for _ in range(number)]
        taking = [
            asyncio.create_task(engines.generate(_filler(), _Setting(event))) for event in begun
        ]
        calls.extend(taking)
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in begun))
        return taking

    yield take
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


_numbers = count()


def _filler() -> GenerateRequest:
    # Never an id again: SGLang may notice seconds later that nobody waits for the last one with it.
    number = next(_numbers)
    return GenerateRequest(
        request_id=f"filler-{number:05}",
        session_id="s",
        prompt_ids=TokenIds.of([20 + number % 300]),
        max_tokens=3000,
        temperature=1.0,
        params=CallParams(),
    )


class _Setting:
    """Sets an event when the first token is told."""

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event

    def __call__(self, ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        self._event.set()


Forward = Callable[..., list[float]]


@pytest.fixture(scope="session")
def forward(weights: list[Path]) -> Forward:
    """What transformers says the logprobs are: `forward(number of weights, prompt, output)`."""
    import torch
    from transformers import AutoModelForCausalLM

    @lru_cache
    def model(number: int) -> Any:
        return AutoModelForCausalLM.from_pretrained(weights[number], dtype=torch.float32).eval()

    def logprobs(
        number: int,
        prompt: Sequence[int],
        output: Sequence[int],
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> list[float]:
        ids = torch.tensor([[*prompt, *output]])
        with torch.no_grad():
            logits_TV = model(number)(ids).logits[0, len(prompt) - 1 : -1].float()
        logits_TV /= temperature
        if top_k is not None:
            least_T1 = logits_TV.topk(top_k).values[:, -1:]
            logits_TV = logits_TV.masked_fill(logits_TV < least_T1, -torch.inf)
        logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
        found: list[float] = logprobs_TV[range(len(output)), list(output)].tolist()
        return found

    return logprobs


@pytest.fixture
def eventually() -> Callable[[Callable[[], Awaitable[bool]]], Awaitable[None]]:
    """Wait for a condition, at most a minute."""

    async def wait(condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(60):
            while not await condition():  # noqa: ASYNC110 (what is waited for is elsewhere)
                await asyncio.sleep(0.05)

    return wait

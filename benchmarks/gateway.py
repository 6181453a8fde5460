"""What the gateway adds to a turn, with an engine that answers at once.

    python benchmarks/gateway.py
    python benchmarks/gateway.py --tokens 100000 --turns 100 --sessions 8 --model ./model
    python benchmarks/gateway.py --tokens 100000 --turns 100 --model ./model --reference v/bin/python
    python benchmarks/gateway.py --stalls --reply-tokens 10000 --turns 3 --tokens 100000 --model ./model --reference v/bin/python

Prints one JSON object. A session is a tool-using conversation that grows to `--tokens` tokens in
`--turns` turns; its client hands the arguments back in another order, so that in linear mode every
turn is healed. With `--reference`, an environment that has agentcore-rl-toolkit 0.2.0 serves the same
conversations in front of the same engine (see gateway_reference/serve.py), and `ratio` is ours
divided by its. `--model` names a directory with a Hermes-style template, Qwen2.5's for instance.

`cpu_ms` is the gateway process's own CPU time a turn, `latency_ms` what the client waits for a turn,
engine included; both as means over all turns, and over the last tenth of them, where the history is
longest. `rss_mb_per_session` is what the process grew by. With `--stalls`, `longest_stall_ms`
is the longest that /healthz did not answer. `log_bytes_per_token` is what lies in the log, compressed, for each token of
the final sequences. Broker, engine and client run on the same machine: compare figures of one run.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tokenizers import Tokenizer

from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.embedded.tiny.tokenizer import build_tokenizer
from turnfold.gateway.testing import Reply, ScriptedEngine, gateway_process, text_ids
from turnfold.log.client import create_topics
from turnfold.schemas.topics import Topics

REFERENCE_SERVER = Path(__file__).parent / "gateway_reference" / "serve.py"
CONTROL = {"authorization": "Bearer turnfold-dev"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read",
            "description": "Read a part of a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
            },
        },
    }
]
TEXT = "I will look at that file now."
CALL = (
    '\n<tool_call>\n{"name": "read", "arguments": {"path": "src/main.py", "line": 10}}\n'
    "</tool_call><|im_end|>"
)
WORDS = ["the", "value", "index", "return", "list", "open", "read", "file", "path", "line", "error"]


class Usage(NamedTuple):
    """What a process has used so far."""

    cpu_s: float
    rss_bytes: int


class Server(NamedTuple):
    """A gateway under test."""

    url: str
    pid: int

    def usage(self) -> Usage:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return Usage(ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))


class Conversation:
    """One agent and its growing history."""

    def __init__(self, tokenizer: Tokenizer, tokens_per_turn: int, seed: int) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Find the bug."}]
        self.latencies_ms: list[float] = []
        self.num_tokens = 0
        self._random = random.Random(seed)
        self._num_words = max(1, int(tokens_per_turn / tokens_per_word(tokenizer)))

    async def turn(self, client: httpx.AsyncClient, key: str) -> None:
        began = time.perf_counter()
        response = await client.post(
            "/v1/chat/completions",
            headers={"authorization": f"Bearer {key}"},
            json={"model": "m", "messages": self.messages, "tools": TOOLS},
        )
        self.latencies_ms.append((time.perf_counter() - began) * 1e3)
        response.raise_for_status()
        body = response.json()
        self.num_tokens = body["usage"]["total_tokens"]
        self._take(body["choices"][0]["message"])

    def _take(self, reply: dict[str, Any]) -> None:
        """Continue with the reply, its arguments in the other order, and the tool's result."""
        call = reply["tool_calls"][0]
        arguments = json.loads(call["function"]["arguments"])
        in_other_order = dict(sorted(arguments.items()))
        call["function"]["arguments"] = json.dumps(in_other_order)
        result = " ".join(self._random.choices(WORDS, k=self._num_words))
        self.messages += [reply, {"role": "tool", "tool_call_id": call["id"], "content": result}]


def tokens_per_word(tokenizer: Tokenizer) -> float:
    words = random.Random(0).choices(WORDS, k=400)
    return len(text_ids(tokenizer, " ".join(words))) / 400


def reply(tokenizer: Tokenizer, num_tokens: int) -> Reply:
    """Text and a call, about so many tokens."""
    num_words = int(num_tokens / tokens_per_word(tokenizer))
    text = " ".join([TEXT, *random.Random(1).choices(WORDS, k=num_words)])
    return Reply(ids=text_ids(tokenizer, text + CALL))


@contextmanager
def turnfold_server(
    model: Path, engine: ScriptedEngine, mode: str, scratch: Path
) -> Iterator[Server]:
    with BrokerProcess(scratch / "broker") as broker:
        topics = [s for s in Topics().specs(2) if s.name == Topics().events]
        asyncio.run(create_topics(broker.bootstrap, topics))
        options = ["--model", str(model), "--engine", engine.url, "--bootstrap", broker.bootstrap]
        with gateway_process(*options) as gateway:
            yield Server(gateway.base_url, gateway.process.pid)


@contextmanager
def reference_server(
    python: str, model: Path, engine: ScriptedEngine, mode: str
) -> Iterator[Server]:
    command = [python, str(REFERENCE_SERVER), "--model", str(model), "--engine", engine.url]
    with subprocess.Popen(
        [*command, "--mode", mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield Server(process.stdout.readline().strip(), process.pid)
        finally:
            process.kill()


async def turnfold_key(client: httpx.AsyncClient, mode: str, number: int) -> str:
    body = {"group_id": "bench", "index": number, "history_mode": mode}
    started = await client.post("/v1/rollouts", headers=CONTROL, json=body)
    return str(started.raise_for_status().json()["api_key"])


async def reference_key(client: httpx.AsyncClient, mode: str, number: int) -> str:
    (await client.post(f"/start/s{number}")).raise_for_status()
    return f"s{number}"


async def measure(server: Server, new_key: Any, mode: str, workload: argparse.Namespace) -> Any:
    tokenizer = workload.tokenizer
    tokens_per_turn = workload.tokens // workload.turns - len(workload.reply.ids)
    conversations = [
        Conversation(tokenizer, tokens_per_turn, seed) for seed in range(workload.sessions)
    ]
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        # Two turns that nobody counts: they import, compile and learn the template.
        warm, key = Conversation(tokenizer, 10, seed=0), await new_key(client, mode, -1)
        for _ in range(2):
            await warm.turn(client, key)
        keys = [await new_key(client, mode, number) for number in range(workload.sessions)]
        num_last = max(1, workload.turns // 10)
        before = last = server.usage()
        async with stalls(client, is_probed=workload.stalls) as stalls_ms:
            for turn in range(workload.turns):
                if turn == workload.turns - num_last:
                    last = server.usage()
                turns = (c.turn(client, k) for c, k in zip(conversations, keys, strict=True))
                await asyncio.gather(*turns)
    after = server.usage()
    latencies_ms = [c.latencies_ms for c in conversations]
    return {
        "final_tokens": max(c.num_tokens for c in conversations),
        "cpu_ms": per_turn(after.cpu_s - before.cpu_s, workload.turns * workload.sessions),
        "cpu_ms_last_tenth": per_turn(after.cpu_s - last.cpu_s, num_last * workload.sessions),
        "latency_ms": mean([ms for all_ms in latencies_ms for ms in all_ms]),
        "latency_ms_last_tenth": mean([ms for all_ms in latencies_ms for ms in all_ms[-num_last:]]),
        "rss_mb_per_session": round(
            (after.rss_bytes - before.rss_bytes) / 2**20 / workload.sessions, 2
        ),
        **({"longest_stall_ms": round(max(stalls_ms), 1)} if stalls_ms else {}),
    }


@asynccontextmanager
async def stalls(client: httpx.AsyncClient, *, is_probed: bool) -> AsyncIterator[list[float]]:
    """Milliseconds that /healthz took, asked again and again while inside."""
    found: list[float] = []
    if not is_probed:
        yield found
        return

    async def probe() -> None:
        while True:
            began = time.perf_counter()
            await client.get("/healthz")
            found.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(0.01)

    probing = asyncio.create_task(probe())
    try:
        yield found
    finally:
        probing.cancel()


def per_turn(seconds: float, num_turns: int) -> float:
    return round(seconds / num_turns * 1e3, 2)


def mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 2)


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Ours divided by theirs; what they did not use has no ratio."""
    return {name: round(ours[name] / theirs[name], 3) for name in ours if theirs.get(name, 0) > 0}


def run_mode(mode: str, workload: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with ScriptedEngine(max_model_len=10**7) as engine:
        engine.default = workload.reply
        with turnfold_server(workload.model, engine, mode, scratch) as server:
            ours = asyncio.run(measure(server, turnfold_key, mode, workload))
            data = (scratch / "broker" / "data").rglob("*")
            size = sum(file.stat().st_size for file in data if file.is_file())
        total = ours["final_tokens"] * workload.sessions
        result["turnfold"] = ours | {"log_bytes_per_token": round(size / total, 2)}
        if workload.reference:
            python, model = workload.reference, workload.model
            with reference_server(python, model, engine, mode) as server:
                theirs = asyncio.run(measure(server, reference_key, mode, workload))
            result["reference"] = theirs
            result["ratio"] = ratios(ours, theirs)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--reply-tokens", type=int, default=0, help="text beside each call")
    parser.add_argument("--stalls", action="store_true", help="probe /healthz, which takes CPU too")
    parser.add_argument("--modes", nargs="+", default=["linear", "tree"])
    parser.add_argument("--model", type=Path, help="a directory with a Hermes-style template")
    parser.add_argument("--reference", help="python of an environment with the reference")
    workload = parser.parse_args()
    result: dict[str, Any] = {
        name: getattr(workload, name) for name in ("tokens", "turns", "sessions", "reply_tokens")
    }
    with tempfile.TemporaryDirectory() as scratch:
        if workload.model is None:
            workload.model = Path(scratch) / "model"
            build_tokenizer().save_pretrained(workload.model)
        workload.tokenizer = Tokenizer.from_file(str(workload.model / "tokenizer.json"))
        workload.reply = reply(workload.tokenizer, workload.reply_tokens)
        for mode in workload.modes:
            result[mode] = run_mode(mode, workload, Path(scratch) / mode)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

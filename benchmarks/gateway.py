"""What the gateway adds to a turn, with an engine that answers at once.

    python benchmarks/gateway.py
    python benchmarks/gateway.py --tokens 100000 --turns 100 --sessions 1 --model ./model

Prints one JSON object. A session is a tool-using conversation that grows to `--tokens` tokens in
`--turns` turns; its client hands the arguments back in another order, so that in linear mode every
turn is healed. `cpu_ms` is the gateway process's own CPU time a turn, `overhead_ms` its wall time a
turn without the wait for the engine; both as means over all turns, and over the last tenth of them,
where the history is longest. `rss_mb` is what the process grew by, `log_bytes_per_token` what lies
in the log, compressed, for each token of the final sequences. Broker, engine and client run on the
same machine: compare figures of one machine with each other, not with those of another.
"""

import argparse
import asyncio
import json
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tokenizers import Tokenizer

from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.embedded.tiny.tokenizer import build_tokenizer
from turnfold.gateway.testing import (
    GatewayProcess,
    Reply,
    ScriptedEngine,
    gateway_process,
    text_ids,
)
from turnfold.log.client import create_topics
from turnfold.schemas.topics import Topics

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
CALL = (
    "I will look at that file now.\n<tool_call>\n"
    '{"name": "read", "arguments": {"path": "src/main.py", "line": 10}}\n</tool_call><|im_end|>'
)
WORDS = ["the", "value", "index", "return", "list", "open", "read", "file", "path", "line", "error"]


class Usage(NamedTuple):
    """What a process has used so far."""

    cpu_s: float
    rss_bytes: int


def usage(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE"))


class Conversation:
    """One agent and its growing history."""

    def __init__(self, tokenizer: Tokenizer, tokens_per_turn: int, seed: int) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "Find the bug."}]
        self._random = random.Random(seed)
        words = " ".join(self._random.choices(WORDS, k=400))
        tokens_per_word = len(text_ids(tokenizer, words)) / 400
        self._num_words = max(1, int(tokens_per_turn / tokens_per_word))

    def take(self, reply: dict[str, Any]) -> None:
        """Continue with the reply, its arguments reordered, and the tool's result."""
        call = reply["tool_calls"][0]
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(sorted(arguments.items())))
        result = " ".join(self._random.choices(WORDS, k=self._num_words))
        self.messages += [
            reply,
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ]


class Figures:
    """Totals of the gateway at the start of a phase, and means a turn since."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self._usage, self._overhead = self._now()

    def _now(self) -> tuple[Usage, tuple[float, float]]:
        text = httpx.get(f"{self._gateway.base_url}/metrics").text
        name = "turnfold_gateway_overhead_seconds"
        total, count = (
            float(re.search(rf"^{name}_{part} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]
            for part in ("sum", "count")
        )
        return usage(self._gateway.process.pid), (total, count)

    def since(self) -> dict[str, float]:
        now, (total, count) = self._now()
        num_turns = max(count - self._overhead[1], 1)
        return {
            "cpu_ms": round((now.cpu_s - self._usage.cpu_s) / num_turns * 1e3, 2),
            "overhead_ms": round((total - self._overhead[0]) / num_turns * 1e3, 2),
        }


@contextmanager
def system(model: Path, engine: ScriptedEngine, scratch: Path) -> Iterator[GatewayProcess]:
    with BrokerProcess(scratch / "broker") as broker:
        topics = [s for s in Topics().specs(2) if s.name == Topics().events]
        asyncio.run(create_topics(broker.bootstrap, topics))
        options = ["--model", str(model), "--engine", engine.url, "--bootstrap", broker.bootstrap]
        with gateway_process(*options) as gateway:
            yield gateway


async def one_turn(client: httpx.AsyncClient, key: str, conversation: Conversation) -> int:
    """Make a turn and return the tokens of its sequence."""
    response = await client.post(
        "/v1/chat/completions",
        headers={"authorization": f"Bearer {key}"},
        json={"model": "m", "messages": conversation.messages, "tools": TOOLS},
    )
    response.raise_for_status()
    body = response.json()
    conversation.take(body["choices"][0]["message"])
    return int(body["usage"]["total_tokens"])


async def warm_up(client: httpx.AsyncClient, mode: str, tokenizer: Tokenizer) -> None:
    """Two turns that nobody counts: they import, compile and learn the template."""
    body = {"group_id": "warm", "history_mode": mode}
    started = await client.post("/v1/rollouts", headers=CONTROL, json=body)
    conversation = Conversation(tokenizer, 10, seed=0)
    for _ in range(2):
        await one_turn(client, started.json()["api_key"], conversation)


async def run(
    gateway: GatewayProcess, tokenizer: Tokenizer, mode: str, args: argparse.Namespace
) -> dict[str, Any]:
    tokens_per_turn = args.tokens // args.turns - len(text_ids(tokenizer, CALL))
    conversations = [
        Conversation(tokenizer, tokens_per_turn, seed) for seed in range(args.sessions)
    ]
    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=120) as client:
        keys = []
        for _ in conversations:
            body = {"group_id": "bench", "history_mode": mode}
            started = await client.post("/v1/rollouts", headers=CONTROL, json=body)
            keys.append(started.json()["api_key"])
        await warm_up(client, mode, tokenizer)
        before = usage(gateway.process.pid)
        whole = Figures(gateway)
        last = whole
        began = time.perf_counter()
        lengths: list[int] = []
        for turn in range(args.turns):
            if turn == args.turns - max(1, args.turns // 10):
                last = Figures(gateway)
            lengths = list(
                await asyncio.gather(
                    *(one_turn(client, k, c) for k, c in zip(keys, conversations, strict=True))
                )
            )
        wall_s = time.perf_counter() - began
        inspected = await client.get(
            "/v1/rollouts/current", headers={"authorization": f"Bearer {keys[0]}"}
        )
    return {
        "mean": whole.since(),
        "last_tenth": last.since(),
        "turns_per_s": round(args.turns * args.sessions / wall_s, 1),
        "final_tokens": max(lengths),
        "rss_mb": round((usage(gateway.process.pid).rss_bytes - before.rss_bytes) / 2**20, 1),
        "continuity": inspected.json()["continuity"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--model", type=Path, help="a directory with a Qwen-style template")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "tokens": args.tokens, "turns": args.turns, "sessions": args.sessions,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or Path(scratch) / "model"
        if args.model is None:
            build_tokenizer().save_pretrained(model)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        for mode in ("linear", "tree"):
            with ScriptedEngine(max_model_len=10**7) as engine:
                engine.default = Reply(ids=text_ids(tokenizer, CALL))
                with system(model, engine, Path(scratch) / mode) as gateway:
                    result[mode] = asyncio.run(run(gateway, tokenizer, mode, args))
                    data = (Path(scratch) / mode / "broker" / "data").rglob("*")
                    size = sum(file.stat().st_size for file in data if file.is_file())
            total = result[mode]["final_tokens"] * args.sessions
            result[mode]["log_bytes_per_token"] = round(size / total, 2)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

"""What the engine's answers must be, where sessions go, and what happens when an engine fails."""

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnfold.gateway.backends.engine import EngineError, GenerateRequest
from turnfold.gateway.backends.placement import ranked
from turnfold.gateway.backends.vllm import VllmEngines
from turnfold.gateway.backends.vllm_wire import read_generation
from turnfold.gateway.backends.weights_directory import UnusableWeights, check_weights_directory
from turnfold.gateway.calls import CallParams
from turnfold.gateway.testing import Reply, ScriptedEngine, free_port
from turnfold.schemas.wire import TokenIds

USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 6}}


def response(**changes: Any) -> bytes:
    choice = {
        "token_ids": [7, 8],
        "finish_reason": "stop",
        "logprobs": {"content": [{"logprob": -0.5, "token_id": 7}, {"logprob": -1.5}]},
        **changes,
    }
    return msgspec.json.encode({"choices": [choice], "usage": USAGE})


def test_a_good_sample_is_read_as_it_is() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    generation = read_generation(response(weight_versions=spans, stop_reason=9), vocab_size=10)
    assert generation.output_ids.tolist() == [7, 8]
    assert generation.logprobs.tolist() == [-0.5, -1.5]
    assert generation.stop_reason == 9
    assert generation.num_cached_tokens == 6
    versions = [(s.policy_version, s.start, s.end) for s in generation.policy_versions]
    assert versions == [(3, 0, 1), (4, 1, 2)]


def test_an_engine_that_was_never_told_a_version_says_nothing() -> None:
    spans = [{"version": "default", "start": 0, "end": 2}]
    assert read_generation(response(weight_versions=spans), 10).policy_versions == ()


@pytest.mark.parametrize(
    "usage", [None, {}, {"prompt_tokens_details": None}, {"prompt_tokens_details": {}}]
)
def test_an_engine_that_says_nothing_of_its_cache_is_not_said_to(usage: Any) -> None:
    told = msgspec.json.decode(response())
    body = msgspec.json.encode({**told, "usage": usage})
    assert read_generation(body, 10).num_cached_tokens is None


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"token_ids": None}, "got none"),
        ({"token_ids": []}, "got none"),
        ({"token_ids": [7, 10]}, "id 10 is outside the vocabulary of 10"),
        ({"token_ids": [7, -1]}, "id -1 is outside"),
        ({"token_ids": [7, 8, 9]}, "3 output tokens but 2 logprobs"),
        ({"token_ids": [6, 8]}, "id 6 has the logprob of id 7"),
        ({"logprobs": None}, "expected logprobs"),
        ({"logprobs": {"content": None}}, "expected logprobs"),
        ({"logprobs": {"content": [{"logprob": None}, {"logprob": -1}]}}, "None is not finite"),
        ({"logprobs": {"content": [{"logprob": -1e300}, {"logprob": -1}]}}, "does not fit"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "cover 1 of 2"),
        ({"weight_versions": [{"version": "3", "start": 1, "end": 2}]}, "begins at 1, expected 0"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(EngineError, match=what) as caught:
        read_generation(response(**changes), vocab_size=10)
    assert caught.value.reason == "invalid_output"


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"choices": []}', b'{"choices": 7}'])
def test_an_answer_of_another_shape_is_refused(body: bytes) -> None:
    with pytest.raises(EngineError) as caught:
        read_generation(body, vocab_size=10)
    assert caught.value.reason == "invalid_output"


@given(st.sets(st.text(min_size=1, max_size=5), min_size=2, max_size=6), st.text(max_size=5))
def test_a_lost_replica_moves_only_its_own_sessions(urls: set[str], session_id: str) -> None:
    order = ranked(session_id, urls)
    assert sorted(order) == sorted(urls)
    for lost in order[1:]:
        assert ranked(session_id, urls - {lost})[0] == order[0]
    assert ranked(session_id, urls - {order[0]})[0] == order[1]


def test_sessions_spread_over_the_replicas() -> None:
    urls = ["http://a", "http://b", "http://c"]
    firsts = [ranked(f"s{i}", urls)[0] for i in range(300)]
    assert min(firsts.count(url) for url in urls) > 60


def request(session_id: str = "s", request_id: str = "q1") -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        session_id=session_id,
        prompt_ids=TokenIds.of([1, 2, 3]),
        max_tokens=4,
        temperature=1.0,
        params=CallParams(),
    )


@pytest.fixture
def second_engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine() as engine:
        yield engine


async def open_engines(*urls: str, timeout_s: float = 5.0) -> VllmEngines:
    return VllmEngines(urls, vocab_size=100, timeout_s=timeout_s)


async def test_a_dropped_connection_is_tried_once_more(engine: ScriptedEngine) -> None:
    engines = await open_engines(engine.url)
    engine.script(Reply(ids=[], is_connection_dropped=True), Reply(ids=[9]))
    assert (await engines.generate(request())).output_ids.tolist() == [9]
    assert len(engine.requests) == 2
    await engines.aclose()


async def test_a_replica_that_is_down_is_passed_over(
    engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    engines = await open_engines(gone, engine.url, second_engine.url)
    for i in range(12):
        assert (await engines.generate(request(f"s{i}"))).output_ids.tolist() == [5]
    assert len(engine.requests) + len(second_engine.requests) == 12
    assert await engines.num_reachable() == 2
    await engines.aclose()


async def test_calls_of_one_session_stay_on_one_replica(
    engine: ScriptedEngine, second_engine: ScriptedEngine
) -> None:
    engines = await open_engines(engine.url, second_engine.url)
    for _ in range(5):
        await engines.generate(request("one"))
    assert sorted((len(engine.requests), len(second_engine.requests))) == [0, 5]
    await engines.aclose()


async def test_no_engine_at_all_is_unavailable() -> None:
    engines = await open_engines(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(EngineError) as caught:
        await engines.generate(request())
    assert caught.value.reason == "engine_unavailable"
    assert await engines.max_context_tokens() is None
    await engines.aclose()


@pytest.mark.parametrize(
    ("status", "reason"),
    [(400, "engine_refused"), (503, "engine_unavailable"), (500, "engine_error")],
)
async def test_error_answers_are_told_apart(
    engine: ScriptedEngine, status: int, reason: str
) -> None:
    engines = await open_engines(engine.url)
    engine.script(Reply(ids=[], status=status))
    with pytest.raises(EngineError, match="scripted failure") as caught:
        await engines.generate(request())
    assert caught.value.reason == reason
    await engines.aclose()


async def test_prompts_and_outputs_of_any_length_pass(engine: ScriptedEngine) -> None:
    engines = await open_engines(engine.url)
    prompt_ids, output_ids = [7] * 400_000, [8] * 50_000
    engine.script(Reply(ids=output_ids))
    asked = msgspec.structs.replace(request(), prompt_ids=TokenIds.of(prompt_ids))
    assert (await engines.generate(asked)).output_ids.tolist() == output_ids
    assert engine.requests[0]["token_ids"] == prompt_ids
    await engines.aclose()


async def test_a_call_goes_only_where_it_was_sent(engine: ScriptedEngine) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        target = f"{engine.url}/inference/v1/generate".encode()
        writer.write(b"HTTP/1.1 307 x\r\nlocation: %b\r\ncontent-length: 0\r\n\r\n" % target)
        await writer.drain()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        engines = await open_engines(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(EngineError, match="status 307") as caught:
            await engines.generate(request())
        await engines.aclose()
    assert caught.value.reason == "engine_refused"
    assert engine.requests == []


@pytest.mark.field_case("miles#2030")
async def test_an_engine_that_never_answers_is_given_up_and_told_so(
    engine: ScriptedEngine, eventually: Any
) -> None:
    engines = await open_engines(engine.url, timeout_s=0.2)
    release = threading.Event()
    engine.script(Reply(ids=[9], release=release))
    with pytest.raises(EngineError) as caught:
        await engines.generate(request(request_id="slow"))
    assert caught.value.reason == "engine_unavailable"

    async def is_aborted() -> bool:
        return engine.aborted == ["generate-tokens-slow"]

    await eventually(is_aborted)
    release.set()
    await engines.aclose()


async def test_a_cancelled_call_is_aborted_at_the_engine(
    engine: ScriptedEngine, eventually: Any
) -> None:
    engines = await open_engines(engine.url)
    release = threading.Event()
    engine.script(Reply(ids=[9], release=release))
    calling = asyncio.create_task(engines.generate(request(request_id="left")))

    async def has_arrived() -> bool:
        return len(engine.requests) == 1

    await eventually(has_arrived)
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)

    async def is_aborted() -> bool:
        return engine.aborted == ["generate-tokens-left"]

    await eventually(is_aborted)
    release.set()
    await engines.aclose()


def write_shard(path: Path, num_values: int) -> None:
    data = np.zeros(num_values, np.float32).tobytes()
    entry = {"dtype": "F32", "shape": [num_values], "data_offsets": [0, len(data)]}
    header = json.dumps({"w": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_whole_weights_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_shard(tmp_path / "model.safetensors", 4)
    assert check_weights_directory(str(tmp_path)) == tmp_path
    assert check_weights_directory(f"file://{tmp_path}") == tmp_path


def test_weights_that_are_missing_or_cut_short_are_named(tmp_path: Path) -> None:
    shard = tmp_path / "model-1.safetensors"
    with pytest.raises(UnusableWeights, match="does not exist"):
        check_weights_directory(str(tmp_path / "no"))
    with pytest.raises(UnusableWeights, match=r"no config\.json"):
        check_weights_directory(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnusableWeights, match=r"no \*\.safetensors"):
        check_weights_directory(str(tmp_path))
    index = {"weight_map": {"w": shard.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnusableWeights, match=r"model-1\.safetensors is missing"):
        check_weights_directory(str(tmp_path))
    write_shard(shard, 4)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UnusableWeights, match="expected"):
        check_weights_directory(str(tmp_path))

"""Samples that an engine streams: put together, checked, tried again only before their first token."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnfold.gateway.backends.engine import EngineError, GenerateRequest
from turnfold.gateway.backends.event_stream import EventData
from turnfold.gateway.backends.vllm import VllmEngines
from turnfold.gateway.backends.vllm_wire import StreamedGeneration
from turnfold.gateway.calls import CallParams
from turnfold.gateway.testing import Reply, ScriptedEngine, free_port
from turnfold.schemas.wire import TokenIds


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []

    def __call__(self, ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        self.ids += ids
        self.logprobs += logprobs


@pytest.fixture
def second_engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine() as engine:
        yield engine


def request() -> GenerateRequest:
    return GenerateRequest(
        request_id="q1",
        session_id="s",
        prompt_ids=TokenIds.of([1, 2, 3]),
        max_tokens=4,
        temperature=1.0,
        params=CallParams(),
    )


@pytest.fixture
async def engines_at() -> AsyncIterator[Callable[..., VllmEngines]]:
    """Engines at URLs, let go of at the end."""
    async with AsyncExitStack() as closing:

        def opened(*urls: str) -> VllmEngines:
            engines = VllmEngines(urls, vocab_size=100, timeout_s=5.0)
            closing.push_async_callback(engines.aclose)
            return engines

        yield opened


@given(st.lists(st.sampled_from(["data: 1\n\n", "data: [DONE]\r\n\r\n", ": hi\n\n"])), st.data())
def test_events_are_found_however_the_bytes_are_cut(events: list[str], data: st.DataObject) -> None:
    received = "".join(events).encode()
    cuts = data.draw(st.lists(st.integers(0, max(0, len(received))), max_size=8))
    reader = EventData()
    bounds = sorted({0, len(received), *cuts})
    found = [d for a, b in pairwise(bounds) for d in reader.feed(received[a:b])]
    expected = [e.split()[1].encode() for e in events if e.startswith("data")]
    assert found == expected


async def test_the_pieces_are_told_as_they_come_and_make_the_sample(
    engine: ScriptedEngine, engines_at: Any
) -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    engine.script(
        Reply(ids=[7, 8, 9], logprobs=[-1.0, -2.0, -3.0], stop_reason=9, weight_versions=spans)
    )
    told = Listener()
    generation = await engines_at(engine.url).generate(request(), told)
    assert told.ids == generation.output_ids.tolist() == [7, 8, 9]
    assert told.logprobs == generation.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert generation.stop_reason == 9
    assert [s.policy_version for s in generation.policy_versions] == [3, 4]


async def test_a_call_without_a_listener_is_not_streamed(
    engine: ScriptedEngine, engines_at: Any
) -> None:
    await engines_at(engine.url).generate(request())
    assert engine.requests[0]["stream"] is False


async def test_a_stream_is_tried_again_before_its_first_token(
    engine: ScriptedEngine, second_engine: ScriptedEngine, engines_at: Any
) -> None:
    told = Listener()
    engine.script(Reply(ids=[5, 6], breaks_after=0), Reply(ids=[7, 8]))
    generation = await engines_at(engine.url).generate(request(), told)
    assert told.ids == generation.output_ids.tolist() == [7, 8]
    nobody = f"http://127.0.0.1:{free_port()}"
    generation = await engines_at(nobody, second_engine.url).generate(request(), Listener())
    assert generation.output_ids.tolist() == [5]


async def test_a_stream_is_not_tried_again_after_its_first_token(
    engine: ScriptedEngine, engines_at: Any
) -> None:
    told = Listener()
    engine.script(Reply(ids=[5, 6, 7], breaks_after=2), Reply(ids=[7, 8]))
    engines = engines_at(engine.url)
    with pytest.raises(EngineError, match="stream broke after 2 tokens") as caught:
        await engines.generate(request(), told)
    assert (caught.value.reason, caught.value.partial) == ("engine_unavailable", None)
    assert told.ids == [5, 6]
    await engines.aclose()
    assert engine.aborted == ["generate-tokens-q1"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_an_aborted_request_had_is_given_back(
    engine: ScriptedEngine, engines_at: Any, is_streamed: bool
) -> None:
    spans = [{"version": "3", "start": 0, "end": 2}]
    engine.script(Reply(ids=[7, 8], finish_reason="abort", weight_versions=spans))
    with pytest.raises(EngineError) as caught:
        await engines_at(engine.url).generate(request(), Listener() if is_streamed else None)
    partial = caught.value.partial
    assert caught.value.reason == "aborted"
    assert partial is not None
    assert partial.output_ids.tolist() == [7, 8]
    assert [s.policy_version for s in partial.policy_versions] == [3]


async def test_a_request_that_was_aborted_in_the_queue_had_nothing(
    engine: ScriptedEngine, engines_at: Any
) -> None:
    engine.script(Reply(ids=[], finish_reason="abort"))
    with pytest.raises(EngineError) as caught:
        await engines_at(engine.url).generate(request(), Listener())
    assert caught.value.partial is not None
    assert len(caught.value.partial.output_ids) == 0


async def test_a_stream_that_comes_in_one_piece_lets_others_work_in_between(
    engines_at: Any,
) -> None:
    events = [b"data: " + chunk() + b"\n\n" for _ in range(999)]
    events += [b"data: " + chunk(finish_reason="stop") + b"\n\n", b"data: [DONE]\n\n"]
    told, num_told_to_others = Listener(), set()

    async def look() -> None:
        while True:
            num_told_to_others.add(len(told.ids))
            await asyncio.sleep(0)

    async with raw_engine(b"text/event-stream", b"".join(events)) as url:
        looking = asyncio.create_task(look())
        generation = await engines_at(url).generate(request(), told)
        looking.cancel()
    assert len(generation.output_ids) == len(told.ids) == 1000
    assert len(num_told_to_others) > 5


async def test_an_event_of_any_length_is_read(engines_at: Any) -> None:
    num_tokens = 100_000
    entries = [{"logprob": -0.5}] * num_tokens
    event = chunk(token_ids=[7] * num_tokens, logprobs={"content": entries}, finish_reason="length")
    async with raw_engine(b"text/event-stream", b"data: " + event + b"\n\n") as url:
        generation = await engines_at(url).generate(request(), Listener())
    assert len(generation.output_ids) == num_tokens


@asynccontextmanager
async def raw_engine(content_type: bytes, body: bytes) -> AsyncIterator[str]:
    """A server that answers every request with this body, sent at once."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (content_type, len(body), body)
        )
        await writer.drain()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def chunk(**changes: Any) -> bytes:
    choice = {"token_ids": [7], "logprobs": {"content": [{"logprob": -0.5}]}, **changes}
    return msgspec.json.encode({"choices": [choice]})


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"<html>", "expected a chunk"),
        (b'{"choices": [{}, {}]}', "expected 1 choice, got 2"),
        (chunk(token_ids=[100]), "output token 1: id 100 is outside the vocabulary"),
        (chunk(token_ids=[7, 8]), "2 output tokens but 1 logprobs"),
        (chunk(logprobs=None), "expected logprobs"),
        (chunk(logprobs={"content": [{"logprob": None}]}), "not finite"),
        (b'{"error": {"message": "out of memory"}}', "the engine failed: out of memory"),
    ],
)
def test_a_chunk_that_cannot_be_used_is_not_passed_on(data: bytes, what: str) -> None:
    streamed = StreamedGeneration(vocab_size=100)
    assert streamed.feed(chunk()) == ([7], [-0.5])
    with pytest.raises(EngineError, match=what):
        streamed.feed(data)


def test_the_usage_of_a_stream_comes_behind_its_tokens() -> None:
    streamed = StreamedGeneration(vocab_size=100)
    streamed.feed(chunk(finish_reason="stop"))
    streamed.feed(b'{"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 6}}}')
    assert streamed.end().num_cached_tokens == 6


def test_a_stream_without_a_finish_reason_was_cut() -> None:
    streamed = StreamedGeneration(vocab_size=100)
    streamed.feed(chunk())
    assert streamed.feed(b'{"choices": [], "usage": {}}') == ([], [])
    with pytest.raises(EngineError, match="ended after 1 tokens") as caught:
        streamed.end()
    assert caught.value.reason == "engine_unavailable"

"""How SGLang's answers are read, and what it is asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnfold.gateway.app import listen
from turnfold.gateway.backends import vllm_wire
from turnfold.gateway.backends.engine import EngineError, GenerateRequest
from turnfold.gateway.backends.sglang import SglangEngines
from turnfold.gateway.backends.sglang_wire import (
    StreamedGeneration,
    read_generation,
    request_body,
)
from turnfold.gateway.backends.vllm import VllmEngines
from turnfold.gateway.calls import CallParams
from turnfold.schemas.wire import TokenIds

STOP = {"type": "stop", "matched": 2}


def answer(
    ids: Sequence[int], *, finish: Any = STOP, total: int | None = None, **meta: Any
) -> bytes:
    """A chunk with these ids, the logprob of id n being -n/10."""
    body = {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": finish,
            "completion_tokens": len(ids) if total is None else total,
            "output_token_logprobs": [[-i / 10, i, None] for i in ids],
            **meta,
        },
    }
    return msgspec.json.encode(body)


def request(**params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="turn",
        session_id="s",
        prompt_ids=TokenIds.of([1, 2, 3]),
        max_tokens=4,
        temperature=0.5,
        params=CallParams(**params),
    )


def test_a_good_sample_is_read_as_it_is() -> None:
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    told = answer([7, 2], weight_versions=spans, cached_tokens=6)
    generation = read_generation(told, vocab_size=10)
    assert generation.output_ids.tolist() == [7, 2]
    assert generation.logprobs.tolist() == pytest.approx([-0.7, -0.2])
    assert (generation.finish_reason, generation.stop_reason) == ("stop", 2)
    assert generation.num_cached_tokens == 6
    versions = [(s.policy_version, s.start, s.end) for s in generation.policy_versions]
    assert versions == [(3, 0, 1), (4, 1, 2)]


def test_the_request_says_what_sglang_calls_it() -> None:
    body = json.loads(request_body(request(seed=9, stop=("x",)), "rid", is_streamed=True))
    assert body == {
        "rid": "rid",
        "input_ids": [1, 2, 3],
        "sampling_params": {
            "max_new_tokens": 4,
            "temperature": 0.5,
            "sampling_seed": 9,
            "stop": ["x"],
        },
        "return_logprob": True,
        "return_sampling_mask": False,
        "stream": True,
    }


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_truncated_sampling_is_asked_for_its_own_logprobs(params: dict[str, Any]) -> None:
    assert json.loads(request_body(request(**params), "rid"))["return_sampling_mask"] is True
    sampled = answer([7, 2], output_token_sampling_logprobs=[-0.25, 0.0])
    assert read_generation(sampled, 10).logprobs.tolist() == [-0.25, 0.0]


def read(*chunks: bytes) -> tuple[list[list[int]], StreamedGeneration]:
    streamed = StreamedGeneration(vocab_size=10)
    return [streamed.feed(chunk)[0] for chunk in chunks], streamed


@pytest.mark.parametrize(
    "chunks",
    [
        [
            answer([5], finish=None),
            answer([6, 7], finish=None, total=3),
            answer([2], total=4),
        ],
        [
            answer([5], finish=None),
            answer([5, 6, 7], finish=None),
            answer([5, 6, 7, 2]),
        ],
    ],
    ids=["incremental", "cumulative"],
)
def test_both_kinds_of_streams_are_read(chunks: list[bytes]) -> None:
    pieces, streamed = read(*chunks)
    assert pieces == [[5], [6, 7], [2]]
    generation = streamed.end()
    assert generation.output_ids.tolist() == [5, 6, 7, 2]
    assert generation.logprobs.tolist() == pytest.approx([-0.5, -0.6, -0.7, -0.2])


def test_a_chunk_that_was_written_late_holds_more_than_it_counts() -> None:
    pieces, _ = read(answer([5], finish=None), answer([5, 6, 7], finish=None, total=2))
    assert pieces == [[5], [6, 7]]


def test_a_last_chunk_without_tokens_ends_the_stream() -> None:
    pieces, streamed = read(answer([5, 6], finish=None), answer([], total=2))
    assert pieces == [[5, 6], []]
    assert streamed.end().output_ids.tolist() == [5, 6]


def test_a_stream_without_an_end_is_no_sample() -> None:
    _, streamed = read(answer([5], finish=None))
    with pytest.raises(EngineError, match="after 1 tokens without a finish reason") as caught:
        streamed.end()
    assert caught.value.reason == "engine_unavailable"


def test_what_an_aborted_request_had_is_handed_on() -> None:
    spans = [{"version": "3", "start": 0, "end": 2}]
    with pytest.raises(EngineError) as caught:
        read_generation(answer([5, 6], finish={"type": "abort"}, weight_versions=spans), 10)
    assert caught.value.reason == "aborted"
    assert caught.value.partial is not None
    assert caught.value.partial.output_ids.tolist() == [5, 6]
    assert len(caught.value.partial.logprobs) == 2
    assert caught.value.partial.policy_versions[0].end == 2


def test_a_request_aborted_in_the_queue_had_nothing() -> None:
    with pytest.raises(EngineError) as caught:
        read_generation(answer([], finish={"type": "abort", "message": "x"}), 10)
    assert caught.value.reason == "aborted"
    assert caught.value.partial is not None
    assert len(caught.value.partial.output_ids) == 0


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ({"type": "abort", "status_code": 400, "message": "too long"}, "engine_refused"),
        ({"type": "abort", "status_code": 503, "message": "later"}, "aborted"),
        ({"type": "other"}, "engine_error"),
    ],
)
def test_other_ends_are_told_apart(finish: dict[str, Any], reason: str) -> None:
    with pytest.raises(EngineError) as caught:
        read_generation(answer([5], finish=finish), 10)
    assert caught.value.reason == reason


def test_logprobs_that_are_longer_than_the_ids_are_refused() -> None:
    longer = [[-0.1, 5, None], [-0.1, 6, None], [-0.1, 7, None]]
    with pytest.raises(EngineError, match="2 output tokens but 3 logprobs") as caught:
        read_generation(answer([5, 6], output_token_logprobs=longer), 10)
    assert caught.value.reason == "invalid_output"


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (answer([]), "got none"),
        (answer([5, 10]), "output token 1: id 10 is outside the vocabulary of 10"),
        (answer([5], output_token_logprobs=[]), "1 output tokens but 0 logprobs"),
        (answer([5], output_token_logprobs=[[None, 5, None]]), "None is not finite"),
        (answer([5], output_token_logprobs=[[-1.0, 6, None]]), "id 5 has the logprob of id 6"),
        (answer([5, 6], output_token_sampling_logprobs=[-1.0]), "2 logprobs but 1 of the trunc"),
        (answer([5], weight_versions=[{"version": "1", "start": 0, "end": 2}]), "cover 2 of 1"),
        (b"[]", "in JSON"),
        (b"\xff", "in JSON"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_refused(body: bytes, what: str) -> None:
    with pytest.raises(EngineError, match=what) as caught:
        read_generation(body, vocab_size=10)
    assert caught.value.reason == "invalid_output"


def test_an_error_in_the_middle_of_a_stream_is_one() -> None:
    streamed = StreamedGeneration(vocab_size=10)
    with pytest.raises(EngineError, match="no memory") as caught:
        streamed.feed(b'{"error": {"message": "no memory", "code": 500}}')
    assert caught.value.reason == "engine_error"


@pytest.mark.parametrize("read", [StreamedGeneration, vllm_wire.StreamedGeneration])
def test_a_refusal_in_a_stream_is_one(read: Any) -> None:
    """Its status was sent before the request was looked at."""
    with pytest.raises(EngineError, match="out of vocabulary") as caught:
        read(vocab_size=10).feed(b'{"error": {"message": "out of vocabulary", "code": 400}}')
    assert caught.value.reason == "engine_refused"


class Sglang:
    """SGLang's routes; the first answer to a request may be that the connection breaks."""

    def __init__(self) -> None:
        self.rids: list[str] = []
        self.aborted: list[str] = []
        self.is_dropping = False
        self.release = asyncio.Event()
        self.release.set()
        self.url = ""

    def app(self) -> Starlette:
        async def generate(request: Request) -> Response:
            self.rids.append((await request.json())["rid"])
            if self.is_dropping:
                self.is_dropping = False
                request.receive.__self__.transport.abort()  # type: ignore[attr-defined]
            await self.release.wait()
            return Response(answer([5, 2]))

        async def abort(request: Request) -> Response:
            self.aborted.append((await request.json())["rid"])
            return Response()

        async def info(request: Request) -> Response:
            return JSONResponse({"max_req_input_len": 2042})

        return Starlette(
            routes=[
                Route("/generate", generate, methods=["POST"]),
                Route("/abort_request", abort, methods=["POST"]),
                Route("/server_info", info),
                Route("/model_info", info),
            ]
        )


@asynccontextmanager
async def serving(server: Sglang) -> AsyncIterator[SglangEngines]:
    listening = listen("127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    runner = uvicorn.Server(uvicorn.Config(server.app(), log_level="critical", lifespan="off"))
    task = asyncio.create_task(runner._serve([listening]))
    engines = SglangEngines([server.url], vocab_size=10, timeout_s=10)
    try:
        yield engines
    finally:
        await engines.aclose()
        server.release.set()
        runner.should_exit = runner.force_exit = True
        await task


async def test_a_second_try_has_an_id_of_its_own() -> None:
    server = Sglang()
    server.is_dropping = True
    async with serving(server) as engines:
        assert (await engines.generate(request())).output_ids.tolist() == [5, 2]
    assert server.rids == ["turn", "turn-again"]


async def test_a_call_that_nobody_waits_for_is_aborted(eventually: Any) -> None:
    server = Sglang()
    server.release.clear()
    async with serving(server) as engines:
        call = asyncio.create_task(engines.generate(request()))

        async def has_come() -> bool:
            return server.rids == ["turn"]

        await eventually(has_come)
        call.cancel()
        await asyncio.wait({call})
        server.release.set()
    assert server.aborted == ["turn", "turn-again"]


async def test_limit_and_health_are_asked_where_an_update_does_not_hide_them() -> None:
    async with serving(Sglang()) as engines:
        assert await engines.max_context_tokens() == 2042
        assert await engines.num_reachable() == 1


async def test_an_id_that_would_end_the_server_is_not_sent() -> None:
    server = Sglang()
    async with serving(server) as engines:
        sent = msgspec.structs.replace(request(), prompt_ids=TokenIds.of([1, 10]))
        with pytest.raises(EngineError, match="prompt token 1: id 10 is outside") as caught:
            await engines.generate(sent)
    assert caught.value.reason == "engine_refused"
    assert server.rids == []


async def test_the_wrong_kind_of_server_is_named() -> None:
    server = Sglang()
    async with serving(server):
        engines = VllmEngines([server.url], vocab_size=10, timeout_s=5)
        with pytest.raises(EngineError, match="TURNFOLD_ENGINE_KIND") as caught:
            await engines.generate(request())
        await engines.aclose()
    assert caught.value.reason == "engine_error"

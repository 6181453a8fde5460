"""What comes back from a real engine: the ids that were sampled, under the logprobs of the policy."""

import asyncio
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from turnfold.gateway.backends.engine import EngineError, GenerateRequest
from turnfold.gateway.backends.replicas import ReplicatedEngines
from turnfold.gateway.calls import CallParams
from turnfold.schemas.wire import TokenIds

EOS = 2
MAX_LEN = 4096
NUM_SLOTS = 16
CLOSE = 1e-3
"""Largest difference to a forward pass of transformers, in nats."""

pytestmark = pytest.mark.usefixtures("first_weights", "endless")
_numbers = count()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Any tokens; another prompt for each seed, so that no test finds another's prefix."""
    return [int(i) for i in np.random.default_rng(seed).integers(10, 370, length)]


def request(
    ids: Sequence[int], max_tokens: int, *, temperature: float = 1.0, **params: Any
) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"turn-{next(_numbers):04}",
        session_id="s",
        prompt_ids=TokenIds.of(ids),
        max_tokens=max_tokens,
        temperature=temperature,
        params=CallParams(**params),
    )


def largest_difference(measured: Sequence[float], expected: Sequence[float]) -> float:
    return float(np.abs(np.asarray(measured) - np.asarray(expected)).max())


def skip_without_logit_bias(server: Any) -> None:
    if server.kind == "embedded":
        pytest.skip("the embedded engine has no logit bias; its own tests cover this")


class Pieces:
    """What is told of an output while it is sampled."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.num_pieces = 0

    def __call__(self, ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.num_pieces += 1


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_a_forward_pass(
    engines: ReplicatedEngines, forward: Any, is_streamed: bool, temperature: float
) -> None:
    ids = prompt(70, seed=1)
    sent = request(ids, 40, temperature=temperature)
    generation = await engines.generate(sent, Pieces() if is_streamed else None)
    output = generation.output_ids.tolist()
    assert (len(output), generation.finish_reason) == (40, "length")
    expected = forward(0, ids, output, temperature=temperature)
    assert largest_difference(generation.logprobs.tolist(), expected) < CLOSE
    spans = [(s.policy_version, s.start, s.end) for s in generation.policy_versions]
    assert spans == [(1, 0, 40)]


async def test_the_pieces_of_a_stream_are_its_output(engines: ReplicatedEngines) -> None:
    pieces = Pieces()
    sent = request(prompt(30, seed=2), 50)
    generation = await engines.generate(sent, pieces)
    assert pieces.num_pieces > 10
    assert pieces.ids == generation.output_ids.tolist()
    assert largest_difference(pieces.logprobs, generation.logprobs.tolist()) < 1e-6


@pytest.mark.parametrize(
    "truncation", [{"top_k": 3}, {"top_k": 5, "top_p": 1.0}], ids=["top_k", "top_k with top_p 1"]
)
async def test_logprobs_of_truncated_sampling_are_those_of_the_truncated_distribution(
    engines: ReplicatedEngines, forward: Any, truncation: dict[str, Any]
) -> None:
    ids = prompt(40, seed=3)
    sent = request(ids, 30, temperature=0.7, **truncation)
    generation = await engines.generate(sent)
    expected = forward(
        0,
        ids,
        generation.output_ids.tolist(),
        temperature=0.7,
        top_k=truncation["top_k"],
    )
    assert largest_difference(generation.logprobs.tolist(), expected) < CLOSE


async def test_greedy_logprobs_are_those_at_temperature_1(
    engines: ReplicatedEngines, forward: Any
) -> None:
    ids = prompt(40, seed=4)
    generation = await engines.generate(request(ids, 20, temperature=0.0))
    again = await engines.generate(request(ids, 20, temperature=0.0))
    output = generation.output_ids.tolist()
    assert again.output_ids == generation.output_ids
    assert largest_difference(generation.logprobs.tolist(), forward(0, ids, output)) < CLOSE


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_token_that_ends_a_reply_is_part_of_it(
    engines: ReplicatedEngines, server: Any, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_logit_bias(server)
    monkeypatch.undo()  # "endless"
    sent = request(prompt(20), 9, logit_bias={str(EOS): 100.0})
    generation = await engines.generate(sent, Pieces() if is_streamed else None)
    assert generation.output_ids.tolist() == [EOS]
    assert generation.finish_reason == "stop"
    assert generation.stop_reason in (None, EOS)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_tokens_of_a_stop_string_are_kept(
    engines: ReplicatedEngines, server: Any, weights: list[Path], is_streamed: bool
) -> None:
    skip_without_logit_bias(server)
    tokenizer = Tokenizer.from_file(str(weights[0] / "tokenizer.json"))
    (token_id,) = tokenizer.encode("x", add_special_tokens=False).ids
    sent = request(prompt(20), 9, logit_bias={str(token_id): 100.0}, stop=("xxx",))
    generation = await engines.generate(sent, Pieces() if is_streamed else None)
    assert generation.output_ids.tolist() == [token_id] * 3
    assert (generation.finish_reason, generation.stop_reason) == ("stop", "xxx")
    assert len(generation.logprobs) == 3


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_engine_says_how_much_of_a_prompt_it_had_in_its_cache(
    engines: ReplicatedEngines, is_streamed: bool
) -> None:
    ids = prompt(300, seed=7)
    first = await engines.generate(request(ids, 4), Pieces() if is_streamed else None)
    again = await engines.generate(request(ids, 4), Pieces() if is_streamed else None)
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens is not None
    assert 128 <= again.num_cached_tokens < 300


async def test_a_sequence_may_fill_the_context_and_not_more(engines: ReplicatedEngines) -> None:
    limit = await engines.max_context_tokens()
    assert limit is not None
    assert MAX_LEN - 10 < limit <= MAX_LEN
    full = await engines.generate(request(prompt(limit - 4), 4))
    assert (len(full.output_ids), full.finish_reason) == (4, "length")
    with pytest.raises(EngineError) as caught:
        await engines.generate(request(prompt(MAX_LEN), 4))
    assert caught.value.reason == "engine_refused"


async def test_an_id_outside_the_vocabulary_never_reaches_the_engine(
    engines: ReplicatedEngines, vocab_size: int
) -> None:
    with pytest.raises(EngineError, match=f"prompt token 1: id {vocab_size} is outside") as caught:
        await engines.generate(request([9, vocab_size], 4))
    assert caught.value.reason == "engine_refused"
    assert len((await engines.generate(request([9], 1))).output_ids) == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_that_nobody_waits_for_frees_its_place(
    engines: ReplicatedEngines, take_places: Any, is_streamed: bool
) -> None:
    others = await take_places(NUM_SLOTS - 2)
    leaving = asyncio.create_task(
        engines.generate(request(prompt(10), 4000), Pieces() if is_streamed else None)
    )
    await engines.generate(request(prompt(10), 4))  # meanwhile the other one has come as far
    others += await take_places(1)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await engines.generate(request(prompt(10), 4))
    # Each of the others ends before the one that left would have: nobody else made room.
    assert not any(call.done() for call in others)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_an_engine_had_when_it_ended_a_call_is_handed_on(
    engines: ReplicatedEngines, forward: Any, is_streamed: bool
) -> None:
    ids, pieces = prompt(20, seed=5), Pieces()
    sent = request(ids, 4000)
    begun = asyncio.create_task(engines.generate(sent, pieces if is_streamed else None))
    watched = request(prompt(20, seed=6), 40)
    await engines.generate(watched)  # meanwhile the other one has come as far
    await engines._abort(engines.urls[0], sent.request_id)
    with pytest.raises(EngineError) as caught:
        await begun
    assert caught.value.reason == "aborted"
    partial = caught.value.partial
    assert partial is not None
    output = partial.output_ids.tolist()
    assert 20 < len(output) < 4000
    assert pieces.ids == output[: len(pieces.ids)]
    expected = forward(0, ids, output)
    assert largest_difference(partial.logprobs.tolist(), expected) < CLOSE
    assert [(s.policy_version, s.end) for s in partial.policy_versions] == [(1, len(output))]

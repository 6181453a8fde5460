"""New weights in a real engine: what was sampled under which, and what bad weights do to it."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnfold.gateway.backends.engine import GenerateRequest
from turnfold.gateway.backends.replicas import ReplicatedEngines
from turnfold.gateway.backends.weights import EngineWeights
from turnfold.gateway.backends.weights_directory import UnusableWeights
from turnfold.gateway.calls import CallParams
from turnfold.schemas.wire import TokenIds

CLOSE = 1e-3

pytestmark = pytest.mark.usefixtures("first_weights", "endless")


def prompt(length: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(10, 370, length)]


def request(ids: list[int], max_tokens: int, request_id: str = "w") -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id,
        session_id="s",
        prompt_ids=TokenIds.of(ids),
        max_tokens=max_tokens,
        temperature=1.0,
        params=CallParams(),
    )


class AfterTokens:
    """Sets an event once so many tokens have been told."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens
        self.reached = asyncio.Event()

    def __call__(self, ids: Any, logprobs: Any = ()) -> None:
        self.num_left -= len(ids)
        if self.num_left <= 0:
            self.reached.set()


def assert_sampled_from(
    forward: Any, number: int, ids: list[int], generation: Any, start: int = 0, end: int = 1 << 30
) -> None:
    output = generation.output_ids.tolist()
    expected = forward(number, ids, output)[start:end]
    measured = generation.logprobs.tolist()[start:end]
    assert float(np.abs(np.asarray(measured) - np.asarray(expected)).max()) < CLOSE


async def test_a_reply_that_an_update_cuts_in_two_says_which_weights_sampled_what(
    engines: ReplicatedEngines, engine_weights: EngineWeights, weights: list[Path], forward: Any
) -> None:
    ids, begun = prompt(150, seed=11), AfterTokens(20)
    call = asyncio.create_task(engines.generate(request(ids, 2000, "cut"), begun))
    await begun.reached.wait()
    await engine_weights.update(str(weights[1]), 2)
    generation = await call
    first, second = generation.policy_versions
    assert (first.policy_version, second.policy_version) == (1, 2)
    assert (first.start, second.start, second.end) == (0, first.end, 2000)
    assert first.end >= 20
    # Each part agrees with its own weights over the whole text before it: nothing stale is left.
    assert_sampled_from(forward, 0, ids, generation, 0, first.end)
    assert_sampled_from(forward, 1, ids, generation, second.start)
    assert await engine_weights.version() == "2"


async def test_a_prefix_of_the_old_weights_is_not_used_after_an_update(
    engines: ReplicatedEngines, engine_weights: EngineWeights, weights: list[Path], forward: Any
) -> None:
    ids = prompt(300, seed=12)
    before = await engines.generate(request(ids, 8))
    assert_sampled_from(forward, 0, ids, before)
    await engine_weights.update(str(weights[1]), 7)
    after = await engines.generate(request(ids, 8))
    assert [(s.policy_version, s.end) for s in after.policy_versions] == [(7, 8)]
    assert_sampled_from(forward, 1, ids, after)


async def test_a_directory_without_whole_weights_never_reaches_the_engine(
    engines: ReplicatedEngines,
    engine_weights: EngineWeights,
    weights: list[Path],
    forward: Any,
    tmp_path: Path,
) -> None:
    with pytest.raises(UnusableWeights, match="does not exist"):
        await engine_weights.update(str(tmp_path / "missing"), 2)
    cut = Path(shutil.copytree(weights[1], tmp_path / "cut"))
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnusableWeights, match="bytes, expected"):
        await engine_weights.update(str(cut), 2)
    await assert_old_weights_serve(engines, engine_weights, forward, seed=13)


async def test_weights_that_do_not_fit_never_reach_the_engine(
    engines: ReplicatedEngines,
    engine_weights: EngineWeights,
    weights: list[Path],
    forward: Any,
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file, save_file

    misfit = Path(shutil.copytree(weights[1], tmp_path / "misfit"))
    tensors = load_file(misfit / "model.safetensors")
    halved = {name: tensor[: len(tensor) // 2].clone() for name, tensor in tensors.items()}
    save_file(halved, misfit / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnusableWeights, match="has shape"):
        await engine_weights.update(str(misfit), 2)
    without = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    save_file(without, misfit / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnusableWeights, match="has no tensor"):
        await engine_weights.update(str(misfit), 2)
    await assert_old_weights_serve(engines, engine_weights, forward, seed=14)


async def assert_old_weights_serve(
    engines: ReplicatedEngines, engine_weights: EngineWeights, forward: Any, seed: int
) -> None:
    assert await engine_weights.version() == "1"
    ids = prompt(40, seed)
    generation = await engines.generate(request(ids, 8))
    assert [(s.policy_version, s.end) for s in generation.policy_versions] == [(1, 8)]
    assert_sampled_from(forward, 0, ids, generation)

from typing import Any, Literal

import numpy as np
import pytest

from turnfold.gateway.backends.engine import Generation
from turnfold.gateway.calls import CallParams
from turnfold.gateway.refusals import Refusal
from turnfold.gateway.turns.steps import effective_params, max_output_tokens, sampled_text, smallest
from turnfold.schemas.events import RolloutStarted, Sampling, Split
from turnfold.schemas.wire import Logprobs, TokenIds


def started(split: Split = "train", **sampling: Any) -> RolloutStarted:
    return RolloutStarted(
        rollout_id="r", event_id="e", group_id="g", split=split, sampling=Sampling(**sampling)
    )


@pytest.mark.parametrize("limit", [99, 100])
def test_a_prompt_that_fills_the_context_is_refused(limit: int) -> None:
    with pytest.raises(Refusal) as caught:
        max_output_tokens(None, Sampling(), 100, limit)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("room", [1, 10])
def test_output_is_limited_to_the_room_left(room: int) -> None:
    assert max_output_tokens(None, Sampling(), 100, 100 + room) == room


def test_the_smallest_limit_counts() -> None:
    assert max_output_tokens(None, Sampling(), 10, None) == 4096
    assert max_output_tokens(50, Sampling(), 10, None) == 50
    assert max_output_tokens(50, Sampling(max_tokens=8), 10, None) == 8
    assert smallest(None, 7, 5) == 5
    assert smallest(None, None) is None


def test_biased_sampling_is_refused_in_training_only() -> None:
    biased = CallParams(top_p=0.5)
    with pytest.raises(Refusal) as caught:
        effective_params(biased, started())
    assert (caught.value.param, caught.value.code) == ("top_p", "biased_sampling")
    assert effective_params(biased, started("eval")).top_p == 0.5
    assert effective_params(biased, started(is_biased_allowed=True)).top_p == 0.5


def test_the_agent_overrides_the_rollouts_temperature() -> None:
    assert effective_params(CallParams(), started(temperature=0.7)).temperature == 0.7
    assert effective_params(CallParams(temperature=0.0), started()).temperature == 0.0


class Letters:
    """Id 0 to 25 is a letter, 26 a special token."""

    special_ids = frozenset({26})

    def decode(self, ids: Any) -> str:
        return "".join("<end>" if i == 26 else chr(97 + i) for i in ids)

    def encode(self, text: str) -> Any:
        return np.array([ord(letter) - 97 for letter in text], np.uint32)

    def render(
        self, messages: Any, tools: Any, add_generation_prompt: bool, memo: Any = None
    ) -> str:
        return "".join(message.content for message in messages)


def generated(
    ids: list[int], finish: Literal["stop", "length"], stop_reason: int | str | None = None
) -> str:
    generation = Generation(
        output_ids=TokenIds.of(ids),
        logprobs=Logprobs.of([-1.0] * len(ids)),
        finish_reason=finish,
        stop_reason=stop_reason,
    )
    return sampled_text(generation, Letters())


def test_stop_tokens_and_stop_sequences_are_not_shown() -> None:
    assert generated([0, 1, 26], "stop") == "ab"
    assert generated([0, 1, 2], "stop", 2) == "ab"
    assert generated([0, 1, 2], "stop", "bc") == "a"
    assert generated([0, 1, 2], "stop") == "abc"
    assert generated([0, 1, 26], "length") == "ab<end>"

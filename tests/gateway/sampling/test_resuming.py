"""A reply that an engine broke off is one sample, as if nobody had."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnfold.gateway.backends.engine import (
    EngineError,
    GenerateRequest,
    Generation,
    OnTokens,
    PartialOutput,
)
from turnfold.gateway.calls import CallParams
from turnfold.gateway.turns.sampling.app import sample
from turnfold.schemas.events import VersionSpan
from turnfold.schemas.wire import Logprobs, TokenIds


class Letters:
    """Id 0 to 25 is a letter."""

    special_ids = frozenset[int]()
    boundaries = frozenset[str]()

    def decode(self, ids: Any) -> str:
        return "".join(chr(97 + int(i)) for i in ids)

    def encode(self, text: str) -> Any:
        return np.array([ord(letter) - 97 for letter in text], np.uint32)

    def render(
        self, messages: Any, tools: Any, add_generation_prompt: bool, memo: Any = None
    ) -> str:
        raise NotImplementedError


def ids_of(text: str) -> list[int]:
    ids: list[int] = Letters().encode(text).tolist()
    return ids


def spans(*bounds: tuple[int, int, int]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(policy_version=v, start=a, end=b) for v, a, b in bounds)


class Breaking:
    """Continues a text that it has learnt, one version after another, and breaks off in between.

    `breaks` are positions of the reply. Like a server it sees one request at a time, and so a stop
    sequence only when all of it is among the tokens of that request.
    """

    urls: Sequence[str] = ("http://engine",)

    def __init__(
        self, text: str, breaks: Sequence[int], *, num_told: int = 100, versions: bool = True
    ) -> None:
        self.text = text
        self.breaks = list(breaks)
        self.num_told = num_told
        self.versions = versions
        self.requests: list[GenerateRequest] = []

    async def generate(
        self, request: GenerateRequest, on_tokens: OnTokens | None = None
    ) -> Generation:
        self.requests.append(request)
        start = len(request.prompt_ids) - len(self.requests[0].prompt_ids)
        limit = start + request.max_tokens
        end, stop = self._stopped(request, start, min(limit, len(self.text)))
        is_broken = bool(self.breaks) and self.breaks[0] < end
        end = self.breaks.pop(0) if is_broken else end
        ids = ids_of(self.text[start:end])
        logprobs = [-float(i) for i in range(start, end)]
        version = len(self.requests)
        known = spans((version, 0, len(ids))) if self.versions and ids else ()
        for i in range(min(self.num_told, len(ids)) if on_tokens else 0):
            assert on_tokens is not None
            on_tokens(ids[i : i + 1], logprobs[i : i + 1])
        if is_broken:
            partial = PartialOutput(
                output_ids=TokenIds.of(ids),
                logprobs=Logprobs.of(logprobs),
                policy_versions=known,
                num_cached_tokens=start,
            )
            raise EngineError("aborted", "broken off", partial=partial)
        is_cut = end == limit and stop is None
        return Generation(
            output_ids=TokenIds.of(ids),
            logprobs=Logprobs.of(logprobs),
            finish_reason="length" if is_cut else "stop",
            stop_reason=stop,
            policy_versions=known,
            num_cached_tokens=start,
        )

    def _stopped(self, request: GenerateRequest, start: int, end: int) -> tuple[int, str | None]:
        for here in range(start + 1, end + 1):
            found = [s for s in request.params.stop if self.text[start:here].endswith(s)]
            if found:
                return here, found[0]
        return end, None

    async def max_context_tokens(self) -> int | None:
        return None

    async def aclose(self) -> None:
        pass


def request(**changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "request_id": "t1",
        "session_id": "s",
        "prompt_ids": TokenIds.of([1, 2]),
        "max_tokens": 50,
        "temperature": 1.0,
        "params": CallParams(),
        **changes,
    }
    return GenerateRequest(**fields)


@given(
    text=st.text("abc", min_size=1, max_size=20),
    breaks=st.lists(st.integers(0, 19), max_size=5).map(sorted),
    max_tokens=st.integers(1, 25),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    num_told=st.integers(0, 20),
)
async def test_breaks_make_no_difference_to_the_sample(
    text: str, breaks: list[int], max_tokens: int, stops: list[str], num_told: int
) -> None:
    asked = request(max_tokens=max_tokens, params=CallParams(stop=tuple(stops)))
    expected = await sample(Breaking(text, []), asked, Letters())
    told: list[int] = []

    def on_tokens(ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        told.extend(ids)

    engine = Breaking(text, breaks, num_told=num_told)
    found = await sample(engine, asked, Letters(), on_tokens)
    assert found.output_ids.tolist() == expected.output_ids.tolist()
    assert found.logprobs.tolist() == expected.logprobs.tolist()
    assert found.finish_reason == expected.finish_reason
    # Two stop sequences may be complete at once; either is a good reason.
    assert (found.stop_reason is None) == (expected.stop_reason is None)
    bounds = [found.policy_versions[0].start, *(s.end for s in found.policy_versions)]
    assert (bounds[0], bounds[-1]) == (0, len(found.output_ids))
    assert found.num_cached_tokens == 0  # as it was said of the request itself
    assert all(a < b for a, b in pairwise(bounds))
    # Tokens beyond a stop sequence that a break hid are told and then cut off.
    shorter = min(len(told), len(found.output_ids))
    assert told[:shorter] == found.output_ids.tolist()[:shorter]


async def test_a_stop_sequence_across_any_break_ends_the_reply() -> None:
    for breaks in ([4], [4, 10], [4, 6, 12]):
        engine = Breaking("abcxyzabcabcabc", breaks)
        found = await sample(engine, request(params=CallParams(stop=("xy",))), Letters())
        assert (found.output_ids.tolist(), found.stop_reason) == (ids_of("abcxy"), "xy")
        assert found.policy_versions == spans((1, 0, 4), (2, 4, 5))


async def test_a_resumed_request_asks_for_what_is_missing() -> None:
    engine = Breaking("abcdef", [2, 2, 4])
    asked = request(max_tokens=5, params=CallParams(seed=7))
    found = await sample(engine, asked, Letters())
    assert [r.prompt_ids.tolist() for r in engine.requests] == [
        [1, 2],
        [1, 2, 0, 1],
        [1, 2, 0, 1],
        [1, 2, 0, 1, 2, 3],
    ]
    assert [r.max_tokens for r in engine.requests] == [5, 3, 3, 1]
    assert [r.params.seed for r in engine.requests] == [7, 9, 9, 11]
    assert [r.request_id for r in engine.requests] == ["t1", "t1-1", "t1-2", "t1-3"]
    assert found.policy_versions == spans((1, 0, 2), (3, 2, 4), (4, 4, 5))
    assert found.finish_reason == "length"


async def test_a_reply_that_was_broken_off_at_its_last_token_is_whole() -> None:
    found = await sample(Breaking("abc", [3]), request(max_tokens=3), Letters())
    assert (found.output_ids.tolist(), found.finish_reason) == ([0, 1, 2], "length")


async def test_an_engine_that_knows_no_version_has_none_after_a_break_either() -> None:
    found = await sample(Breaking("abc", [1], versions=False), request(), Letters())
    assert found.policy_versions == ()


async def test_a_failure_without_a_partial_output_is_not_resumed() -> None:
    class Failing(Breaking):
        async def generate(
            self, request: GenerateRequest, on_tokens: OnTokens | None = None
        ) -> Generation:
            self.requests.append(request)
            raise EngineError("engine_unavailable", "gone")

    engine = Failing("a", [])
    with pytest.raises(EngineError, match="gone"):
        await sample(engine, request(), Letters())
    assert len(engine.requests) == 1

"""One request while it runs: what it asked for, what was sampled so far, and when it ends."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Literal, TypeVar

from turnfold.embedded.inference.sampling import SampledToken, SamplingParams

T = TypeVar("T")

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A prompt to continue, which the caller has checked against vocabulary and context."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    cache_salt: str | None = None
    """Requests reuse each other's prompt prefixes only under the same salt."""


@dataclass
class VersionSpan:
    """Output tokens `start` up to, but not including, `end` were sampled by `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What one request came to. `tokens` includes the token that ended it."""

    request_id: str
    tokens: tuple[SampledToken, ...]
    weight_versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The stop string or stop token id; None for the end-of-sequence token, length or abort."""
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True)
class StopRules:
    """What ends an output besides its length.

    `decode` turns token ids into text without special tokens. It is only called when stop strings
    are given.
    """

    eos_token_ids: tuple[int, ...] = ()
    """The first is the primary one, which is reported without a stop reason."""
    special_token_ids: frozenset[int] = frozenset()
    decode: Callable[[list[int]], str] | None = None


@dataclass(eq=False)
class RunningSequence:
    """The mutable state of a request. Only the engine's thread touches it."""

    request: GenerationRequest
    rules: StopRules
    max_len: int
    on_token: Callable[[SampledToken], None] | None = None
    future: "Future[Completion]" = field(default_factory=lambda: uncancellable_future())
    slot: int | None = None
    num_cached_tokens: int = 0
    tokens: list[SampledToken] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self._random = Random(self.request.params.seed)

    def next_uniform(self) -> float:
        """The next number of this request's own stream, which its batch cannot disturb."""
        return self._random.random()

    @property
    def cached_ids(self) -> list[int]:
        """The tokens that the slot holds: all but the last sampled one, which is not run yet."""
        return [*self.request.prompt_ids, *self.output_ids[:-1]]

    @property
    def next_position(self) -> int:
        """Where in the slot the last sampled token belongs."""
        return len(self.request.prompt_ids) + len(self.output_ids) - 1

    def append(self, token: SampledToken, version: str) -> None:
        """Take in a sampled token and decide whether it is the last."""
        self.tokens.append(token)
        self.output_ids.append(token.token_id)
        if not self.spans or self.spans[-1].version != version:
            self.spans.append(VersionSpan(version, len(self.tokens) - 1, len(self.tokens)))
        self.spans[-1].end = len(self.tokens)
        self._decide(token.token_id)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Mark the sequence as ended; the engine then releases its slot and answers."""
        self.finish_reason, self.stop_reason = reason, stop_reason

    def completion(self) -> Completion:
        """The result of an ended sequence."""
        assert self.finish_reason is not None, f"{self.request.request_id} is still running"
        return Completion(
            request_id=self.request.request_id,
            tokens=tuple(self.tokens),
            weight_versions=tuple(self.spans),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_prompt_tokens=len(self.request.prompt_ids),
            num_cached_tokens=self.num_cached_tokens,
        )

    def _decide(self, token_id: int) -> None:
        params = self.request.params
        eos = () if params.ignore_eos else self.rules.eos_token_ids
        if eos and token_id == eos[0]:
            self.finish("stop")
        elif token_id in eos or token_id in params.stop_token_ids:
            self.finish("stop", token_id)
        elif stop := self._completed_stop_string():
            self.finish("stop", stop)
        elif len(self.tokens) >= self._max_tokens():
            self.finish("length")

    def _max_tokens(self) -> int:
        room = self.max_len - len(self.request.prompt_ids)
        asked = self.request.params.max_tokens
        return room if asked is None else min(asked, room)

    def _completed_stop_string(self) -> str | None:
        """The stop string that the last token completed, if any.

        Every ordinary token has at least one byte, so a string that has just become complete lies
        within as many last tokens as it has bytes. Special tokens have no text and don't count.
        """
        stops = self.request.params.stop
        if not stops or self.rules.decode is None:
            return None
        special = self.rules.special_token_ids
        backwards = (token for token in reversed(self.output_ids) if token not in special)
        longest = max(len(stop.encode()) for stop in stops)
        text = self.rules.decode(list(islice(backwards, longest))[::-1])
        return next((stop for stop in stops if stop in text), None)


def uncancellable_future() -> "Future[T]":
    """A future that a caller who gave up can't cancel, so that setting its result never fails."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future

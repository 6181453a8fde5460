"""What the gateway asks of an engine and what it must get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from turnfold.gateway.calls import CallParams
from turnfold.schemas.events import VersionSpan
from turnfold.schemas.wire import Logprobs, TokenIds, Wire

EngineKind = Literal["vllm", "sglang"]
"""Which server the engines are; the embedded engine speaks as vLLM does."""


class GenerateRequest(Wire, frozen=True, kw_only=True):
    """One call to an engine."""

    request_id: str
    session_id: str
    """Calls of one session go to one replica, where their prefix is cached."""
    prompt_ids: TokenIds
    max_tokens: int
    temperature: float
    params: CallParams
    """Everything else that the agent asked for; max_tokens and temperature above win."""


class Generation(Wire, frozen=True, kw_only=True):
    """A sample, exactly as the engine returned it, and checked."""

    output_ids: TokenIds
    logprobs: Logprobs
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    policy_versions: tuple[VersionSpan, ...] = ()
    num_cached_tokens: int | None = None
    """Prompt tokens that were not computed again; None when the engine does not say."""


class PartialOutput(Wire, frozen=True, kw_only=True):
    """What an engine had sampled of a reply when it ended the request itself; may be empty."""

    output_ids: TokenIds
    logprobs: Logprobs
    policy_versions: tuple[VersionSpan, ...] = ()
    num_cached_tokens: int | None = None


EngineFailure = Literal[
    "engine_unavailable", "engine_error", "engine_refused", "invalid_output", "aborted"
]


class EngineError(Exception):
    """No usable sample came; nothing of it is recorded.

    An engine that ends a request unasked, as for new weights, fails with "aborted" and gives what
    it had in `partial`: the turn goes on from there. None when there is nothing to go on from.
    """

    def __init__(
        self, reason: EngineFailure, message: str, *, partial: PartialOutput | None = None
    ) -> None:
        super().__init__(message)
        self.reason: EngineFailure = reason
        self.partial = partial

    @property
    def is_retriable(self) -> bool:
        """Whether the same request may succeed later."""
        return self.reason in ("engine_unavailable", "engine_error", "aborted")


class OnTokens(Protocol):
    """Told of tokens as they are sampled."""

    def __call__(self, ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        """The next tokens and, from an engine that tells them at once, a logprob for each."""


class Engines(Protocol):
    """One or more replicas of one model behind one kind of server."""

    urls: Sequence[str]

    async def generate(
        self, request: GenerateRequest, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Sample. Raises EngineError. Cancelling it aborts the request at the engine.

        `on_tokens` is told each piece of the output as it is sampled, on the event loop; together
        the pieces are the start of `output_ids`, those of a failed call the start of `partial`. It
        must not be told tokens that a second try would sample again. Without it the engine need not
        stream.
        """

    async def max_context_tokens(self) -> int | None:
        """Limit of prompt plus output, the smallest of all replicas; None when none says."""

    async def aclose(self) -> None:
        """Let go of all connections."""

"""JSON of SGLang's `/generate`, plain and streamed, and what must be known to read it.

- `max_new_tokens` beyond the context is an error, and 128 when left out: it is always sent.
- Logprobs are taken after temperature and logit bias, but before top-k, top-p and min-p. For a
  request with one of these its sampling mask is asked for: with it come the logprobs of the
  distribution that was sampled from, which is what vLLM's `processed_logprobs` are.
- A stream repeats the whole output in each chunk, unless the server runs with
  `--incremental-streaming-output`. Both are read.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from turnfold.gateway.backends.engine import (
    EngineError,
    GenerateRequest,
    Generation,
    PartialOutput,
)
from turnfold.gateway.backends.request_json import encode_with_arrays, given_params
from turnfold.gateway.backends.samples import (
    TokenLogprob,
    WeightSpan,
    check_ids,
    checked_versions,
    finite_logprobs,
    packed_logprobs,
    unusable,
)
from turnfold.gateway.calls import CallParams
from turnfold.schemas.wire import TokenIds

_OWN_NAMES = {"seed": "sampling_seed"}
_TRUNCATING = ("top_k", "top_p", "min_p")


class _FinishReason(msgspec.Struct):
    """How a request ended."""

    type: str
    matched: int | str | None = None
    """The stop token or stop string."""
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    """What comes beside the ids."""

    finish_reason: _FinishReason | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that were in the prefix cache."""
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    output_token_sampling_logprobs: list[float | None] | None = None
    weight_versions: list[WeightSpan] | None = None


class _Failure(msgspec.Struct):
    message: str = ""
    code: int | None = None
    """The status that the answer would have had without a stream."""


class _Chunk(msgspec.Struct):
    """A whole answer, or one piece of a stream."""

    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: _Failure | None = None
    """In a stream, where the status is sent already, an error comes as a chunk."""


_decoder = msgspec.json.Decoder(_Chunk)


def request_body(request: GenerateRequest, rid: str, *, is_streamed: bool = False) -> bytes:
    """The request; `rid` is the id that aborts it."""
    return encode_with_arrays(
        {
            "rid": rid,
            "input_ids": request.prompt_ids.array,
            "sampling_params": {
                **_given(request.params),
                "max_new_tokens": request.max_tokens,
                "temperature": request.temperature,
            },
            "return_logprob": True,
            "return_sampling_mask": is_truncating(request.params),
            "stream": is_streamed,
        }
    )


def is_truncating(params: CallParams) -> bool:
    """Whether tokens are ruled out before the sample is drawn, so that the others gain."""
    return any(getattr(params, name) is not None for name in _TRUNCATING)


def _given(params: CallParams) -> dict[str, Any]:
    return {_OWN_NAMES.get(name, name): value for name, value in given_params(params).items()}


def read_generation(body: bytes, vocab_size: int) -> Generation:
    """The checked sample of a plain answer. Raises EngineError saying what was wrong."""
    whole = StreamedGeneration(vocab_size)
    whole.feed(body)
    return whole.end()


class StreamedGeneration:
    """A sample that comes in chunks, each checked before anybody sees its tokens.

    for data in …:
        ids, logprobs = streamed.feed(data)
    generation = streamed.end()
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[WeightSpan] | None = None
        self._finish_reason: _FinishReason | None = None
        self._num_cached_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    def feed(self, data: bytes) -> tuple[list[int], list[float]]:
        """The tokens that a chunk adds and their logprobs; both empty where it adds none.

        Raises EngineError `invalid_output`, or `engine_error` for a chunk that tells of a failure.
        """
        chunk = _decoded(data)
        meta = chunk.meta_info
        ids, entries = chunk.output_ids, _entries(meta)
        # The first chunk looks the same in both kinds of stream. A later one holds the whole output
        # when it has as many tokens as were counted; more, when the server sampled on meanwhile.
        if len(ids) >= meta.completion_tokens:
            ids, entries = ids[self.num_tokens :], entries[self.num_tokens :]
        check_ids(ids, self._vocab_size, first=self.num_tokens)
        logprobs = finite_logprobs(entries, ids, first=self.num_tokens)
        self._ids += ids
        self._logprobs += logprobs
        self._versions = meta.weight_versions or self._versions
        self._finish_reason = meta.finish_reason
        self._num_cached_tokens = meta.cached_tokens
        return ids, logprobs

    def end(self) -> Generation:
        """The whole sample. Raises EngineError; `engine_unavailable` when the stream was cut."""
        reason = self._finish_reason
        if reason is None:
            raise EngineError(
                "engine_unavailable",
                f"the engine's stream ended after {self.num_tokens} tokens without a finish reason",
            )
        if reason.type == "abort":
            raise self._aborted(reason)
        if not self._ids:
            raise unusable("expected output token ids, got none")
        return Generation(
            output_ids=TokenIds.of(self._ids),
            logprobs=packed_logprobs(self._logprobs),
            finish_reason=_finish_reason(reason),
            stop_reason=reason.matched,
            policy_versions=checked_versions(self._versions, self.num_tokens),
            num_cached_tokens=self._num_cached_tokens,
        )

    def _aborted(self, reason: _FinishReason) -> EngineError:
        if reason.status_code is not None and reason.status_code < 500:
            return EngineError("engine_refused", f"the engine refused: {reason.message}")
        partial = PartialOutput(
            output_ids=TokenIds.of(self._ids),
            logprobs=packed_logprobs(self._logprobs),
            policy_versions=checked_versions(self._versions, self.num_tokens) if self._ids else (),
            num_cached_tokens=self._num_cached_tokens,
        )
        return EngineError("aborted", "the engine aborted the request", partial=partial)


def _decoded(data: bytes | str) -> _Chunk:
    try:
        chunk = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise unusable(f"expected a generate response in JSON: {error}") from error
    if chunk.error is not None:
        code, message = chunk.error.code, chunk.error.message[:500]
        if code is not None and 400 <= code < 500:
            raise EngineError("engine_refused", f"the engine refused the request: {message}")
        raise EngineError("engine_error", f"the engine failed: {message}")
    return chunk


def _entries(meta: _Meta) -> list[TokenLogprob]:
    entries, sampled = meta.output_token_logprobs, meta.output_token_sampling_logprobs
    if sampled is None:
        return [TokenLogprob(logprob, token_id) for logprob, token_id, _ in entries]
    if len(sampled) != len(entries):
        raise unusable(f"{len(entries)} logprobs but {len(sampled)} of the truncated distribution")
    return [
        TokenLogprob(logprob, token_id)
        for logprob, (_, token_id, _) in zip(sampled, entries, strict=True)
    ]


def _finish_reason(reason: _FinishReason) -> Literal["stop", "length"]:
    if reason.type == "length":
        return "length"
    if reason.type == "stop":
        return "stop"
    raise EngineError("engine_error", f"the engine finished with {reason.type!r}")

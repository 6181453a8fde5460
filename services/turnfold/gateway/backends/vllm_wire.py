"""JSON of vLLM's `/inference/v1/generate`, and the checks that a sample must pass."""

from __future__ import annotations

from typing import Literal

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
from turnfold.schemas.wire import TokenIds


class _Logprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[WeightSpan] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None
    """None unless the server runs with `--enable-prompt-tokens-details`."""


class _Response(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Failure(msgspec.Struct):
    message: str = ""
    code: int | str | None = None
    """The status that the answer would have had without a stream."""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    """In a chunk of its own, behind those with tokens."""
    error: _Failure | None = None


_decoder = msgspec.json.Decoder(_Response)
_chunk_decoder = msgspec.json.Decoder(_Chunk)


def request_body(request: GenerateRequest, *, is_streamed: bool = False) -> bytes:
    """The request; `logprobs: 0` is the sampled token's own logprob and nothing else."""
    sampling = {
        **given_params(request.params),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "logprobs": 0,
    }
    return encode_with_arrays(
        {
            "request_id": request.request_id,
            "token_ids": request.prompt_ids.array,
            "sampling_params": sampling,
            "stream": is_streamed,
            "stream_options": {"include_usage": True} if is_streamed else None,
        }
    )


def read_generation(body: bytes, vocab_size: int) -> Generation:
    """The checked sample. Raises EngineError `invalid_output` saying what was wrong.

    Every id lies in the vocabulary, every token has one finite logprob, and the version spans, when
    there are any, cover the output without gaps. A turn without these cannot be trained on.
    """
    try:
        response = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise unusable(f"expected a generate response in JSON: {error}") from error
    if len(response.choices) != 1:
        raise unusable(f"expected 1 choice, got {len(response.choices)}")
    return _generation(response.choices[0], response.usage, vocab_size)


class StreamedGeneration:
    """A sample that comes in chunks, each checked before anybody sees its tokens.

    for data in …:
        ids, logprobs = streamed.feed(data)
    generation = streamed.end()
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._whole = _Choice(token_ids=[], logprobs=_Logprobs(content=[]))
        self._usage: _Usage | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._whole.token_ids or ())

    def feed(self, data: bytes) -> tuple[list[int], list[float]]:
        """The tokens of one chunk and their logprobs; both empty in a chunk that has none.

        Raises EngineError `invalid_output`, or `engine_error` for a chunk that tells of a failure.
        """
        try:
            chunk = _chunk_decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise unusable(f"expected a chunk of a generate response in JSON: {error}") from error
        if chunk.error is not None:
            raise _told(chunk.error)
        self._usage = chunk.usage or self._usage
        if not chunk.choices:
            return [], []
        if len(chunk.choices) != 1:
            raise unusable(f"expected 1 choice, got {len(chunk.choices)}")
        (choice,) = chunk.choices
        ids = choice.token_ids or []
        check_ids(ids, self._vocab_size, first=self.num_tokens)
        logprobs = finite_logprobs(_entries(choice), ids, first=self.num_tokens) if ids else []
        self._add(choice, ids)
        return ids, logprobs

    def end(self) -> Generation:
        """The whole sample. Raises EngineError; `engine_unavailable` when the stream was cut."""
        if self._whole.finish_reason is None:
            raise EngineError(
                "engine_unavailable",
                f"the engine's stream ended after {self.num_tokens} tokens without a finish reason",
            )
        return _generation(self._whole, self._usage, self._vocab_size)

    def _add(self, choice: _Choice, ids: list[int]) -> None:
        whole = self._whole
        assert whole.token_ids is not None
        assert whole.logprobs is not None
        assert whole.logprobs.content is not None
        if ids:
            whole.token_ids += ids
            whole.logprobs.content += _entries(choice) or []
        whole.finish_reason = choice.finish_reason or whole.finish_reason
        if choice.stop_reason is not None:
            whole.stop_reason = choice.stop_reason
        whole.weight_versions = choice.weight_versions or whole.weight_versions


def _told(failure: _Failure) -> EngineError:
    message = failure.message[:500]
    if isinstance(failure.code, int) and 400 <= failure.code < 500:
        return EngineError("engine_refused", f"the engine refused the request: {message}")
    return EngineError("engine_error", f"the engine failed: {message}")


def _generation(choice: _Choice, usage: _Usage | None, vocab_size: int) -> Generation:
    is_aborted = choice.finish_reason == "abort"
    if not choice.token_ids and not is_aborted:
        raise unusable("expected output token ids, got none")
    output_ids = choice.token_ids or []
    check_ids(output_ids, vocab_size)
    logprobs = packed_logprobs(finite_logprobs(_entries(choice), output_ids) if output_ids else [])
    versions = checked_versions(choice.weight_versions, len(output_ids))
    num_cached_tokens = _num_cached_tokens(usage)
    if is_aborted:
        partial = PartialOutput(
            output_ids=TokenIds.of(output_ids),
            logprobs=logprobs,
            policy_versions=versions,
            num_cached_tokens=num_cached_tokens,
        )
        raise EngineError("aborted", "the engine aborted the request", partial=partial)
    return Generation(
        output_ids=TokenIds.of(output_ids),
        logprobs=logprobs,
        finish_reason=_finish_reason(choice),
        stop_reason=choice.stop_reason,
        policy_versions=versions,
        num_cached_tokens=num_cached_tokens,
    )


def _num_cached_tokens(usage: _Usage | None) -> int | None:
    details = usage and usage.prompt_tokens_details
    return details.cached_tokens if details else None


def _entries(choice: _Choice) -> list[TokenLogprob] | None:
    return choice.logprobs.content if choice.logprobs else None


def _finish_reason(choice: _Choice) -> Literal["stop", "length"]:
    if choice.finish_reason == "length":
        return "length"
    if choice.finish_reason in ("stop", "repetition"):
        return "stop"
    raise EngineError("engine_error", f"the engine finished with {choice.finish_reason!r}")

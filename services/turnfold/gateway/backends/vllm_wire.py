"""JSON of vLLM's `/inference/v1/generate`, and the checks that a sample must pass."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import numpy as np

from turnfold.gateway.backends.engine import EngineError, GenerateRequest, Generation
from turnfold.gateway.calls import CallParams
from turnfold.schemas.events import VersionSpan
from turnfold.schemas.wire import Logprobs, TokenIds


class _TokenLogprob(msgspec.Struct):
    logprob: float | None = None
    token_id: int | None = None


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Response(msgspec.Struct):
    choices: list[_Choice]


_decoder = msgspec.json.Decoder(_Response)


def request_body(request: GenerateRequest) -> bytes:
    """The request; `logprobs: 0` is the sampled token's own logprob and nothing else."""
    sampling = {
        **_given(request.params),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "logprobs": 0,
    }
    return msgspec.json.encode(
        {
            "request_id": request.request_id,
            "token_ids": request.prompt_ids.tolist(),
            "sampling_params": sampling,
            "stream": False,
        }
    )


def _given(params: CallParams) -> dict[str, Any]:
    fields = msgspec.structs.asdict(params)
    return {name: value for name, value in fields.items() if value not in (None, ())}


def read_generation(body: bytes, vocab_size: int) -> Generation:
    """The checked sample. Raises EngineError `invalid_output` saying what was wrong.

    Every id lies in the vocabulary, every token has one finite logprob, and the version spans, when
    there are any, cover the output without gaps. A turn without these cannot be trained on.
    """
    try:
        response = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _wrong(f"expected a generate response in JSON: {error}") from error
    if len(response.choices) != 1:
        raise _wrong(f"expected 1 choice, got {len(response.choices)}")
    (choice,) = response.choices
    if choice.finish_reason == "abort":
        raise EngineError("aborted", "the engine aborted the request")
    output_ids = _output_ids(choice, vocab_size)
    return Generation(
        output_ids=TokenIds.of(output_ids),
        logprobs=_logprobs(choice, output_ids),
        finish_reason=_finish_reason(choice),
        stop_reason=choice.stop_reason,
        policy_versions=_policy_versions(choice, len(output_ids)),
    )


def _output_ids(choice: _Choice, vocab_size: int) -> list[int]:
    if not choice.token_ids:
        raise _wrong("expected output token ids, got none")
    for position, token_id in enumerate(choice.token_ids):
        if not 0 <= token_id < vocab_size:
            raise _wrong(
                f"output token {position}: id {token_id} is outside the vocabulary of {vocab_size}"
            )
    return choice.token_ids


def _logprobs(choice: _Choice, output_ids: list[int]) -> Logprobs:
    entries = choice.logprobs.content if choice.logprobs else None
    if entries is None:
        raise _wrong("expected logprobs, got none")
    if len(entries) != len(output_ids):
        raise _wrong(f"{len(output_ids)} output tokens but {len(entries)} logprobs")
    values = []
    for position, (entry, token_id) in enumerate(zip(entries, output_ids, strict=True)):
        if entry.logprob is None or not math.isfinite(entry.logprob):
            raise _wrong(f"output token {position}: logprob {entry.logprob} is not finite")
        if entry.token_id is not None and entry.token_id != token_id:
            raise _wrong(
                f"output token {position}: id {token_id} has the logprob of id {entry.token_id}"
            )
        values.append(entry.logprob)
    with np.errstate(over="ignore"):  # what overflows is infinite, and refused below
        packed = np.asarray(values, dtype=np.float32)
    if not np.isfinite(packed).all():
        raise _wrong("a logprob does not fit 32 bits")
    return Logprobs.of(packed)


def _finish_reason(choice: _Choice) -> Literal["stop", "length"]:
    if choice.finish_reason == "length":
        return "length"
    if choice.finish_reason in ("stop", "repetition"):
        return "stop"
    raise EngineError("engine_error", f"the engine finished with {choice.finish_reason!r}")


def _policy_versions(choice: _Choice, num_output_tokens: int) -> tuple[VersionSpan, ...]:
    spans = choice.weight_versions or []
    if not all(str(span.version).isdecimal() for span in spans):
        return ()  # an engine that was never told a version calls it something else
    end = 0
    for span in spans:
        if span.start != end or span.end < span.start:
            raise _wrong(f"weight version {span.version} begins at {span.start}, expected {end}")
        end = span.end
    if spans and end != num_output_tokens:
        raise _wrong(f"weight versions cover {end} of {num_output_tokens} output tokens")
    return tuple(
        VersionSpan(policy_version=int(span.version), start=span.start, end=span.end)
        for span in spans
        if span.end > span.start
    )


def _wrong(what: str) -> EngineError:
    return EngineError("invalid_output", f"the engine's output cannot be used: {what}")

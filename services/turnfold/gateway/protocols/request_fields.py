"""Fields that requests of all protocols have in common: decoded, refused by name, or sampled with."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, cast

import msgspec

from turnfold.gateway.calls import CallParams
from turnfold.gateway.constraints import UNKNOWN_FIELD, Constraint
from turnfold.gateway.refusals import invalid

R = TypeVar("R")


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of sampling; a protocol that has no field for one takes it as an extra.

    A request lists all fields that are known: a name that is not in it is an unknown one.
    """

    temperature: float | None = None
    seed: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Extras of inference servers that are not supported; each would change what is sampled.
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None
    stop_token_ids: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    best_of: Any = None
    echo: Any = None
    prompt_logprobs: Any = None
    # Extras that would constrain the output.
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    bad_words: Any = None
    # Extras that change nothing here.
    cache_salt: Any = None
    priority: Any = None
    request_id: Any = None


_UNSUPPORTED_EXTRAS = {
    "chat_template": "the model's own template is used",
    "chat_template_kwargs": "the model's own template is used as it is",
    "continue_final_message": "each call opens a new assistant message",
    "stop_token_ids": "use `stop`",
    "min_tokens": "the model decides where it stops",
    "ignore_eos": "the model decides where it stops",
    "best_of": "one choice is sampled",
    "echo": "the prompt is not repeated",
    "prompt_logprobs": "logprobs are given for sampled tokens",
}

_CONSTRAINING_EXTRAS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "bad_words",
)  # fmt: skip


def decode_request(body: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[R], at: str = "") -> R:
    """The body as the decoder's type; `at` says which part of the request it is.

    Raises Refusal naming the field that is wrong.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param = (at + path.rstrip("`")).lstrip(".") or None
        raise invalid(f"{param or 'body'}: {what}", param=param) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply") from error


def decode_known_fields(
    body: bytes, decoder: msgspec.json.Decoder[R]
) -> tuple[R, tuple[Constraint, ...]]:
    """The request without the fields at its top that nobody knows, and a constraint for each.

    What an unknown field asks for may change the answer, so it is treated as one that is not
    enforced. One that is null asks for nothing. Raises Refusal naming a field that is wrong.
    """
    try:
        return decoder.decode(body), ()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # rare: it is read again, to tell an unknown field from a wrong one
    fields = decode_request(body, _fields_decoder)
    known = frozenset(cast(type[msgspec.Struct], decoder.type).__struct_fields__)
    read = decode_request(
        msgspec.json.encode({name: raw for name, raw in fields.items() if name in known}), decoder
    )
    unknown = [name for name, raw in fields.items() if name not in known and bytes(raw) != b"null"]
    return read, tuple(map(_unknown_field, unknown[:_MAX_UNKNOWN]))


_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MAX_UNKNOWN = 16
"""Unknown fields that are told of by name."""
_TELLABLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _unknown_field(name: str) -> Constraint:
    # It goes into a response header, which takes no others.
    shown = name if _TELLABLE.fullmatch(name) else UNKNOWN_FIELD
    return Constraint(
        field=shown,
        message=f"{shown}: this field is not known here, so what it asks for cannot be kept",
        code="unknown_parameter",
    )


def refuse_unsupported(request: SamplingFields, unsupported: Mapping[str, str]) -> None:
    """Raise Refusal for a field that is given and not supported; `unsupported` says why, by name."""
    for name, why in {**unsupported, **_UNSUPPORTED_EXTRAS}.items():
        if _is_given(request, name):
            raise invalid(f"{name} is not supported: {why}", name, "unsupported_parameter")


def constraining_fields(request: SamplingFields, *names: str) -> Iterator[Constraint]:
    """Those of the fields, and of the extras, that would constrain the output."""
    for name in (*names, *_CONSTRAINING_EXTRAS):
        if _is_given(request, name):
            yield Constraint(
                field=name,
                message=f"{name} is not supported: output is not constrained",
                code="unsupported_parameter",
            )


def _is_given(request: SamplingFields, name: str) -> bool:
    return getattr(request, name) not in (None, False, [], {})


def sampling_params(
    request: SamplingFields, *, max_tokens: int | None, stop: Iterable[str], stop_field: str
) -> CallParams:
    """How to sample. Raises Refusal naming a value that is out of range."""
    stop = tuple(stop)
    if not all(stop):
        raise invalid(f"{stop_field}: a stop sequence is empty", stop_field)
    return CallParams(
        max_tokens=max_tokens,
        temperature=_in_range(request, "temperature", 0.0, 2.0),
        seed=request.seed,
        stop=stop,
        top_p=_in_range(request, "top_p", 0.0, 1.0),
        top_k=request.top_k,
        min_p=_in_range(request, "min_p", 0.0, 1.0),
        presence_penalty=_in_range(request, "presence_penalty", -2.0, 2.0),
        frequency_penalty=_in_range(request, "frequency_penalty", -2.0, 2.0),
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.logit_bias,
    )


def at_least_one(value: int | None, name: str) -> int | None:
    """The value. Raises Refusal when it is below 1."""
    if value is not None and value < 1:
        raise invalid(f"{name}: expected at least 1, got {value}", name)
    return value


def _in_range(request: SamplingFields, name: str, low: float, high: float) -> float | None:
    value: float | None = getattr(request, name)
    if value is not None and not low <= value <= high:
        raise invalid(f"{name}: expected {low:g} to {high:g}, got {value:g}", name)
    return value

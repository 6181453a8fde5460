"""OpenAI responses: request to `ModelCall`, `Answer` to response or stream, errors.

The id of a response is that of its turn, so `previous_response_id` names a turn of the session and
the log is the store: `store` makes no difference. Every other field that changes what is sampled is
honoured or refused by name. `reasoning` and `text.verbosity` are wishes that only a model trained
for them understands. Fields that change nothing here (`user`, `metadata`, …) and fields that nobody
knows are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from turnfold.gateway.calls import Answer, CallParams, ModelCall
from turnfold.gateway.protocols.openai_choices import is_calling_allowed, refuse_single_calls
from turnfold.gateway.protocols.openai_errors import error_object
from turnfold.gateway.protocols.openai_items import flat_tool, read_flat_tools, read_input
from turnfold.gateway.protocols.request_fields import (
    SamplingFields,
    at_least_one,
    decode_request,
    refuse_unsupported,
    sampling_params,
)
from turnfold.gateway.protocols.sealed_reasoning import seal
from turnfold.gateway.protocols.server_sent_events import named_event
from turnfold.gateway.protocols.tool_arguments import arguments_text
from turnfold.gateway.refusals import Refusal, invalid
from turnfold.schemas.messages import ChatMessage

NAME = "openai_responses"
KEEPALIVE = b": keepalive\n\n"

_ID_PREFIX = "resp_"
_LOGPROBS = "message.output_text.logprobs"
_SEALED = "reasoning.encrypted_content"


class _Request(SamplingFields, kw_only=True):
    """The fields that are read; `Any` where OpenAI allows several shapes."""

    input: str | list[dict[str, Any]] | None = None
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None
    include: list[str] | None = None
    # Accepted with the one value that changes nothing, refused by name otherwise.
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    # Not supported; each would change what is sampled, or how it is asked for.
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    prompt: Any = None
    messages: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    response_format: Any = None


_UNSUPPORTED = {
    "background": "keep the connection open",
    "context_management": "the history is the agent's to edit",
    "conversation": "use `previous_response_id`",
    "prompt": "send its text as `instructions`",
    "messages": "use `input`",
    "max_tokens": "use `max_output_tokens`",
    "max_completion_tokens": "use `max_output_tokens`",
    "response_format": "output is not constrained",
}

_decoder = msgspec.json.Decoder(_Request)


def read_call(body: bytes) -> ModelCall:
    """The request as a call. Raises Refusal naming the field that is wrong or not supported."""
    request = decode_request(body, _decoder)
    _refuse_unsupported(request)
    previous_turn_id = _turn_id(request.previous_response_id)
    messages = read_input([] if request.input is None else request.input)
    if not messages and not previous_turn_id:
        raise invalid("input: expected at least one item", "input")
    instructions = request.instructions or ""
    if instructions:
        messages = (ChatMessage(role="system", content=instructions), *messages)
    include = request.include or ()
    return ModelCall(
        protocol=NAME,
        model=request.model,
        messages=messages,
        has_instructions=bool(instructions),
        previous_turn_id=previous_turn_id,
        tools=read_flat_tools(request.tools or ()),
        is_calling_allowed=is_calling_allowed(request.tool_choice),
        params=_params(request),
        is_streamed=bool(request.stream),
        has_logprobs=_LOGPROBS in include,
        is_reasoning_sealed=_SEALED in include,
    )


def read_count(body: bytes) -> ModelCall:
    """The request of `input_tokens` as the call whose prompt is counted. Raises Refusal."""
    return read_call(body)


def _refuse_unsupported(request: _Request) -> None:
    refuse_unsupported(request, _UNSUPPORTED)
    refuse_single_calls(request.parallel_tool_calls)
    if request.top_logprobs not in (None, 0):
        raise invalid("top_logprobs is not supported: only the sampled token's", "top_logprobs")
    if request.truncation not in (None, "disabled"):
        raise invalid(
            "truncation: only `disabled` is supported: the history is the agent's to edit",
            "truncation",
        )
    form = (request.text or {}).get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "text":
        raise invalid(
            "text.format: only `text` is supported: output is not constrained", "text.format"
        )


def _turn_id(response_id: str | None) -> str:
    if not response_id:
        return ""
    if not response_id.startswith(_ID_PREFIX):
        raise invalid(
            f"previous_response_id: expected an id that begins with `{_ID_PREFIX}`",
            "previous_response_id",
        )
    return response_id.removeprefix(_ID_PREFIX)


def _params(request: _Request) -> CallParams:
    return sampling_params(
        request,
        max_tokens=at_least_one(request.max_output_tokens, "max_output_tokens"),
        stop=[request.stop] if isinstance(request.stop, str) else request.stop or (),
        stop_field="stop",
    )


def answer_body(answer: Answer, call: ModelCall) -> bytes:
    """The whole response."""
    return msgspec.json.encode(_finished(answer, call))


def answer_events(answer: Answer, call: ModelCall) -> Iterator[bytes]:
    """The response as numbered events: its start, each item with its parts, its end."""
    finished = _finished(answer, call)
    begun = finished | {"status": "in_progress", "output": [], "usage": None}
    begun["incomplete_details"] = None
    datas = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(finished["output"]):
        datas += _item_events(index, item)
    datas.append({"type": f"response.{finished['status']}", "response": finished})
    for number, data in enumerate(datas):
        yield named_event(data | {"sequence_number": number})


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """An item that begins empty, what it holds, the whole item."""
    place = {"output_index": index, "item_id": item["id"]}
    empty: dict[str, Any] = (
        {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    )
    begun = {**item, **empty, "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    if item["type"] == "function_call":
        kind, arguments = "response.function_call_arguments", item["arguments"]
        yield {"type": f"{kind}.delta", **place, "delta": arguments}
        yield {"type": f"{kind}.done", **place, "arguments": arguments, "name": item["name"]}
    else:
        for position, part in enumerate(item["content"]):
            yield from _part_events(place | {"content_index": position}, part)
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _part_events(place: dict[str, Any], part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A part that begins empty, its text, the whole part."""
    # Only text that the client reads has logprobs.
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty = {**part, "text": ""} | {name: [] for name in logprobs}
    kind = f"response.{part['type']}"
    yield {"type": "response.content_part.added", **place, "part": empty}
    yield {"type": f"{kind}.delta", **place, "delta": part["text"], **logprobs}
    yield {"type": f"{kind}.done", **place, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **place, "part": part}


def _finished(answer: Answer, call: ModelCall) -> dict[str, Any]:
    is_cut = answer.finish_reason == "length"
    return {
        "id": _ID_PREFIX + answer.turn_id,
        "object": "response",
        "created_at": answer.created,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "instructions": call.messages[0].content if call.has_instructions else None,
        "max_output_tokens": call.params.max_tokens,
        "metadata": {},
        "model": answer.model,
        "output": list(_items(answer, call)),
        "parallel_tool_calls": True,
        "previous_response_id": _response_id(call.previous_turn_id),
        "reasoning": {"effort": None, "summary": None},
        "store": True,
        "temperature": call.params.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto" if call.is_calling_allowed else "none",
        "tools": [flat_tool(tool) for tool in call.tools],
        "top_p": call.params.top_p,
        "truncation": "disabled",
        "usage": _usage(answer),
    }


def _response_id(turn_id: str) -> str | None:
    return _ID_PREFIX + turn_id if turn_id else None


def _items(answer: Answer, call: ModelCall) -> Iterator[dict[str, Any]]:
    """Reasoning, message, calls; a reply that says nothing has an empty message, so that it comes
    back."""
    reply = answer.reply
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    if reply.reasoning:
        yield {
            "id": f"rs_{answer.turn_id}",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": reply.reasoning}],
            "encrypted_content": seal(reply.reasoning) if call.is_reasoning_sealed else None,
            "status": status,
        }
    if reply.content or not reply.tool_calls:
        yield {
            "id": f"msg_{answer.turn_id}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_output_text(answer)],
        }
    for index, made in enumerate(reply.tool_calls):
        yield {
            "id": f"fc_{answer.turn_id}_{index}",
            "type": "function_call",
            "call_id": made.id,
            "name": made.name,
            "arguments": arguments_text(made),
            "status": "completed",
        }


def _output_text(answer: Answer) -> dict[str, Any]:
    logprobs = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode()),
            "top_logprobs": [],
        }
        for token in answer.logprobs or ()
    ]
    return {
        "type": "output_text",
        "text": answer.reply.content,
        "annotations": [],
        "logprobs": logprobs,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    """Details that OpenAI's SDK expects and nobody here counts are 0."""
    return {
        "input_tokens": answer.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answer.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.num_prompt_tokens + answer.num_output_tokens,
    }


def count_body(num_prompt_tokens: int) -> bytes:
    """The answer of `input_tokens`."""
    return msgspec.json.encode(
        {"object": "response.input_tokens", "input_tokens": num_prompt_tokens}
    )


def error_body(refusal: Refusal, request_id: str) -> bytes:
    """OpenAI's error object, with the request id that the log knows it by."""
    return msgspec.json.encode({"error": error_object(refusal, request_id)})


def error_event(refusal: Refusal, request_id: str) -> bytes:
    """An error in a stream that has begun.

    The documented fields are for clients that read events; SDKs raise what stands under `error`.
    """
    return named_event(
        {
            "type": "error",
            "sequence_number": 0,
            "code": refusal.code,
            "message": refusal.message,
            "param": refusal.param,
            "error": error_object(refusal, request_id),
        }
    )

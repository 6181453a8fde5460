"""A model call and its answer in the one form that all protocols are translated to and from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from turnfold.gateway.constraints import Constraint
from turnfold.schemas.messages import ChatMessage, Tool, ToolCall
from turnfold.schemas.wire import Wire


class CallParams(Wire, frozen=True, kw_only=True):
    """How to sample; None is the rollout's own setting."""

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """The reply ends before the first of these; the tokens that spell it are recorded all the same."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


ItemKind = Literal["reasoning", "message", "function_call"]


class ItemReference(Wire, frozen=True, kw_only=True):
    """A part of an earlier reply by its id: `msg_`, `rs_` or `fc_` and the id of the turn."""

    message: int
    """Position of the message that it is a part of."""
    item_id: str
    kind: ItemKind
    turn_id: str
    call_number: int = 0
    """Which call of the reply. A call in the message with the id `item_id` keeps its place."""
    at: str
    """Where the reference stands in the request."""


class ModelCall(Wire, frozen=True, kw_only=True):
    """What an agent asked for."""

    protocol: str
    """openai_chat, openai_responses or anthropic_messages."""
    model: str
    """Name that the agent gave; echoed, it does not choose an engine."""
    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    is_calling_allowed: bool = True
    """False when the agent offers tools and forbids their use in this turn."""
    params: CallParams = CallParams()
    is_streamed: bool = False
    is_usage_streamed: bool = False
    has_logprobs: bool = False
    """The agent wants the logprobs of the sampled tokens."""
    previous_turn_id: str = ""
    """Turn of the session whose history and reply come before the messages."""
    has_instructions: bool = False
    """The first message is not inherited by a call that names the turn of this one as previous."""
    is_reasoning_hidden: bool = False
    """The agent wants no text of the reasoning, only the token that stands for it."""
    is_reasoning_sealed: bool = False
    """The agent wants the reasoning in an opaque token as well."""
    constraints: tuple[Constraint, ...] = ()
    """What the agent would hold the output to."""
    references: tuple[ItemReference, ...] = ()
    """Parts of messages that the agent names instead of sending them."""
    pinned: tuple[tuple[str, str], ...] = ()
    """Volatile nonces in the messages: (what came, what stands there instead)."""


class TokenLogprob(Wire, frozen=True, kw_only=True):
    """A sampled token for a client that asked for logprobs."""

    text: str
    logprob: float


class AnswerHead(Wire, frozen=True, kw_only=True):
    """What is known of an answer before its first token."""

    turn_id: str
    created: int
    """Unix seconds."""
    model: str
    num_prompt_tokens: int


class AnswerPiece(Wire, frozen=True, kw_only=True):
    """More of an answer: text of one kind, or a call."""

    reasoning: str = ""
    content: str = ""
    tool_call: ToolCall | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the tokens since the last piece that had some."""


class Answer(AnswerHead, frozen=True, kw_only=True):
    """A recorded turn as a protocol shows it; the same turn always gives the same answer."""

    reply: ChatMessage
    finish_reason: str
    """stop or length."""
    stop_reason: int | str | None = None
    """The stop sequence that ended the reply, or the stop token."""
    num_output_tokens: int
    num_cached_tokens: int | None = None
    """Prompt tokens that the engine had in its cache; None when it did not say."""
    num_reasoning_tokens: int = 0
    """Output tokens of the reasoning."""
    logprobs: tuple[TokenLogprob, ...] | None = None


def pieces_of(answer: Answer) -> Iterator[AnswerPiece]:
    """A whole answer as pieces: reasoning, content, calls."""
    if answer.reply.reasoning:
        yield AnswerPiece(reasoning=answer.reply.reasoning)
    if answer.reply.content or answer.logprobs:
        yield AnswerPiece(content=answer.reply.content, logprobs=answer.logprobs or ())
    for call in answer.reply.tool_calls:
        yield AnswerPiece(tool_call=call)


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (None, 1, 1.0),
    "top_k": (None, -1, 0),
    "min_p": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "logit_bias": (None, {}),
}


def biasing_params(params: CallParams) -> dict[str, Any]:
    """Settings, by name, under which the recorded logprobs are not those of the policy itself.

    >>> biasing_params(CallParams(top_p=0.9, top_k=-1))
    {'top_p': 0.9}
    """
    given = {name: getattr(params, name) for name in _NEUTRAL}
    return {name: value for name, value in given.items() if value not in _NEUTRAL[name]}


def request_digest(call: ModelCall) -> str:
    """sha256 of the call: a client that repeats a request repeats the digest.

    Neither whether the answer is streamed nor a volatile nonce makes a difference to what is
    sampled. Raises OverflowError when a number does not fit the log.
    """
    plain = msgspec.structs.replace(call, is_streamed=False, is_usage_streamed=False, pinned=())
    return hashlib.sha256(msgspec.msgpack.encode(plain)).hexdigest()

"""One turn, step by step, without I/O: limits, the reply that the client sees, the event."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, assert_never

import msgspec

from turnfold.gateway.backends.engine import GenerateRequest, Generation
from turnfold.gateway.calls import (
    Answer,
    CallParams,
    ItemReference,
    ModelCall,
    TokenLogprob,
    biasing_params,
)
from turnfold.gateway.parsing.replies import ParsedReply, ReplyFormat, Situation, reply_of
from turnfold.gateway.parsing.spans import num_reasoning_tokens
from turnfold.gateway.refusals import ContextLengthExceeded, invalid
from turnfold.gateway.rollouts.state import RecordedTurn
from turnfold.history.heal import PromptPlan
from turnfold.history.render import Renderer
from turnfold.schemas.events import RolloutStarted, Sampling, TurnCompleted
from turnfold.schemas.messages import ChatMessage
from turnfold.schemas.wire import TokenIds

_PROMPT_END_TOKENS = 8
"""Enough to see whether the prompt ends inside a thinking block."""


def continued_call(
    call: ModelCall, history: Sequence[ChatMessage], has_instructions: bool
) -> ModelCall:
    """The call with the history that it names put where it belongs.

        call     instructions' u2        history  instructions u1 r1 (has_instructions)
        result   instructions' u1 r1 u2

    The instructions of the previous turn are not inherited.
    """
    inherited = tuple(history[1:] if has_instructions else history)
    own = int(call.has_instructions)
    messages = call.messages[:own] + inherited + call.messages[own:]
    return msgspec.structs.replace(call, messages=messages)


def resolved_call(call: ModelCall, turn_of: Callable[[str], RecordedTurn | None]) -> ModelCall:
    """The call with what its references name put in their place.

        references  rs_t1, fc_t1_0, then the result of the call
        result      assistant with the reasoning and the call of t1, tool

    Raises Refusal for a reference to what was not said in this session.
    """
    messages = list(call.messages)
    for reference in call.references:
        turn = turn_of(reference.turn_id)
        filled = None if turn is None else _filled(messages[reference.message], reference, turn)
        if filled is None:
            raise invalid(
                f"{reference.at}: Item with id {reference.item_id!r} not found.",
                reference.at,
                "item_not_found",
            )
        messages[reference.message] = filled
    return msgspec.structs.replace(call, messages=tuple(messages), references=())


def _filled(
    message: ChatMessage, reference: ItemReference, turn: RecordedTurn
) -> ChatMessage | None:
    """The message with the part of the reply; None when the reply has no such part."""
    reply = turn.reply
    match reference.kind:
        case "reasoning":
            if not reply.reasoning:
                return None
            return msgspec.structs.replace(message, reasoning=reply.reasoning)
        case "message":
            return msgspec.structs.replace(message, content=reply.content)
        case "function_call":
            if reference.call_number >= len(reply.tool_calls):
                return None
            called = reply.tool_calls[reference.call_number]
            return msgspec.structs.replace(
                message,
                tool_calls=tuple(
                    called if call.id == reference.item_id else call for call in message.tool_calls
                ),
            )
        case _:
            assert_never(reference.kind)


def effective_params(params: CallParams, started: RolloutStarted) -> CallParams:
    """The agent's settings over the rollout's. Raises Refusal naming a setting that is not allowed.

    top_p, top_k, penalties and the like make the recorded logprobs those of another distribution
    than the policy's, so a rollout that is trained on must allow them expressly.
    """
    sampling = started.sampling
    merged = msgspec.structs.replace(
        params,
        temperature=sampling.temperature if params.temperature is None else params.temperature,
        top_p=sampling.top_p if params.top_p is None else params.top_p,
        top_k=sampling.top_k if params.top_k is None else params.top_k,
    )
    biasing = biasing_params(merged)
    if biasing and started.split == "train" and not sampling.is_biased_allowed:
        name, value = next(iter(biasing.items()))
        raise invalid(
            f"{name}={value} is not allowed in a training rollout: it biases the recorded logprobs; "
            "leave it out, or start the rollout with sampling.is_biased_allowed",
            name,
            "biased_sampling",
        )
    return merged


def max_output_tokens(
    asked: int | None, sampling: Sampling, num_prompt_tokens: int, max_context: int | None
) -> int:
    """Output tokens that fit: the least of what was asked, the rollout's limit and the room left.

    Raises Refusal `context_length_exceeded` when there is no room for one.

    >>> max_output_tokens(50, Sampling(max_tokens=8), 100, None)
    8
    """
    limit = min(asked or sampling.max_tokens, sampling.max_tokens)
    if max_context is None:
        return limit
    room = max_context - num_prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(num_prompt_tokens, max_context)
    return min(limit, room)


def smallest(*limits: int | None) -> int | None:
    """The smallest of the limits that exist."""
    return min((limit for limit in limits if limit is not None), default=None)


def generate_request(
    turn_id: str, session_id: str, plan: PromptPlan, params: CallParams, max_tokens: int
) -> GenerateRequest:
    """What the engine is asked; settings that change nothing are left out."""
    sent = {"stop": params.stop, "seed": params.seed, **biasing_params(params)}
    return GenerateRequest(
        request_id=turn_id,
        session_id=session_id,
        prompt_ids=TokenIds.of(plan.prompt_ids),
        max_tokens=max_tokens,
        temperature=1.0 if params.temperature is None else params.temperature,
        params=CallParams(**sent),
    )


def situation_of(
    plan: PromptPlan, renderer: Renderer, reply_format: ReplyFormat, call: ModelCall
) -> Situation:
    """What the prompt and the request say about the reply to come."""
    prompt_end = renderer.decode(plan.prompt_ids[-_PROMPT_END_TOKENS:])
    return Situation(
        is_calling_allowed=bool(call.tools) and call.is_calling_allowed,
        is_reasoning_open=reply_format.is_reasoning_open(prompt_end),
        tools=call.tools or (),
    )


def parse_generation(
    generation: Generation,
    plan: PromptPlan,
    renderer: Renderer,
    reply_format: ReplyFormat,
    call: ModelCall,
) -> ParsedReply:
    """The parts of the sampled text, in time linear in it."""
    situation = situation_of(plan, renderer, reply_format, call)
    parser = reply_format.begin(situation)
    parts = [*parser.feed(sampled_text(generation, renderer)), *parser.end()]
    return msgspec.structs.replace(
        reply_of(parts),
        num_reasoning_tokens=num_reasoning_tokens(
            parts, generation.output_ids.array, renderer.decode
        ),
    )


def sampled_text(generation: Generation, renderer: Renderer) -> str:
    """The output as text, without the stop token or the stop sequence that ended it."""
    ids = generation.output_ids.array
    text = renderer.decode(ids[: len(ids) - ends_with_stop_token(generation, renderer.special_ids)])
    is_cut = isinstance(generation.stop_reason, str) and bool(generation.stop_reason)
    return text.partition(str(generation.stop_reason))[0] if is_cut else text


def ends_with_stop_token(generation: Generation, special_ids: Collection[int]) -> bool:
    """Whether the last token ended the reply and is no part of its text."""
    if generation.finish_reason != "stop" or isinstance(generation.stop_reason, str):
        return False
    last = int(generation.output_ids.array[-1])
    is_end = generation.stop_reason is None and last in special_ids
    return is_end or last == generation.stop_reason


def reply_message(parsed: ParsedReply, turn_id: str) -> ChatMessage:
    """The reply as recorded and as the client gets it, call ids included."""
    calls = tuple(
        msgspec.structs.replace(call, id=call_id(turn_id, index))
        for index, call in enumerate(parsed.tool_calls)
    )
    return ChatMessage(
        role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=calls
    )


def call_id(turn_id: str, index: int) -> str:
    """Id of the reply's call with this number.

    >>> call_id("0123456789abcdef0123456789abcdef", 3)
    'call_0123456789abcdef01234503'
    """
    return f"call_{turn_id[:22]}{index:02d}"


def turn_event(
    *,
    rollout_id: str,
    session_id: str,
    turn_id: str,
    call: ModelCall,
    request: GenerateRequest,
    plan: PromptPlan,
    generation: Generation,
    reply: ChatMessage,
    **provenance: Any,
) -> TurnCompleted:
    """The fact that is recorded; `provenance` holds at, engine_s, request_digest, …"""
    return TurnCompleted(
        rollout_id=rollout_id,
        event_id=turn_id,
        session_id=session_id,
        turn_id=turn_id,
        output_ids=generation.output_ids,
        logprobs=generation.logprobs,
        reply=reply,
        finish_reason=generation.finish_reason,
        stop_reason=generation.stop_reason,
        policy_versions=generation.policy_versions,
        num_cached_tokens=generation.num_cached_tokens,
        protocol=call.protocol,
        model=call.model,
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        pinned=call.pinned,
        unenforced=tuple(constraint.field for constraint in call.constraints),
        has_instructions=call.has_instructions,
        **plan.event_fields(),
        **provenance,
    )


def answer_of(turn: RecordedTurn, logprobs: tuple[TokenLogprob, ...] | None = None) -> Answer:
    """The recorded turn as an answer; the same each time it is asked for."""
    return Answer(
        turn_id=turn.turn_id,
        created=int(turn.at),
        model=turn.model,
        reply=turn.reply,
        finish_reason=turn.finish_reason,
        stop_reason=turn.stop_reason,
        num_prompt_tokens=turn.num_prompt_tokens,
        num_output_tokens=len(turn.logprobs),
        num_cached_tokens=turn.num_cached_tokens,
        num_reasoning_tokens=turn.num_reasoning_tokens,
        logprobs=logprobs,
    )

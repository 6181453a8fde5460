"""The prompt of the next turn: exact saved tokens continued, or the client's history as it renders.

linear   find the turn that the request continues, keep its tokens, append what is missing
tree     render the request, and say which stored sequence it repeats up to which token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from turnfold.history.canonical import is_dropped_part_edited
from turnfold.history.divergence import (
    RETOKENIZED,
    TEMPLATE_REWROTE_HISTORY,
    TOOLS_CHANGED,
    UNKNOWN,
    explain_edit,
    is_identical,
)
from turnfold.history.encoding import encode_render
from turnfold.history.errors import NonlinearHistory
from turnfold.history.places import message_of_token, token_of_message
from turnfold.history.render import Renderer
from turnfold.history.retokenized import first_retokenized
from turnfold.history.saved_text import Piece, align, saved_pieces
from turnfold.history.sequences import Ids, Prefix
from turnfold.history.session import Match, Session
from turnfold.history.splice import Splice, splice
from turnfold.schemas.events import (
    Continuity,
    Divergence,
    HistoryMode,
    NonlinearPolicy,
    RewritePolicy,
)
from turnfold.schemas.messages import ChatMessage, Tool
from turnfold.schemas.wire import TokenIds


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """The exact context for the engine, and how the turn's event encodes it against its parent.

    prompt_ids == full(parent)[:shared_len] + prompt_tail
    """

    prompt_ids: Ids
    """What the engine must be given, uint32."""
    parent_turn_id: str | None
    shared_len: int
    prompt_tail: TokenIds
    shared_messages: int
    new_messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] | None
    """As TurnCompleted wants them: None where they are the parent's."""
    continuity: Continuity
    divergence: Divergence | None = None
    differences: tuple[str, ...] = ()
    """Causes of all differences in the client's history that were healed, for metrics."""
    num_renders: int = 0
    """Template renders that the plan took."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    def event_fields(self) -> dict[str, Any]:
        """The fields of TurnCompleted that the plan decides."""
        return {
            "parent_turn_id": self.parent_turn_id,
            "shared_len": self.shared_len,
            "prompt_tail": self.prompt_tail,
            "num_prompt_tokens": self.num_prompt_tokens,
            "shared_messages": self.shared_messages,
            "new_messages": self.new_messages,
            "tools": self.tools,
            "continuity": self.continuity,
            "divergence": self.divergence,
        }


def plan_prompt(
    session: Session,
    renderer: Renderer,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None = None,
    *,
    mode: HistoryMode = "linear",
    nonlinear: NonlinearPolicy = "reset",
    rewrites: RewritePolicy = "keep",
) -> PromptPlan:
    """Plan the next turn of the session; what the session has folded stays as it is.

    `nonlinear` says what becomes of a history that continues no stored turn, `rewrites` of one that
    does, but whose earlier text the template shows no more. Takes CPU for the render and the new
    tokens only, so run it off the event loop, and not while another thread applies an event to the
    same session. Raises NonlinearHistory under policy `error`, RenderError when the template
    refuses the messages.
    """
    messages = session.recognised(messages)
    if mode == "tree" or session.is_passthrough:
        return _plan_as_rendered(session, renderer, messages, tools)
    chain = session.chain(messages, tools)
    retried = session.retried(messages, tools, chain)
    if retried is not None:
        return _plan_retry(session, retried, messages)
    match = session.lookup(messages, tools, chain)
    if match is None:
        return _plan_break(session, renderer, messages, tools, nonlinear)
    saved = session.sequences.full(match.turn_id)
    pieces = saved_pieces(session, renderer, match.turn_id, saved)
    result = splice(
        renderer,
        lambda history: renderer.render(
            history, session.tools(match.turn_id), True, session.renders
        ),
        pieces,
        session.sequences.output(match.turn_id),
        session.history(match.turn_id),
        messages[match.num_messages :],
    )
    rewritten = Divergence(cause=TEMPLATE_REWROTE_HISTORY)
    if result is None:
        return _plan_nonlinear(session, renderer, messages, tools, nonlinear, rewritten)
    if result.is_taken_back and rewrites == "follow":
        return _plan_as_rendered(session, renderer, messages, tools, "reset", rewritten)
    return _plan_continuation(session, renderer, match, messages, saved, pieces, result)


def _plan_continuation(
    session: Session,
    renderer: Renderer,
    match: Match,
    messages: Sequence[ChatMessage],
    saved: Ids,
    pieces: Sequence[Piece],
    result: Splice,
) -> PromptPlan:
    """Saved tokens of the matched turn and what is missing after them."""
    turn_id = match.turn_id
    new_messages = tuple(messages[match.num_messages :])
    prompt_ids = np.concatenate((saved, result.tail))
    if any(message.role == "assistant" for message in new_messages):
        # The request claims replies after the matched turn that were never sampled: an edit.
        edit = explain(session, messages, session.tools(turn_id))
        divergence: Divergence | None = msgspec.structs.replace(edit, token_index=len(saved))
    else:
        divergence = _first_drift(session, renderer, match, pieces, result, prompt_ids)
    continuity: Continuity = "extended" if divergence is None else "healed"
    return PromptPlan(
        prompt_ids=prompt_ids,
        parent_turn_id=turn_id,
        shared_len=len(saved),
        prompt_tail=TokenIds.of(result.tail),
        shared_messages=match.num_messages,
        new_messages=new_messages,
        tools=None,
        continuity="forked" if session.sequences.is_continued(turn_id) else continuity,
        divergence=divergence,
        differences=tuple(difference.cause for difference in match.differences),
        num_renders=result.num_renders,
    )


def _first_drift(
    session: Session,
    renderer: Renderer,
    match: Match,
    pieces: Sequence[Piece],
    result: Splice,
    prompt_ids: Ids,
) -> Divergence | None:
    """Why the request as the client sent it would not have extended the saved tokens."""
    spans = [piece.span for piece in pieces]
    if match.differences:
        first = match.differences[0]
        token = token_of_message(session, spans, first.message_index)
        return Divergence(cause=first.cause, message_index=first.message_index, token_index=token)
    cause, changed = result.cause, result.changed_token
    if cause is None:
        changed = first_retokenized(session, renderer, spans, prompt_ids)
        if changed is None:
            return None
        cause = RETOKENIZED
    if changed is None:
        return Divergence(cause=cause)
    message = message_of_token(session, spans, changed)
    return Divergence(cause=cause, message_index=message, token_index=changed)


def _plan_retry(session: Session, retried: str, messages: Sequence[ChatMessage]) -> PromptPlan:
    """The prompt of an earlier attempt once more, token by token; nothing is rendered.

    t1 extends t0 and is asked again: parent t0, as t1. The first turn asked again: an inner point
    of itself, all of its prompt and none of its output.
    """
    sequences = session.sequences
    prompt_ids = sequences.prompt(retried)
    if sequences.is_extension(retried):
        prefix = sequences.parent(retried)
        assert prefix is not None
        shared_messages, new_messages = session.new_messages(retried)
    else:
        prefix = Prefix(retried, len(prompt_ids))
        shared_messages, new_messages = len(messages), ()
    is_same_list = session.tools(retried) == session.tools(prefix.turn_id)
    return PromptPlan(
        prompt_ids=prompt_ids,
        parent_turn_id=prefix.turn_id,
        shared_len=prefix.shared_len,
        prompt_tail=TokenIds.of(prompt_ids[prefix.shared_len :]),
        shared_messages=shared_messages,
        new_messages=new_messages,
        tools=None if is_same_list else session.tools(retried),
        continuity="forked",
    )


def _plan_break(
    session: Session,
    renderer: Renderer,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    nonlinear: NonlinearPolicy,
) -> PromptPlan:
    """No stored turn is a prefix: another conversation begins, or this one was edited."""
    if _is_new_conversation(session, messages, tools):
        return _plan_as_rendered(session, renderer, messages, tools, "first")
    divergence = explain(session, messages, tools)
    return _plan_nonlinear(session, renderer, messages, tools, nonlinear, divergence)


def _plan_nonlinear(
    session: Session,
    renderer: Renderer,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    nonlinear: NonlinearPolicy,
    divergence: Divergence,
) -> PromptPlan:
    if nonlinear == "error":
        raise NonlinearHistory(session.session_id, divergence)
    continuity: Continuity = "passthrough" if nonlinear == "passthrough" else "reset"
    return _plan_as_rendered(session, renderer, messages, tools, continuity, divergence)


def explain(
    session: Session, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None
) -> Divergence:
    """Why the request continues no stored turn, against the turn that shares the most with it."""
    last = session.last_turn_id
    if last is None:
        return Divergence(cause=UNKNOWN)
    common = session.common_messages(messages, tools)
    if common is None:
        if session.common_messages(messages, session.tools(last)):
            return Divergence(cause=TOOLS_CHANGED)
        common = (last, 0)
    turn_id, count = common
    stored = session.history(turn_id)
    pairs = enumerate(zip(stored[:count], messages, strict=False))
    # What may be dropped is no part of the digests, so its edits hide inside the common messages.
    edited = next(
        (index for index, pair in pairs if is_dropped_part_edited(*pair, session.rules)), count
    )
    return explain_edit(stored, messages, edited, session.rules)


def _is_new_conversation(
    session: Session, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None
) -> bool:
    """Whether the request neither claims a past nor shares a message with what is stored.

    So the first call of a sub-agent under the same key breaks nothing: it is no reset.
    """
    if not len(session):
        return True
    claims_past = any(message.role == "assistant" for message in messages)
    return not claims_past and session.common_messages(messages, tools) is None


def _plan_as_rendered(
    session: Session,
    renderer: Renderer,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    continuity: Continuity | None = None,
    divergence: Divergence | None = None,
) -> PromptPlan:
    """The request as the template renders it, against the longest exact prefix in the session."""
    render = renderer.render(messages, tools, True, session.renders)
    prompt_ids = encode_render(session, renderer, render)
    prefix = session.sequences.longest_prefix(prompt_ids)
    shared_len = prefix.shared_len if prefix else 0
    if continuity is None:
        continuity = _continuity(session, prefix, messages, tools)
        if continuity in ("forked", "reset"):
            divergence = _tree_divergence(session, renderer, render, prefix, messages, tools)
    if divergence is not None:
        divergence = msgspec.structs.replace(divergence, token_index=shared_len)
    shared_messages, own_tools = _shared_messages(session, prefix, messages, tools)
    return PromptPlan(
        prompt_ids=prompt_ids,
        parent_turn_id=prefix.turn_id if prefix else None,
        shared_len=shared_len,
        prompt_tail=TokenIds.of(prompt_ids[shared_len:]),
        shared_messages=shared_messages,
        new_messages=tuple(messages[shared_messages:]),
        tools=own_tools,
        continuity=continuity,
        divergence=divergence,
        num_renders=1,
    )


def _continuity(
    session: Session,
    prefix: Prefix | None,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
) -> Continuity:
    """How a prompt that was not healed relates to the stored sequences."""
    if session.is_passthrough:
        return "passthrough"
    if prefix is not None and prefix.shared_len == session.sequences.length(prefix.turn_id):
        return "forked" if session.sequences.is_continued(prefix.turn_id) else "extended"
    if _is_new_conversation(session, messages, tools):
        return "first"
    return "forked" if prefix else "reset"


def _tree_divergence(
    session: Session,
    renderer: Renderer,
    render: str,
    prefix: Prefix | None,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
) -> Divergence | None:
    """Why the prompt is a fork; None for a branch or a retry, where nothing has drifted."""
    is_whole = prefix and prefix.shared_len == session.sequences.length(prefix.turn_id)
    chain = session.chain(messages, tools)
    if is_whole or session.retried(messages, tools, chain):
        return None
    match = session.lookup(messages, tools, chain)
    if match is None:
        return explain(session, messages, tools)
    if match.differences:
        first = match.differences[0]
        return Divergence(cause=first.cause, message_index=first.message_index)
    ids = session.sequences.full(match.turn_id)
    pieces = saved_pieces(session, renderer, match.turn_id, ids)
    places = align(renderer, pieces, render)
    is_text_equal = places is not None and all(place.is_shown for place in places)
    return Divergence(cause=RETOKENIZED if is_text_equal else TEMPLATE_REWROTE_HISTORY)


def _shared_messages(
    session: Session,
    prefix: Prefix | None,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
) -> tuple[int, tuple[Tool, ...] | None]:
    """How many messages of the parent's history are repeated to the letter, and tools if changed."""
    own_tools = tuple(tools or ())
    if prefix is None:
        return 0, own_tools or None
    pairs = zip(session.history(prefix.turn_id), messages, strict=False)
    differing = (index for index, pair in enumerate(pairs) if not is_identical(*pair))
    limit = min(len(session.history(prefix.turn_id)), len(messages))
    is_same_list = msgspec.json.encode(own_tools) == msgspec.json.encode(
        session.tools(prefix.turn_id)
    )
    return next(differing, limit), None if is_same_list else own_tools

"""The events of a rollout: facts, in the past tense, keyed by `rollout_id` on `<ns>.events`.

A turn is delta-encoded against its parent, the turn whose full sequence (prompt and output) or
whose head its prompt repeats:

    t0: prompt [1 2]        output [3 4]    parent None, shared 0,  tail [1 2]
    t1: prompt [1 2 3 4 5]  output [6]      parent t0,   shared 4,  tail [5]      a clean extension
    t2: prompt [1 2 9]      output [7]      parent t0,   shared 2,  tail [9]      a fork inside t0

so a log of T turns that ends at N tokens holds O(N) ids, not O(T·N). The log outlives the code:
fields are only added, with defaults; nothing is renamed, retyped or reused.
"""

from __future__ import annotations

from typing import Literal

from turnfold.schemas.messages import ChatMessage, Tool
from turnfold.schemas.wire import Logprobs, TokenIds, Wire

HistoryMode = Literal["linear", "tree"]
"""linear heals the client's history back to the sampled tokens; tree takes it as it renders."""

NonlinearPolicy = Literal["reset", "error", "passthrough"]
"""What linear mode does with a history that has no stored prefix."""

RewritePolicy = Literal["keep", "follow"]
"""What linear mode does where the chat template takes earlier text back: reasoning at a new user
message, a system text that moves to the last message, another date.

keep     the saved tokens stay, the new messages are appended as the template writes them now
follow   the prompt is what the template renders now; a new segment begins
"""

Split = Literal["train", "eval"]

Continuity = Literal["first", "extended", "healed", "reset", "forked", "passthrough"]
"""How a turn's prompt relates to the tokens already sampled.

first        no earlier turn of this conversation in the session
extended     the client's history rendered to an exact extension of the parent as it stands
healed       it would have drifted; saved tokens were spliced in, so it extends the parent
reset        no stored turn was a prefix of the history; a fresh segment begins
forked       extends a turn that already has a continuation, or an inner point of a turn
passthrough  healing is switched off for this session
"""


class RolloutEvent(Wire, frozen=True, kw_only=True):
    """What every event of a rollout carries."""

    rollout_id: str
    event_id: str
    """Unique for one fact; a second event with the same id is a redelivery and changes nothing."""
    at: float = 0.0
    """Unix seconds at the publisher; for people and reports, never for a decision of the fold."""


class Sampling(Wire, frozen=True, kw_only=True):
    """Sampling settings of a rollout, defaults for each of its turns."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 4096
    """Upper limit of output tokens a turn."""
    is_biased_allowed: bool = False
    """Whether top_p, top_k and penalties, which bias the recorded logprobs, are accepted."""


class RolloutStarted(RolloutEvent, frozen=True, kw_only=True, tag="rollout_started"):
    """An attempt at a task began."""

    run_id: str = "default"
    group_id: str
    task_id: str = ""
    index: int = 0
    """Slot in the group, 0 to n-1."""
    attempt: int = 0
    split: Split = "train"
    history_mode: HistoryMode = "linear"
    nonlinear: NonlinearPolicy = "reset"
    rewrites: RewritePolicy = "keep"
    deadline_at: float | None = None
    """Unix seconds after which an unfinished rollout is aborted."""
    model: str = ""
    sampling: Sampling = Sampling()
    max_context_tokens: int | None = None
    """Limit of prompt plus output; None is the engine's own."""
    max_turns: int | None = None
    dispatch_index: int = -1
    """Place of the group in dispatch order; -1 when nobody dispatched it."""


class VersionSpan(Wire, frozen=True, kw_only=True):
    """Tokens [start, end) were sampled by this policy version."""

    policy_version: int
    start: int
    end: int


class Divergence(Wire, frozen=True, kw_only=True):
    """Where the client's history first left what was sampled, and why."""

    cause: str
    """tool_arguments_reordered, whitespace, reasoning_dropped, text_dropped, content_edited,
    message_removed, system_changed, tools_changed, compaction, template_rewrote_history, reply_reformatted,
    retokenized or unknown."""
    message_index: int = -1
    """First message that differs, counted in the request; -1 when all are equal."""
    token_index: int = -1
    """First stored token that a plain render would not repeat or, where the client's render was not
    made, the first one of the message that differs; -1 when not known."""


class TurnCompleted(RolloutEvent, frozen=True, kw_only=True, tag="turn_completed"):
    """One model call: prompt tokens in, sampled tokens out."""

    session_id: str
    turn_id: str
    parent_turn_id: str | None = None
    """Turn of the same rollout whose tokens the prompt repeats; None sends the whole prompt, and
    the fold then looks for the longest exact token prefix itself."""
    shared_len: int = 0
    """Leading tokens of the parent's full sequence (prompt + output) that the prompt repeats."""
    prompt_tail: TokenIds
    """Prompt tokens after the shared ones."""
    output_ids: TokenIds
    """Sampled tokens exactly as the engine returned them, stop token included."""
    logprobs: Logprobs
    """Sampling logprobs, one per output token."""
    num_prompt_tokens: int
    """shared_len + len(prompt_tail); written out so that a gap is noticed."""
    shared_messages: int = 0
    """Leading messages of the parent's history (its prompt messages and its reply) repeated."""
    new_messages: tuple[ChatMessage, ...] = ()
    """Messages of the request after the shared ones."""
    reply: ChatMessage | None = None
    """The output as parsed for the client; ids are never rebuilt from it."""
    tools: tuple[Tool, ...] | None = None
    """Tool schemas when they differ from the parent's; None repeats the parent's (or none)."""
    finish_reason: str = "stop"
    """stop, length or abort, as the engine said."""
    stop_reason: int | str | None = None
    continuity: Continuity = "first"
    divergence: Divergence | None = None
    policy_versions: tuple[VersionSpan, ...] = ()
    """Spans over the output tokens, in order, without gaps; empty when the engine does not say."""
    protocol: str = ""
    """openai_chat, openai_responses, anthropic_messages, or what a foreign publisher says."""
    model: str = ""
    request_digest: str = ""
    """sha256 of the canonical request; a client retry of the same request repeats it."""
    idempotency_key: str = ""
    temperature: float = 1.0
    max_tokens: int = 0
    engine_s: float = 0.0
    """Seconds that the engine took."""
    pinned: tuple[tuple[str, str], ...] = ()
    """Volatile nonces replaced before rendering: (what came, what it was pinned to)."""
    harness: str = ""
    """The client by its own account: the first product of its User-Agent, `AsyncOpenAI/Python`."""
    has_instructions: bool = False
    """The first message of the history is `instructions` of OpenAI's responses API: a later call
    that names this turn as the previous response brings its own."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the engine had in its cache; None when it does not say."""
    num_reasoning_tokens: int = 0
    """Output tokens between the marks around the reasoning; 0 also when nobody counted them."""
    unenforced: tuple[str, ...] = ()
    """Fields of the request that would constrain the output and were not enforced: `tool_choice`,
    `response_format`, …; the reply was sampled freely all the same."""


class TurnFailed(RolloutEvent, frozen=True, kw_only=True, tag="turn_failed"):
    """A model call that gave no sample; it is not a turn to train on."""

    session_id: str
    turn_id: str = ""
    reason: str
    """context_length_exceeded, engine_unavailable, engine_error, invalid_output, aborted, …"""
    message: str = ""


class RolloutFinished(RolloutEvent, frozen=True, kw_only=True, tag="rollout_finished"):
    """The agent is done and its reward is known."""

    reward: float
    rewards: dict[str, float] = {}
    """Named parts of the reward, for reports."""
    turn_rewards: dict[str, float] = {}
    """Process rewards: by turn_id, what a turn was worth in itself. They come on top of `reward`,
    which is the outcome of the rollout."""
    is_truncated: bool = False
    """The agent ran out of turns, context or time but was scored all the same."""
    info: dict[str, str] = {}


class RolloutAborted(RolloutEvent, frozen=True, kw_only=True, tag="rollout_aborted"):
    """The rollout ended without a reward that counts: it is not a reward of 0."""

    reason: str
    """deadline, agent_error, environment_error, agent_timeout, cancelled, …"""
    message: str = ""


class RewardRevised(RolloutEvent, frozen=True, kw_only=True, tag="reward_revised"):
    """A later verdict on a finished rollout; supersedes its trajectory."""

    reward: float
    rewards: dict[str, float] = {}
    turn_rewards: dict[str, float] = {}
    """Process rewards by turn_id; like the other two they replace what was said before."""
    reason: str = ""


Event = (
    RolloutStarted | TurnCompleted | TurnFailed | RolloutFinished | RolloutAborted | RewardRevised
)

"""A toy model in small integers, and a driver that plays an agent's conversation turn by turn.

Toy template, with one id per mark and one id per character (100 + its code):

    user       [10] text [11]        tool  [14] text [15]
    assistant  [12] text [13]        generation prompt [12]

Ids 2000 and up are other ids of the letters a, b, …: what a model samples and no tokenizer makes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from turnfold.history.heal import PromptPlan, plan_prompt
from turnfold.history.render import TemplateRenderer
from turnfold.history.sequences import TokenStore
from turnfold.history.session import Session
from turnfold.history.testing import split_tokens
from turnfold.schemas.events import TurnCompleted
from turnfold.schemas.messages import ChatMessage
from turnfold.schemas.wire import Logprobs, TokenIds

MARKS = {10: "❨u", 11: "u❩", 12: "❨a", 13: "a❩", 14: "❨t", 15: "t❩", 16: "❨s", 17: "s❩"}
ROLES = {"user": (10, 11), "assistant": (12, 13), "tool": (14, 15), "system": (16, 17)}


class ToyRenderer:
    """The toy template; `count_first` writes the number of messages before everything else."""

    def __init__(self, count_first: bool = False) -> None:
        self.count_first = count_first
        self.num_renders = 0
        self.special_ids = frozenset(MARKS)
        self.boundaries = frozenset(MARKS.values())

    def render(
        self, messages: Any, tools: Any, add_generation_prompt: bool, memo: Any = None
    ) -> str:
        self.num_renders += 1
        text = f"{len(messages)}:" if self.count_first else ""
        for message in messages:
            opening, closing = (MARKS[mark] for mark in ROLES[message.role])
            text += opening + message.content + self.calls(message) + closing
        return text + (MARKS[12] if add_generation_prompt else "")

    def calls(self, message: ChatMessage) -> str:
        return "".join(f"<{c.name} {json.dumps(c.arguments)}>" for c in message.tool_calls)

    def encode(self, text: str) -> Any:
        ids, at = [], 0
        while at < len(text):
            mark = next((m for m, word in MARKS.items() if text.startswith(word, at)), None)
            ids.append(100 + ord(text[at]) if mark is None else mark)
            at += 1 if mark is None else 2
        return np.array(ids, dtype=np.uint32)

    def decode(self, ids: Any) -> str:
        return "".join(self.word(int(token)) for token in ids)

    def word(self, token: int) -> str:
        if token >= 2000:
            return chr(ord("a") + token - 2000)
        return MARKS[token] if token in MARKS else chr(token - 100)


@dataclass
class Conversation:
    """Plays turns of one session: plan, sample the given ids, fold the event."""

    renderer: Any
    mode: Any = "linear"
    nonlinear: Any = "reset"
    rewrites: Any = "keep"
    session: Session = field(default_factory=lambda: Session("s1", "r1"))
    events: list[TurnCompleted] = field(default_factory=list)
    replies: list[ChatMessage] = field(default_factory=list)

    def turn(
        self,
        messages: Sequence[ChatMessage],
        output: Sequence[int] | str,
        reply: ChatMessage | None = None,
        tools: Any = None,
    ) -> PromptPlan:
        plan = self.plan(messages, tools)
        ids = self.renderer.encode(output).tolist() if isinstance(output, str) else list(output)
        event = self.completed(plan, ids, reply or self.parse(ids))
        self.session.apply(event)
        self.events.append(event)
        assert event.reply is not None
        self.replies.append(event.reply)
        sequences = self.session.sequences
        assert sequences.prompt(event.turn_id).tolist() == plan.prompt_ids.tolist()
        assert sequences.output(event.turn_id).tolist() == ids
        return plan

    def plan(self, messages: Sequence[ChatMessage], tools: Any = None) -> PromptPlan:
        plan = plan_prompt(
            self.session,
            self.renderer,
            messages,
            tools,
            mode=self.mode,
            nonlinear=self.nonlinear,
            rewrites=self.rewrites,
        )
        shared: list[int] = []
        if plan.parent_turn_id is not None:
            shared = self.session.sequences.full(plan.parent_turn_id).tolist()[: plan.shared_len]
        assert plan.prompt_ids.tolist() == shared + plan.prompt_tail.tolist()
        return plan

    def completed(self, plan: PromptPlan, ids: list[int], reply: ChatMessage) -> TurnCompleted:
        turn_id = f"t{len(self.events)}"
        return TurnCompleted(
            rollout_id="r1",
            event_id=f"e-{turn_id}",
            session_id="s1",
            turn_id=turn_id,
            output_ids=TokenIds.of(ids),
            logprobs=Logprobs.of([-0.5] * len(ids)),
            reply=reply,
            **plan.event_fields(),
        )

    def parse(self, ids: list[int]) -> ChatMessage:
        kept = [token for token in ids if token not in self.renderer.special_ids]
        content = self.renderer.decode(np.array(kept, dtype=np.uint32))
        return ChatMessage(role="assistant", content=content)

    def rows(self) -> list[tuple[list[int], list[int]]]:
        return rows(self.session.sequences)

    def continuities(self) -> list[str]:
        return [event.continuity for event in self.events]

    def causes(self) -> list[str | None]:
        return [e.divergence.cause if e.divergence else None for e in self.events]


def rows(sequences: TokenStore) -> list[tuple[list[int], list[int]]]:
    """(token ids, mask) of every sequence that no turn extends; a sampled token is masked in once."""
    trained: set[str] = set()
    made = []
    for leaf in sequences:
        if sequences.is_continued(leaf) or not len(sequences.output(leaf)):
            continue
        ids = sequences.full(leaf).tolist()
        mask = [0] * len(ids)
        for span in sequences.spans(leaf):
            is_whole = span.stop == sequences.length(span.turn_id)
            if span.is_output and is_whole and span.turn_id not in trained:
                trained.add(span.turn_id)
                mask[span.start : span.stop] = [1] * (span.stop - span.start)
        made.append((ids, mask))
    return made


CORPUS = [
    "You are a helpful assistant. Find the weather, read files and answer the question of the user.",
    "system user assistant tool_response name arguments function path text city hello there thanks",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    "The weather in Paris is sunny. It will be sunny for three days, then there will be rain.",
]


@pytest.fixture(scope="session")
def bpe() -> TemplateRenderer:
    """A byte-level BPE tokenizer trained here, with the thinking template of this folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    marks = ["<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    words = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    return TemplateRenderer(tokenizer, template, special_tokens={"eos_token": "<|im_end|>"})


@pytest.fixture(scope="session")
def split() -> Callable[..., list[int]]:
    return split_tokens


@pytest.fixture
def toy() -> ToyRenderer:
    return ToyRenderer()


@pytest.fixture
def counting_toy() -> ToyRenderer:
    return ToyRenderer(count_first=True)


@pytest.fixture
def chat(toy: ToyRenderer) -> Conversation:
    """A conversation with the toy model in linear mode."""
    return Conversation(toy)


@pytest.fixture
def converse() -> Callable[..., Conversation]:
    """Makes conversations: `converse(renderer, mode="tree")`."""
    return Conversation

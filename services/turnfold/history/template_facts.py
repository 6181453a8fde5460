"""What is learnt of a chat template by rendering a few words with it, once per renderer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from turnfold.history.errors import RenderError
from turnfold.history.render import Renderer
from turnfold.schemas.messages import ChatMessage


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What is learnt once of a chat template, by rendering a conversation of two messages."""

    opening: str
    """The generation prompt: what the template writes for the model to continue."""
    closers: frozenset[int]
    """Marks that close the last reply of a conversation; gpt-oss: <|return|>, elsewhere <|end|>."""
    cuts: re.Pattern[str] | None = None
    """Finds the boundaries of the tokenizer that the template writes; None when it writes none."""


@lru_cache(maxsize=64)
def template_facts(renderer: Renderer) -> TemplateFacts:
    """Learn the facts of a template; two or three renders of a few words, once per renderer."""
    question = ChatMessage(role="user", content="x")
    replies = [ChatMessage(role="assistant", content=text) for text in ("x", "y")]
    try:
        prompt, asked = (renderer.render([question], None, add) for add in (True, False))
        one, other = (renderer.render([question, reply], None, False) for reply in replies)
    except RenderError:
        return TemplateFacts("", frozenset())
    if prompt == asked:
        opening = _opening_always_written(renderer, prompt)
    else:
        opening = prompt[len(asked) :] if prompt.startswith(asked) else ""
    closer = renderer.encode(one[len(one) - common_suffix_len(one, other) :]).tolist()
    closers = frozenset(closer) & renderer.special_ids
    return TemplateFacts(opening, closers, _cuts(renderer, prompt + one))


@lru_cache(maxsize=64)
def mark_texts(renderer: Renderer) -> tuple[str, ...]:
    """The texts of all added tokens, the longest first."""
    ids = np.array(sorted(renderer.special_ids), np.uint32)
    texts = {renderer.decode(ids[index : index + 1]) for index in range(len(ids))}
    return tuple(sorted((text for text in texts if text.strip()), key=len, reverse=True))


def _opening_always_written(renderer: Renderer, prompt: str) -> str:
    """The opening of a template that writes it whether it is asked to or not.

    It is what another question after the first one does not repeat:

        one question    <user>x<end><assistant><think></think>
        two questions   <user>x<end><user>x<end><assistant><think></think>
    """
    question = ChatMessage(role="user", content="x")
    try:
        longer = renderer.render([question, question], None, True)
    except RenderError:
        return ""
    pairs = enumerate(zip(prompt, longer, strict=False))
    return prompt[next((index for index, (a, b) in pairs if a != b), len(prompt)) :]


def _cuts(renderer: Renderer, text: str) -> re.Pattern[str] | None:
    marks = sorted(mark for mark in renderer.boundaries if mark in text)
    return re.compile("|".join(map(re.escape, marks))) if marks else None


def common_prefix(a: str, b: str) -> str:
    """The leading text that both share, by bisection."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if b.startswith(a[:middle]):
            low = middle
        else:
            high = middle - 1
    return a[:low]


def common_suffix_len(a: str, b: str) -> int:
    """How many trailing characters are equal, by bisection: comparing slices is what C does fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a.endswith(b[len(b) - middle :]):
            low = middle
        else:
            high = middle - 1
    return low

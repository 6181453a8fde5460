"""What is learnt of a chat template by rendering a few words with it, once per renderer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
    opening = prompt[len(asked) :] if prompt.startswith(asked) else ""
    closer = renderer.encode(one[len(one) - common_suffix_len(one, other) :]).tolist()
    return TemplateFacts(opening, frozenset(closer) & renderer.special_ids)


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

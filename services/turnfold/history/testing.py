"""A model that says what it is told to, in the form of its chat template; for tests and benchmarks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import numpy as np

from turnfold.history.errors import RenderError
from turnfold.history.render import Renderer
from turnfold.history.template_facts import common_suffix_len
from turnfold.schemas.messages import ChatMessage, Tool


class ScriptedModel:
    """Gives the tokens that a model would sample for a reply.

    `split_share` of the words that are one token come as two, so that the text is what the template
    shows and the tokens are not; `is_stop_kept` says whether the engine hands out the stop token.
    """

    def __init__(
        self,
        renderer: Renderer,
        *,
        is_stop_kept: bool = True,
        split_share: float = 0.0,
        seed: int = 7,
    ) -> None:
        self.renderer = renderer
        self.is_stop_kept = is_stop_kept
        self.split_share = split_share
        self._random = random.Random(seed)

    def sample(
        self, reply: ChatMessage, tools: Sequence[Tool] | None, next_role: str = "user"
    ) -> list[int]:
        """The reply in tokens; `next_role` speaks after it, which some models announce."""
        text = self.written(reply, tools)
        ids = self.renderer.encode(text).tolist()
        stop = self._stop(ids)
        if stop is None:
            body, kept = text.rstrip("\n"), self._announced(next_role)
        else:
            body, kept = self.renderer.decode(np.array(ids[:stop], np.uint32)), ids[stop : stop + 1]
        sampled = split_tokens(self.renderer, body, lambda _: self._is_split())
        return [*sampled, *(kept if self.is_stop_kept else [])]

    def written(self, reply: ChatMessage, tools: Sequence[Tool] | None) -> str:
        """What the template shows of a reply while it is the last message."""
        asked = [ChatMessage(role="user", content="x")]
        try:
            prompt = self.renderer.render(asked, tools, True)
            whole = self.renderer.render([*asked, reply], tools, False)
        except RenderError:
            return _common_form(reply)
        # Some generation prompts open a thinking block that the history leaves out when empty.
        unopened = prompt.removesuffix("<think>\n")
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        if whole.startswith(unopened):
            return "\n</think>\n\n" + whole[len(unopened) :]
        return _common_form(reply)

    def _is_split(self) -> bool:
        return self._random.random() < self.split_share

    def _stop(self, ids: Sequence[int]) -> int | None:
        """Where the closing mark stands; None where the template does not close replies."""
        for index in range(len(ids) - 1, -1, -1):
            word = self.renderer.decode(np.array(ids[index : index + 1], np.uint32))
            if word.strip():
                is_mark = ids[index] in self.renderer.special_ids
                return index if is_mark and "tool_call" not in word else None
        return None

    def _announced(self, next_role: str) -> list[int]:
        """GLM closes a reply with the mark of whoever speaks next; others with one mark for all."""
        mark = "<|observation|>" if next_role == "tool" else "<|user|>"
        ids: list[int] = self.renderer.encode(mark).tolist()
        if len(ids) == 1:
            return ids
        return self._closing_mark()

    def _closing_mark(self) -> list[int]:
        """The first mark after a reply, told from what two conversations end with alike."""
        asked = ChatMessage(role="user", content="x")
        replies = [ChatMessage(role="assistant", content=text) for text in ("x", "y")]
        try:
            one, other = (self.renderer.render([asked, reply], None, False) for reply in replies)
        except RenderError:
            return []
        ending = self.renderer.encode(one[len(one) - common_suffix_len(one, other) :]).tolist()
        return [token for token in ending if token in self.renderer.special_ids][:1]


def split_tokens(renderer: Renderer, text: str, is_split: Callable[[int], bool]) -> list[int]:
    """The ids of the text, some cut in two where `is_split(index)`: equal text, other tokens."""
    ids: list[int] = []
    for index, token in enumerate(renderer.encode(text).tolist()):
        word = renderer.decode(np.array([token], dtype=np.uint32))
        # A token may hold a part of a character, which alone has no text.
        is_whole = "\ufffd" not in word
        if token not in renderer.special_ids and len(word) > 1 and is_whole and is_split(index):
            ids += [*renderer.encode(word[:1]).tolist(), *renderer.encode(word[1:]).tolist()]
        else:
            ids.append(token)
    return ids


def _common_form(reply: ChatMessage) -> str:
    """A reply as many models write one, for templates that tell nothing about it."""
    text = f"<think>\n{reply.reasoning}\n</think>\n\n" if reply.reasoning else ""
    text += reply.content
    for call in reply.tool_calls:
        form = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        text += f"\n<tool_call>\n{form}\n</tool_call>"
    return text

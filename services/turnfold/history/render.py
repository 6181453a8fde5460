"""Messages to text to tokens and back, with the model's own chat template and tokenizer."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol

import jinja2
import numpy as np
import tokenizers

from turnfold.history.boundaries import safe_boundaries
from turnfold.history.canonical import canonical_arguments
from turnfold.history.errors import RenderError
from turnfold.history.render_memo import RenderMemo, remembering_template
from turnfold.history.sequences import Ids
from turnfold.history.template_sandbox import template_sandbox
from turnfold.schemas.messages import ChatMessage, Tool, ToolCall


class Renderer(Protocol):
    """What healing needs to know of a model: its template and its tokenizer.

    Implementations are functions of their arguments and safe to call from several threads.
    """

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of added tokens: turn markers, tool markers. Text never merges across them."""
        ...

    @property
    def boundaries(self) -> frozenset[str]:
        """Texts before each occurrence of which a text may be cut and encoded in parts."""
        ...

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] | None,
        add_generation_prompt: bool,
        memo: RenderMemo | None = None,
    ) -> str:
        """The conversation as the template writes it. Raises RenderError.

        With the memo of its conversation a render takes time for what is new in it; the text is the
        same.
        """
        ...

    def encode(self, text: str) -> Ids:
        """Token ids of the text, uint32; markers in the text become their ids, nothing is added."""
        ...

    def decode(self, ids: Ids) -> str:
        """Text of the ids, markers included."""
        ...

    def __hash__(self) -> int:
        """By identity: what is learnt of a template is kept per renderer."""
        ...


class TemplateRenderer:
    """A renderer made of a tokenizer and the text of a chat template.

    `special_tokens` are names and strings that the template may use (`bos_token`, `eos_token`, …),
    `template_options` are further variables (`enable_thinking`, …), `today` is the date that a
    template prints when it asks for one; no clock is read here.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        chat_template: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        template_options: Mapping[str, Any] | None = None,
        today: datetime.date | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template
        self._variables: dict[str, Any] = {
            "bos_token": "",
            "eos_token": "",
            **(special_tokens or {}),
            **(template_options or {}),
            "strftime_now": _strftime(today),
        }
        self._dialect = _Dialect(chat_template)
        self.special_ids = frozenset(map(int, tokenizer.get_added_tokens_decoder()))
        self.boundaries = safe_boundaries(tokenizer, chat_template)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return template_sandbox().from_string(self._template)

    @cached_property
    def _remembering(self) -> jinja2.Template | None:
        return remembering_template(self._template, template_sandbox())

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] | None,
        add_generation_prompt: bool,
        memo: RenderMemo | None = None,
    ) -> str:
        """The conversation as the template writes it. Raises RenderError."""
        variables = {
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._variables,
        }
        if memo is not None and self._remembering is not None:
            # What a round reads is evaluated early: where that fails, the round itself may not.
            with suppress(Exception):
                return self._render_with(memo, self._remembering, messages, variables)
        try:
            conversation = [self._dialect.message(message) for message in messages]
            return self._compiled.render(messages=conversation, **variables)
        except (
            Exception
        ) as error:  # a template may raise anything: it is code of the model's author
            raise RenderError(f"chat template: {type(error).__name__}: {error}") from error

    def _render_with(
        self,
        memo: RenderMemo,
        template: jinja2.Template,
        messages: Sequence[ChatMessage],
        variables: Mapping[str, Any],
    ) -> str:
        conversation = [memo.form(message, self._dialect.message) for message in messages]
        remembered = memo.begin(
            variables["tools"] or (), b"%d" % variables["add_generation_prompt"]
        )
        text = template.render(**{**variables, **remembered}, messages=conversation)
        memo.end(messages)
        return text

    def encode(self, text: str) -> Ids:
        """Token ids of the text, uint32; markers in the text become their ids, nothing is added."""
        # The fast form keeps no offsets, which takes a fifth of the time; it exists for batches only.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def decode(self, ids: Ids) -> str:
        """Text of the ids, markers included."""
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return text


class _Dialect:
    """How messages become the dicts that one template reads."""

    def __init__(self, chat_template: str) -> None:
        # gpt-oss reads reasoning under `thinking`, all others under `reasoning_content`.
        self._reads_thinking = re.search(r"\.thinking\b|[\"']thinking[\"'] in", chat_template)
        # DeepSeek shows the calls of a message, or closes it, only where its content is null.
        self._reads_null = re.search(r"content['\"]\] is (not )?none\s*-?%}", chat_template)
        # Some join the arguments to text, which a mapping cannot be, and do not encode them before.
        self._joins_arguments = re.search(
            r"arguments['\"]?\]?\s*\+|\+\s*[\w.\[\]'\"]+\barguments['\"]?\]?\s*-?}}", chat_template
        ) and not re.search(r"arguments['\"]?\]?\s*\|\s*tojson", chat_template)
        # Mistral refuses call ids that are not nine characters long.
        self._wants_nine_characters = "length != 9" in chat_template

    def message(self, message: ChatMessage) -> dict[str, Any]:
        """ChatMessage → the OpenAI shape that templates expect; absent things have no key."""
        form: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.name:
            form["name"] = message.name
        if message.tool_call_id:
            form["tool_call_id"] = self._call_id(message.tool_call_id)
        if message.tool_calls:
            form["tool_calls"] = [self._call(call) for call in message.tool_calls]
            if self._reads_null and not message.content:
                form["content"] = None
        if message.reasoning:
            form["reasoning_content"] = message.reasoning
            # gpt-oss shows either the text beside a call or the reasoning, and refuses both.
            if self._reads_thinking and not (message.tool_calls and message.content):
                form["thinking"] = message.reasoning
        return form

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = call.arguments
        if self._joins_arguments:
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            parsed = canonical_arguments(call)
            # Templates walk the keys; text that is no object still has to be shown.
            arguments = parsed if isinstance(parsed, dict) else {"_raw": arguments}
        function = {"name": call.name, "arguments": arguments}
        return {"id": self._call_id(call.id), "type": "function", "function": function}

    def _call_id(self, call_id: str) -> str:
        if not self._wants_nine_characters or re.fullmatch(r"[a-zA-Z0-9]{9}", call_id):
            return call_id
        alphabet = string.digits + string.ascii_letters
        digest = hashlib.blake2b(call_id.encode(), digest_size=9).digest()
        return "".join(alphabet[byte % len(alphabet)] for byte in digest)


def _strftime(today: datetime.date | None) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        if today is None:
            raise RenderError("the template prints the date, but no `today` was given")
        return today.strftime(form)

    return strftime_now

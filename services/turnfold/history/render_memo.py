"""A chat template that writes each message of a conversation once, not once in every render.

The loops of the template (over messages, as a rule) are compiled so that each round first asks what
was written from equal inputs before:

    {% for message in messages %}       {% for message in messages %}
      <{{ message.role }}>…               {% set known = find(0, message, …) %}
    {% endfor %}                          {% if known %}{{ known[0] }}
                                          {% else %}{% set text %}<{{ message.role }}>…{% endset %}
                                            {{ keep(text, …) }}
                                          {% endif %}
                                        {% endfor %}

What a round reads and sets is told by `loop_inputs`; a loop of which that cannot be told stays as it
is. Dicts are equal inputs when they are one object, so `RenderMemo` keeps the dict of each message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jinja2
import msgspec
from jinja2 import nodes

from turnfold.history.loop_inputs import LoopInputs, UnreadableLoop, attribute, loop_inputs
from turnfold.schemas.messages import ChatMessage, Tool

_MEMO, _KNOWN, _TEXT = "turnfold_memo", "turnfold_known", "turnfold_text"
_FILTERS = {"find": "turnfold_find", "keep": "turnfold_keep"}
"""Methods of the memo, and the filters that call them."""
_SPARE = 64
"""How much more than twice of what the last render used is kept."""
_MAX_SURROUNDINGS = 8
_MAX_ITEMS = 64
_UNDEFINED = (jinja2.Undefined,)
_SELF_EVIDENT = frozenset((str, bool, type(None)))

Form = dict[str, Any]
"""A message as a template reads it."""
Key = tuple[Any, ...]
Written = tuple[Any, ...]
"""The text of a round, and the values that it left in the attributes that it may set."""


class RenderMemo:
    """What the renders of one conversation have written, round by round.

        variables = memo.begin(tools, surroundings)
        template.render(messages=[memo.form(m, make) for m in messages], **variables)
        memo.end(messages)

    It belongs to one template and to one thread at a time, and stays as large as the conversation:
    what is not used any more is forgotten.
    """

    def __init__(self) -> None:
        self._forms: dict[int, tuple[ChatMessage, Form]] = {}
        """By the id of a message, which is kept with its form lest the id be used again."""
        self._numbers: dict[int, int] = {}
        """By the id of a form: its number, which no other form ever gets."""
        self._next_number = 2  # False is 0, and True is 1
        self._written: dict[Key, Written] = {}
        self._used: dict[Key, Written] = {}
        self._surroundings: dict[bytes, tuple[int, list[Tool]]] = {}
        """A number for each, and the tools that have their numbers."""
        self._surrounding = 0
        self._pending: Key | None = None

    def form(self, message: ChatMessage, make: Callable[[ChatMessage], Form]) -> Form:
        """The form of the message; the same dict each time."""
        known = self._forms.get(id(message))
        if known is None:
            known = self._forms[id(message)] = (message, make(message))
            self._give_number(known[1])
        return known[1]

    def _give_number(self, form: Form) -> None:
        self._numbers[id(form)] = self._next_number
        self._next_number += 1

    def begin(self, tools: Sequence[Tool], surroundings: bytes) -> dict[str, Any]:
        """Variables for one render of the template; `surroundings` tells all else that differs."""
        key = msgspec.json.encode(tools) + surroundings
        if key not in self._surroundings:
            if len(self._surroundings) >= _MAX_SURROUNDINGS:
                self._surroundings.clear()
                self._written.clear()
            self._surroundings[key] = (self._next_number, list(tools))
            self._next_number += 1
            for tool in tools:
                self._give_number(tool)
        self._surrounding, known_tools = self._surroundings[key]
        self._used = {}
        return {_MEMO: self, "tools": known_tools or None}

    def end(self, messages: Sequence[ChatMessage]) -> None:
        """Forget, now and then, what was not used in the render of these messages."""
        if len(self._written) > 2 * len(self._used) + _SPARE:
            self._written = self._used
        if len(self._forms) > 2 * len(messages) + _SPARE:
            kept = {id(message) for message in messages}
            self._forms = {key: known for key, known in self._forms.items() if key in kept}
            forms = {id(form) for _, form in self._forms.values()}
            for _, tools in self._surroundings.values():
                forms.update(map(id, tools))
            self._numbers = {key: n for key, n in self._numbers.items() if key in forms}

    def find(self, *inputs: Any) -> Written | None:
        """What was written from these inputs: the number of the loop and what it reads."""
        parts: list[Any] = [self._surrounding]
        for value in inputs:
            kind = type(value)
            if kind in _SELF_EVIDENT:
                parts.append(value)
            elif (number := self._numbers.get(id(value))) is not None:
                parts.append(number)
            elif (fingerprint := self._fingerprint(value)) is not None:
                parts.append(fingerprint)
            else:
                self._pending = None
                return None
        key = tuple(parts)
        written = self._written.get(key)
        if written is None:
            self._pending = key
        else:
            self._used[key] = written
        return written

    def keep(self, text: str, *values: Any) -> str:
        """Keep what was written from the inputs that were not found; returns the text."""
        if self._pending is not None and all(map(self._is_lasting, values)):
            self._written[self._pending] = self._used[self._pending] = (text, *values)
        return text

    def _is_lasting(self, value: Any) -> bool:
        """Whether the value can be set again in another render."""
        return value is None or self._fingerprint(value) not in (None, _UNDEFINED)

    def _fingerprint(self, value: Any) -> Any:
        """Equal for values that no template can tell from each other; None where that is unknown."""
        kind = type(value)
        if kind in _SELF_EVIDENT:
            return value
        if kind is dict:
            return self._numbers.get(id(value))
        if kind in (int, float):
            return kind, value
        if kind in (list, tuple) and len(value) <= _MAX_ITEMS:
            items = tuple(map(self._fingerprint, value))
            return None if None in items else (kind, *items)
        return _UNDEFINED if isinstance(value, jinja2.Undefined) else None


def remembering_template(
    chat_template: str, environment: jinja2.Environment
) -> jinja2.Template | None:
    """The template, to be rendered with the variables of a `RenderMemo`; None when no loop is fit."""
    template = environment.parse(chat_template)
    fit = []
    for number, loop in enumerate(_outermost_loops(template)):
        try:
            fit.append((number, loop, loop_inputs(loop, template)))
        except UnreadableLoop:
            continue
    for number, loop, inputs in fit:
        loop.body = _remembering_body(number, loop, inputs)
    if not fit:
        return None
    environment.filters |= {name: getattr(RenderMemo, m) for m, name in _FILTERS.items()}
    template.set_environment(environment)
    code = environment.compile(template)
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


def _outermost_loops(node: nodes.Node) -> Iterator[nodes.For]:
    """Loops that write something, in no other loop and no macro."""
    for child in node.iter_child_nodes():
        if isinstance(child, nodes.For):
            if any(_writes(output) for output in child.find_all(nodes.Output)):
                yield child
        elif not isinstance(child, nodes.Macro | nodes.CallBlock):
            yield from _outermost_loops(child)


def _writes(output: nodes.Output) -> bool:
    return any(
        not isinstance(node, nodes.TemplateData) or node.data.strip() for node in output.nodes
    )


def _remembering_body(number: int, loop: nodes.For, inputs: LoopInputs) -> list[nodes.Node]:
    values = [attribute(*changed) for changed in inputs.sets]
    body: list[nodes.Node] = [
        nodes.Assign(
            nodes.Name(_KNOWN, "store"), _asked("find", nodes.Const(number), *inputs.reads)
        ),
        nodes.If(
            nodes.Name(_KNOWN, "load"),
            [nodes.Output([_item(0)]), *_restored(inputs)],
            [],
            [
                nodes.AssignBlock(nodes.Name(_TEXT, "store"), None, loop.body),
                nodes.Output([_asked("keep", nodes.Name(_TEXT, "load"), *values)]),
            ],
        ),
    ]
    for node in body:
        node.set_lineno(loop.lineno)
    return body


def _restored(inputs: LoopInputs) -> Iterator[nodes.Assign]:
    for index, (namespace, name) in enumerate(inputs.sets, start=1):
        yield nodes.Assign(nodes.NSRef(namespace, name), _item(index))


def _asked(method: str, *arguments: nodes.Expr) -> nodes.Filter:
    # A filter, for the sandbox takes a look at each call.
    name, memo = _FILTERS[method], nodes.Name(_MEMO, "load")
    return nodes.Filter(memo, name, list(arguments), [], None, None)


def _item(index: int) -> nodes.Getitem:
    return nodes.Getitem(nodes.Name(_KNOWN, "load"), nodes.Const(index), "load")

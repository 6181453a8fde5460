"""The sandbox that chat templates run in: that of transformers, with quicker attribute access.

Jinja looks an attribute up as Python does, and in the dict when that has failed; for most of what
templates read, a message's role or `loop.last`, the outcome is known without.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jinja2
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from turnfold.history.loop_inputs import LOOP_ITEMS, LOOP_VALUES

_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = LOOP_VALUES | LOOP_ITEMS
_PLAIN = frozenset((bool, int, float, str, list, dict, type(None)))


class _QuickSandbox(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """What the sandbox gives; only values that it lets through unchanged are taken directly."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES and attribute in obj:
                return obj[attribute]
        elif kind is LoopContext:
            if attribute in _LOOP_ATTRIBUTES:
                return getattr(obj, attribute)
        elif kind is Namespace and not attribute.startswith("_"):
            value = getattr(obj, attribute, None)
            if type(value) in _PLAIN and value is not None:
                return value
        return super().getattr(obj, attribute)


@cache
def template_sandbox() -> jinja2.Environment:
    """An environment that knows the filters, globals and tags that transformers' templates may use."""
    # transformers takes a second to import, and only a gateway renders.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    original = _compile_jinja_template("").environment
    sandbox = _QuickSandbox(
        trim_blocks=original.trim_blocks,
        lstrip_blocks=original.lstrip_blocks,
        extensions=[type(extension) for extension in original.extensions.values()],
    )
    sandbox.filters.update(original.filters)
    sandbox.globals.update(original.globals)
    return sandbox

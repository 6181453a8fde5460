"""What one round of a loop in a template is written from, told from the template's text alone.

    {% set ns = namespace(is_open=false) %}
    {% for message in messages %}
      {%- if message.role == 'user' %}{% set ns.is_open = true %}{% endif -%}
      <{{ message.role }}>{{ message.content }}{% if loop.last and ns.is_open %}<end>{% endif %}
    {%- endfor %}

    reads   message, loop.last, ns.is_open
    sets    ns.is_open

Equal inputs give equal text, for a template keeps no other state: in the sandbox that it runs in,
nothing can be changed but attributes of a namespace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jinja2 import nodes

MESSAGES = "messages"
"""The one variable that differs between the renders of a conversation."""
_ABSENT = "\0absent"
"""The value of an attribute where its variable is not defined."""

_LOOP = "loop"
LOOP_VALUES = frozenset(
    ("index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0")
)
LOOP_ITEMS = frozenset(("previtem", "nextitem"))
"""What a template may read of the variable `loop`: numbers and truth values, and the neighbours."""
_COMBINED = (
    nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Add, nodes.Sub, nodes.Mod,
    nodes.Neg, nodes.Test,
)  # fmt: skip
_UNREADABLE = (
    nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport,
    nodes.EvalContextModifier, nodes.ScopedEvalContextModifier, nodes.ContextReference,
    nodes.DerivedContextReference,
)  # fmt: skip
_OWN_SCOPE = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.FilterBlock)


class UnreadableLoop(Exception):
    """What a round of the loop is written from cannot be told."""


@dataclass(frozen=True, slots=True)
class LoopInputs:
    """What to evaluate before a round, and what the round may set."""

    reads: tuple[nodes.Expr, ...]
    sets: tuple[tuple[str, str], ...]
    """Attributes of namespaces: (namespace, attribute). Each is among `reads` too."""


def loop_inputs(loop: nodes.For, template: nodes.Template) -> LoopInputs:
    """The inputs of a loop that stands in no other loop and no macro. Raises UnreadableLoop."""
    if not isinstance(loop.target, nodes.Name) or loop.recursive:
        raise UnreadableLoop("expected a loop over one name")
    return _Reading(loop, loop.target.name, template).inputs()


def attribute(variable: str, name: str) -> nodes.Getattr:
    """The expression `variable.name`."""
    return nodes.Getattr(nodes.Name(variable, "load"), name, "load")


@dataclass(frozen=True, slots=True)
class _Scope:
    """What names mean at some place within the loop."""

    local: frozenset[str]
    """Names that have been given a value here, whatever they mean elsewhere."""
    is_own_loop: bool
    """Whether `loop` means the loop that is read, not one within it."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The body of the loop, or that of a macro that a round calls."""

    nodes: Sequence[nodes.Node]
    scope: _Scope

    @property
    def bound(self) -> frozenset[str]:
        """Names that are given a value somewhere within."""
        return frozenset(name for node in self.nodes for name in _bound_names(node))


class _Reading:
    """Goes through the body of a loop, and the macros that it calls, once."""

    def __init__(self, loop: nodes.For, target: str, template: nodes.Template) -> None:
        self._target = target
        self._parts = _parts(loop, template)
        self._outer = frozenset(_outer_names(template))
        self._sets = {changed for part in self._parts for changed in self._attributes_set(part)}
        self._bound: frozenset[str] = frozenset()
        """Names that the part that is read gives a value to, before or after the place."""
        self._reads: dict[str, nodes.Expr] = {}

    def inputs(self) -> LoopInputs:
        for namespace, name in sorted(self._sets):
            self._add_attribute(namespace, name)
        for part in self._parts:
            self._bound = part.bound
            for node in part.nodes:
                self._read(node, part.scope)
        message = nodes.Name(self._target, "load")
        return LoopInputs((message, *self._reads.values()), tuple(sorted(self._sets)))

    def _attributes_set(self, part: _Part) -> Iterator[tuple[str, str]]:
        bound = part.bound
        for node in part.nodes:
            for reference, scope in _references(node, part.scope):
                name = reference.name
                if name in scope.local or (name in bound and name not in self._outer):
                    continue
                if name in bound:
                    raise UnreadableLoop(f"`{name}` may be the loop's own or not")
                yield name, reference.attr

    def _add(self, expression: nodes.Expr) -> None:
        """Add what may differ between two rounds or two renders."""
        while isinstance(expression, nodes.Not):  # the value tells that of its opposite
            expression = expression.node
        if any(name in self._outer or name in (MESSAGES, _LOOP) for name in _names(expression)):
            self._reads.setdefault(repr(expression), expression)

    def _add_attribute(self, variable: str, name: str) -> None:
        is_defined = nodes.Test(nodes.Name(variable, "load"), "defined", [], [], None, None)
        self._add(nodes.CondExpr(is_defined, attribute(variable, name), nodes.Const(_ABSENT)))

    def _read(self, node: nodes.Node, scope: _Scope) -> None:
        _refuse_unreadable(node, scope)
        if isinstance(node, nodes.Expr):
            if self._is_settled(node, scope):
                self._add(node)
                return
            if self._read_variable(node, scope):
                return
        for child, inner in _children(node, scope):
            self._read(child, inner)

    def _is_settled(self, node: nodes.Node, scope: _Scope) -> bool:
        """Whether the value is known before the round: `loop.index0 > last`, `messages|length`.

        Of such an expression only the value counts, which is often the same where its parts are
        not.
        """
        match node:
            case nodes.Const():
                return True
            case nodes.Name(name=name):
                return name not in (MESSAGES, _LOOP, self._target) and self._is_outer(name, scope)
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
                return scope.is_own_loop and attr in LOOP_VALUES
            case nodes.Getattr(node=nodes.Name() as variable, attr=attr):
                is_set = any(attr == changed for _, changed in self._sets)
                return not is_set and self._is_settled(variable, scope)
            case nodes.Filter(node=nodes.Name(name=name) as variable, name="length" | "count"):
                is_history = name == MESSAGES and self._is_outer(name, scope)
                return is_history or self._is_settled(variable, scope)
        return isinstance(node, _COMBINED) and all(
            self._is_settled(child, scope) for child in node.iter_child_nodes()
        )

    def _is_outer(self, name: str, scope: _Scope) -> bool:
        return name not in self._bound and name not in scope.local

    def _read_variable(self, node: nodes.Expr, scope: _Scope) -> bool:
        """Add what is read of a variable; False where the parts of the expression must be read."""
        match node:
            case nodes.Name(name=name, ctx=ctx):
                if ctx == "load":
                    self._read_name(name, scope)
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr) if scope.is_own_loop:
                if attr not in LOOP_VALUES | LOOP_ITEMS:
                    raise UnreadableLoop(f"`loop.{attr}` within the loop")
                self._add(node)
            case nodes.Getattr(node=nodes.Name(name=name), attr=attr):
                if name in self._outer and self._is_outer(name, scope) and name != self._target:
                    self._add_attribute(name, attr)
                else:
                    self._read_name(name, scope)
            case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Expr() as arg) if (
                self._is_outer(name, scope) and self._is_settled(arg, scope)
            ):
                self._add(node)
            case nodes.Call(node=nodes.Getattr(node=nodes.Name(name=name))):
                # A method: the variable as a whole counts.
                self._read_name(name, scope)
                for child in node.iter_child_nodes(exclude=("node",)):
                    self._read(child, scope)
            case _:
                return False
        return True

    def _read_name(self, name: str, scope: _Scope) -> None:
        if name in scope.local or name == self._target:
            return
        if name == MESSAGES or (name == _LOOP and scope.is_own_loop):
            raise UnreadableLoop(f"`{name}` as a whole within the loop")
        if name != _LOOP:
            self._add(nodes.Name(name, "load"))


def _refuse_unreadable(node: nodes.Node, scope: _Scope) -> None:
    is_exit = scope.is_own_loop and isinstance(node, nodes.Break | nodes.Continue)
    is_chance = isinstance(node, nodes.Filter) and node.name == "random"
    if is_exit or is_chance or isinstance(node, _UNREADABLE):
        raise UnreadableLoop(f"{type(node).__name__} within the loop")


def _parts(loop: nodes.For, template: nodes.Template) -> list[_Part]:
    """The body of the loop, and the macros that may be called from there, however deep."""
    macros = list(template.find_all(nodes.Macro))
    parts = [_Part(loop.body, _Scope(_local_names(loop.body), is_own_loop=True))]
    known: set[str] = set()
    for part in parts:  # grows meanwhile: macros call macros
        called = {name for node in part.nodes for name in _names(node)} - known
        # Of several macros with one name it depends on the render which is meant.
        for macro in macros:
            if macro.name in called:
                local = _local_names(macro.body) | {parameter.name for parameter in macro.args}
                scope = _Scope(local, is_own_loop=False)
                parts.append(_Part([*macro.defaults, *macro.body], scope))
        known |= called
    return parts


def _children(node: nodes.Node, scope: _Scope) -> Iterator[tuple[nodes.Node, _Scope]]:
    """What the node is made of, and what names mean there."""
    for field, value in node.iter_fields():
        is_inner = isinstance(node, nodes.For) and field in ("body", "test")
        inner = replace(scope, is_own_loop=scope.is_own_loop and not is_inner)
        if isinstance(value, nodes.Node):
            yield value, inner
        elif isinstance(value, list):
            children = [child for child in value if isinstance(child, nodes.Node)]
            inner = replace(inner, local=scope.local | _local_names(children))
            yield from ((child, inner) for child in children)


def _references(node: nodes.Node, scope: _Scope) -> Iterator[tuple[nodes.NSRef, _Scope]]:
    """Attributes of namespaces that are given a value."""
    if isinstance(node, nodes.NSRef):
        yield node, scope
    for child, inner in _children(node, scope):
        yield from _references(child, inner)


def _local_names(body: Sequence[nodes.Node]) -> frozenset[str]:
    """Names that a list of statements always sets before it reads anything of them."""
    local: set[str] = set()
    mentioned: set[str] = set()
    for node in body:
        if isinstance(node, nodes.Assign | nodes.AssignBlock):
            mentioned |= _names(node, but="target")
            if isinstance(node.target, nodes.Name) and node.target.name not in mentioned:
                local.add(node.target.name)
        mentioned |= _names(node)
    return frozenset(local)


def _names(node: nodes.Node, *, but: str = "") -> set[str]:
    """All names within the node, or within all of it but one field."""
    found = {node.name} if isinstance(node, nodes.Name | nodes.NSRef) else set()
    for child in node.iter_child_nodes(exclude=(but,)):
        found |= _names(child)
    return found


def _bound_names(node: nodes.Node) -> Iterator[str]:
    """Names that are given a value within the node; parameters and names of macros too."""
    if isinstance(node, nodes.Name) and node.ctx != "load":
        yield node.name
    if isinstance(node, nodes.Macro):
        yield node.name
    for child in node.iter_child_nodes():
        yield from _bound_names(child)


def _outer_names(node: nodes.Node) -> Iterator[str]:
    """Variables of the template itself, which a loop may find with one value or another."""
    if isinstance(node, nodes.Name) and node.ctx != "load":
        yield node.name
    if isinstance(node, nodes.AssignBlock):
        yield from _outer_names(node.target)
    elif not isinstance(node, _OWN_SCOPE):
        for child in node.iter_child_nodes():
            yield from _outer_names(child)

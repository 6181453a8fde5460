"""Items and tools of OpenAI's responses API in canonical form."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from turnfold.gateway.calls import ItemKind, ItemReference
from turnfold.gateway.parsing.arguments import parse_arguments
from turnfold.gateway.protocols.openai_messages import ROLES, text_of
from turnfold.gateway.protocols.sealed_reasoning import unseal
from turnfold.gateway.refusals import invalid
from turnfold.schemas.messages import ChatMessage, Tool, ToolCall

_CALL, _END = 2, 3
_PLACES = {"reasoning": 0, "message": 1, "function_call": _CALL}
"""Order of the items that an assistant's turn is made of."""

_ITEM_ID = re.compile(r"(?P<kind>rs|msg|fc)_(?P<turn>[0-9a-f]{32})(?:_(?P<number>\d{1,6}))?")
_KINDS: dict[str, ItemKind] = {"rs": "reasoning", "msg": "message", "fc": "function_call"}


class Input(NamedTuple):
    """What the items say, and which parts of it are only named."""

    messages: tuple[ChatMessage, ...]
    references: tuple[ItemReference, ...]


def read_input(given: str | list[dict[str, Any]]) -> Input:
    """Canonical messages; raises Refusal naming the item and field that is not understood.

        message user "a"           user       a
        reasoning "hm"             assistant  b, reasoning hm, one call
        message assistant "b"
        function_call
        function_call_output "c"   tool       c

    What an assistant says in one turn is several items, in the order reasoning, message, calls; an
    item that breaks the order begins the next assistant message, unless its id says that it is of
    the same turn. A reference is an empty part in the place of the item that it names.
    """
    if isinstance(given, str):
        return Input((ChatMessage(role="user", content=given),), ())
    turns: list[list[ChatMessage]] = []
    references: list[ItemReference] = []
    last_place, last_turn = _END, ""
    for i, item in enumerate(given):
        part, place, turn = _part(item, f"input[{i}]"), _place(item), _turn(item)
        is_in_order = place > last_place or place == last_place == _CALL
        if is_in_order or (turn and turn == last_turn and part.role == "assistant"):
            turns[-1].append(part)
        else:
            turns.append([part])
        if _is_reference(item):
            references.append(_reference(item, f"input[{i}]", len(turns) - 1))
        last_place, last_turn = (place, turn) if part.role == "assistant" else (_END, "")
    return Input(tuple(map(_joined, turns)), tuple(references))


def _turn(item: dict[str, Any]) -> str:
    """The turn that the item was sampled in, when its id is one of ours."""
    found = _ITEM_ID.fullmatch(str(item.get("id")))
    return found["turn"] if found else ""


def _is_reference(item: dict[str, Any]) -> bool:
    """OpenAI lets clients leave the type of a reference out."""
    return item.get("type") == "item_reference" or item.keys() - {"type"} == {"id"}


def _reference(item: dict[str, Any], at: str, message: int) -> ItemReference:
    found = _ITEM_ID.fullmatch(str(item.get("id")))
    if found is None:
        raise invalid(f"{at}: Item with id {item.get('id')!r} not found.", at, "item_not_found")
    return ItemReference(
        message=message,
        item_id=found[0],
        kind=_KINDS[found["kind"]],
        turn_id=found["turn"],
        call_number=int(found["number"] or 0),
        at=at,
    )


def _kind(item: dict[str, Any]) -> str:
    """What the item is, or what the item is that it names."""
    if _is_reference(item):
        found = _ITEM_ID.fullmatch(str(item.get("id")))
        return _KINDS[found["kind"]] if found else ""
    return str(item.get("type", "message"))


def _place(item: dict[str, Any]) -> int:
    """Where the item stands in the turn of an assistant; items of others stand before it."""
    is_others = item.get("role", "assistant") != "assistant"
    return -1 if is_others else _PLACES.get(_kind(item), -1)


def _joined(parts: list[ChatMessage]) -> ChatMessage:
    first, *others = parts
    if not others:
        return first
    return ChatMessage(
        role=first.role,
        content="".join(part.content for part in parts),
        reasoning="".join(part.reasoning for part in parts),
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
    )


def _part(item: dict[str, Any], at: str) -> ChatMessage:
    if _is_reference(item):
        return _named(item, at)
    match item.get("type", "message"):
        case "message":
            return _message(item, at)
        case "reasoning":
            return ChatMessage(role="assistant", reasoning=_reasoning(item, at))
        case "function_call":
            return ChatMessage(role="assistant", tool_calls=(_call(item, at),))
        case "function_call_output":
            return ChatMessage(
                role="tool",
                content=text_of(item.get("output"), f"{at}.output"),
                tool_call_id=_field(item, "call_id", at),
            )
        case kind:
            raise invalid(f"{at}.type: an item of type {kind!r} is not supported", f"{at}.type")


def _named(item: dict[str, Any], at: str) -> ChatMessage:
    """An empty part; a call holds its place among the others by its id."""
    reference = _reference(item, at, 0)
    if reference.kind == "function_call":
        place = ToolCall(name="", arguments={}, id=reference.item_id)
        return ChatMessage(role="assistant", tool_calls=(place,))
    return ChatMessage(role="assistant")


def _message(item: dict[str, Any], at: str) -> ChatMessage:
    role = item.get("role")
    if role not in ROLES or role == "tool":
        raise invalid(
            f"{at}.role: expected user, assistant, system or developer, got {role!r}", f"{at}.role"
        )
    return ChatMessage(role=ROLES[role], content=text_of(item.get("content"), f"{at}.content"))


def _reasoning(item: dict[str, Any], at: str) -> str:
    """What the model thought; a summary is what somebody else wrote about it."""
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise invalid(f"{at}.content: expected a list of parts", f"{at}.content")
    texts = [_field(part, "text", f"{at}.content[{i}]") for i, part in enumerate(parts)]
    shown, sealed = "\n".join(texts), item.get("encrypted_content")
    return unseal(sealed, shown) if isinstance(sealed, str) else shown


def _call(item: dict[str, Any], at: str) -> ToolCall:
    return ToolCall(
        name=_field(item, "name", at),
        arguments=parse_arguments(_field(item, "arguments", at)),
        id=_field(item, "call_id", at),
    )


def _field(item: dict[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{at}.{name}: expected text", f"{at}.{name}")
    return value


def read_flat_tools(tools: Iterable[dict[str, Any]]) -> tuple[Tool, ...]:
    """Functions in the nested form of chat completions; `strict` is left out, as nothing holds the
    model to it and most clients set it unasked."""
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def _tool(tool: dict[str, Any], at: str) -> Tool:
    if tool.get("type") != "function":
        raise invalid(
            f"{at}.type: {tool.get('type')!r} is not supported: only `function` is", f"{at}.type"
        )
    if tool.get("defer_loading"):
        raise invalid(
            f"{at}.defer_loading is not supported: there is no tool search", f"{at}.defer_loading"
        )
    function: dict[str, Any] = {"name": _field(tool, "name", at)}
    for name in ("description", "parameters"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def flat_tool(tool: Tool) -> dict[str, Any]:
    """The tool as the responses API shows it."""
    return {"type": "function", "strict": False, "parameters": None, **tool["function"]}

"""OpenAI's messages and tools in canonical form."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from turnfold.gateway.parsing.arguments import parse_arguments
from turnfold.gateway.protocols.request_fields import decode_request
from turnfold.gateway.refusals import invalid
from turnfold.schemas.messages import ChatMessage, Tool, ToolCall

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


_known: WeakValueDictionary[bytes, ChatMessage] = WeakValueDictionary()
"""Messages that somebody still holds, by the digest of their JSON. A conversation sends its past with
each call, so all but the last messages are found here, as the objects that its session knows."""
_decoder = msgspec.json.Decoder(dict[str, Any])


def read_messages(messages: Iterable[msgspec.Raw]) -> tuple[ChatMessage, ...]:
    """Canonical messages; raises Refusal naming the message and field that is not understood.

    `developer` becomes `system`, null content the empty string, text parts are joined by newlines,
    arguments become objects, and `reasoning_content` or `reasoning` is kept as reasoning.
    """
    found = tuple(_known_or_read(raw, i) for i, raw in enumerate(messages))
    if not found:
        raise invalid("messages: expected at least one message", "messages")
    return found


def _known_or_read(raw: msgspec.Raw, index: int) -> ChatMessage:
    key = hashlib.sha256(raw).digest()
    message = _known.get(key)
    if message is None:
        at = f"messages[{index}]"
        message = _known[key] = _message(decode_request(raw, _decoder, at), at)
    return message


def _message(message: dict[str, Any], at: str) -> ChatMessage:
    role = message.get("role")
    if role not in ROLES:
        hint = ": use `tool`" if role == "function" else f": expected one of {', '.join(ROLES)}"
        raise invalid(f"{at}.role: {role!r} is not supported{hint}", f"{at}.role")
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise invalid(f"{at}.{name} is not supported", f"{at}.{name}")
    content = text_of(message.get("content"), f"{at}.content")
    return ChatMessage(
        role=ROLES[role],
        content=content or _optional_text(message, "refusal", at),
        reasoning=_optional_text(message, "reasoning_content", at)
        or _optional_text(message, "reasoning", at),
        tool_calls=_tool_calls(message.get("tool_calls") or [], f"{at}.tool_calls"),
        tool_call_id=_optional_text(message, "tool_call_id", at),
        name=_optional_text(message, "name", at),
    )


def text_of(content: Any, at: str) -> str:
    """Text, or the text of parts joined by newlines; raises Refusal for a part that is no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{at}: expected text or a list of parts", at)
    return "\n".join(_part(part, f"{at}[{i}]") for i, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text", "refusal") and isinstance(text, str):
        return text
    raise invalid(f"{at}: a part of type {kind!r} is not supported: only text is", at)


def _optional_text(message: dict[str, Any], name: str, at: str) -> str:
    value = message.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise invalid(f"{at}.{name}: expected text", f"{at}.{name}")
    return value


def _tool_calls(calls: Any, at: str) -> tuple[ToolCall, ...]:
    if not isinstance(calls, list):
        raise invalid(f"{at}: expected a list", at)
    return tuple(_tool_call(call, f"{at}[{i}]") for i, call in enumerate(calls))


def _tool_call(call: Any, at: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{at}: expected a call of type function with a name", at)
    call_id = call.get("id")
    return ToolCall(
        name=function["name"],
        arguments=_arguments(function.get("arguments"), f"{at}.function.arguments"),
        id=call_id if isinstance(call_id, str) else "",
    )


def _arguments(arguments: Any, at: str) -> dict[str, Any] | str:
    if arguments is None or isinstance(arguments, str):
        return parse_arguments(arguments or "")
    if isinstance(arguments, dict):  # not OpenAI's form, but what it means is plain
        return arguments
    raise invalid(f"{at}: expected text that holds JSON", at)


def read_tools(tools: Iterable[dict[str, Any]]) -> tuple[Tool, ...]:
    """Tools as OpenAI writes them; the flat form of the responses API is nested."""
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def _tool(tool: dict[str, Any], at: str) -> Tool:
    # Some clients leave the type out, as there is no other.
    kind = tool.get("type", "function" if "function" in tool else None)
    if kind != "function":
        raise invalid(f"{at}.type: {kind!r} is not supported: only `function` is", f"{at}.type")
    function = tool.get("function")
    if function is None:
        function = {name: value for name, value in tool.items() if name != "type"}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{at}.function: expected an object with a name", f"{at}.function")
    return {"type": "function", "function": function}

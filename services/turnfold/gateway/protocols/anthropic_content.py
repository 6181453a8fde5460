"""Anthropic's system text, messages and tools in canonical form."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from turnfold.gateway.protocols.sealed_reasoning import unseal
from turnfold.gateway.refusals import Refusal, invalid
from turnfold.schemas.messages import ChatMessage, Tool, ToolCall

_JOINED = {"user": "\n", "assistant": ""}
"""Roles whose neighbours are one message, and what stands between their texts."""


def read_conversation(system: Any, messages: Iterable[dict[str, Any]]) -> tuple[ChatMessage, ...]:
    """Canonical messages; raises Refusal naming the message and block that is not understood.

        system "s"                                     system     s
        user       text "a", text "b"                  user       a\\nb
        assistant  thinking "hm", text "c", tool_use   assistant  c, reasoning hm, one call
        user       tool_result "d", text "e"           tool       d
                                                       user       e

    Neighbours of one role are one message, as in Anthropic's API: clients split and join them at
    will. Cache markers, citations and signatures of others are left out.
    """
    parts = [
        part for i, message in enumerate(messages) for part in _parts(message, f"messages[{i}]")
    ]
    found = [*_system(system)]
    for role, group in itertools.groupby(parts, key=lambda part: part.role):
        neighbours = list(group)
        found += [_joined(role, neighbours)] if role in _JOINED else neighbours
    if not parts:
        raise invalid("messages: expected at least one message", "messages")
    return tuple(found)


def _system(system: Any) -> list[ChatMessage]:
    text = _text(system, "system")
    return [ChatMessage(role="system", content=text)] if text else []


def _joined(role: str, parts: list[ChatMessage]) -> ChatMessage:
    """Parts of the user are paragraphs; those of the assistant are one text in pieces."""
    return ChatMessage(
        role=role,
        content=_JOINED[role].join(part.content for part in parts),
        reasoning=_joined_reasoning(part.reasoning for part in parts if part.reasoning),
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
    )


def _joined_reasoning(texts: Iterable[str]) -> str:
    """Thoughts as paragraphs; one that begins with a line break brings what parts it."""
    joined = ""
    for text in texts:
        is_parted = not joined or text.startswith("\n")
        joined += text if is_parted else f"\n\n{text}"
    return joined


def _parts(message: dict[str, Any], at: str) -> Iterator[ChatMessage]:
    """A message for each block."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{at}.role: expected user, assistant or system, got {role!r}", f"{at}.role")
    if role == "system":  # instructions that come in the middle of a conversation
        yield ChatMessage(role="system", content=_text(content, f"{at}.content"))
    elif role == "assistant" and not content:  # said nothing: null, "" or no blocks
        yield ChatMessage(role=role)
    elif isinstance(content, str):
        yield ChatMessage(role=role, content=content)
    elif isinstance(content, list):
        read = _assistant_block if role == "assistant" else _user_block
        for i, block in enumerate(content):
            yield read(_block(block, f"{at}.content[{i}]"), f"{at}.content[{i}]")
    else:
        raise invalid(f"{at}.content: expected text or a list of blocks", f"{at}.content")


def _user_block(block: dict[str, Any], at: str) -> ChatMessage:
    match block.get("type"):
        case "text":
            return ChatMessage(role="user", content=_field(block, "text", at))
        case "tool_result":
            return ChatMessage(
                role="tool",
                content=_tool_result(block, at),
                tool_call_id=_field(block, "tool_use_id", at),
            )
        case kind:
            raise _unsupported(kind, at)


def _tool_result(block: dict[str, Any], at: str) -> str:
    """The result as text; a failed one says so, for there is no other place for it."""
    text = _text(block.get("content"), f"{at}.content")
    if block.get("is_error") and not text.lstrip().lower().startswith("error"):
        return f"Error: {text}" if text else "Error"
    return text


def _assistant_block(block: dict[str, Any], at: str) -> ChatMessage:
    match block.get("type"):
        case "text":
            return ChatMessage(role="assistant", content=_field(block, "text", at))
        case "thinking":
            signature = block.get("signature")
            shown = _field(block, "thinking", at)
            text = unseal(signature, shown) if isinstance(signature, str) else shown
            return ChatMessage(role="assistant", reasoning=text)
        case "redacted_thinking":  # of another model; nobody but its maker can read it
            return ChatMessage(role="assistant")
        case "tool_use":
            return ChatMessage(role="assistant", tool_calls=(_tool_use(block, at),))
        case kind:
            raise _unsupported(kind, at)


def _tool_use(block: dict[str, Any], at: str) -> ToolCall:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise invalid(f"{at}.input: expected an object", f"{at}.input")
    return ToolCall(name=_field(block, "name", at), arguments=arguments, id=_field(block, "id", at))


def _text(content: Any, at: str) -> str:
    """Text, or the text of blocks that are nothing else, joined by newlines."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{at}: expected text or a list of blocks", at)
    return "\n".join(_text_block(block, f"{at}[{i}]") for i, block in enumerate(content))


def _text_block(block: Any, at: str) -> str:
    block = _block(block, at)
    if block.get("type") != "text":
        raise _unsupported(block.get("type"), at)
    return _field(block, "text", at)


def _block(block: Any, at: str) -> dict[str, Any]:
    if not isinstance(block, dict):
        raise invalid(f"{at}: expected a block", at)
    return block


def _field(block: dict[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{at}.{name}: expected text", f"{at}.{name}")
    return value


def _unsupported(kind: Any, at: str) -> Refusal:
    return invalid(f"{at}: a block of type {kind!r} is not supported here", at)


_TOOL_EXTRAS = {
    "defer_loading": "there is no tool search",
    "input_examples": "describe the input in the schema",
}


def read_tools(tools: Iterable[dict[str, Any]]) -> tuple[Tool, ...]:
    """Tools in OpenAI's form; raises Refusal for those that Anthropic's servers would run."""
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))


def _tool(tool: dict[str, Any], at: str) -> Tool:
    if tool.get("type") not in (None, "custom"):
        raise invalid(
            f"{at}.type: {tool['type']!r} is not supported: only tools with an input_schema are",
            f"{at}.type",
        )
    for name, why in _TOOL_EXTRAS.items():
        if tool.get(name):
            raise invalid(f"{at}.{name} is not supported: {why}", f"{at}.{name}")
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{at}.input_schema: expected an object", f"{at}.input_schema")
    function = {"name": _field(tool, "name", at)}
    if tool.get("description") is not None:
        function["description"] = _field(tool, "description", at)
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}

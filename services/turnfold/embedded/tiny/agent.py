"""The agent of the toy task, written with the plain `openai` SDK as anybody would write it.

Nothing here knows that it is being trained: it has a base URL and a key, and returns its reward.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageToolCallUnion

from turnfold.embedded.tiny import task as door_task

MAX_TURNS = 3


class Rollout(Protocol):
    """What the agent needs of `turnfold.agents.Rollout`."""

    base_url: str
    api_key: str


async def run(task: Mapping[str, Any], rollout: Rollout, http_client: Any = None) -> float:
    """Ask, call the tool when told to, answer; returns the reward."""
    tools: Any = door_task.TOOLS
    messages: list[Any] = [{"role": "user", "content": door_task.question(task)}]
    door: object | None = None
    answer: str | None = None
    async with AsyncOpenAI(
        base_url=rollout.base_url, api_key=rollout.api_key, max_retries=8, http_client=http_client
    ) as client:
        for _ in range(MAX_TURNS):
            completion = await client.chat.completions.create(
                model="policy", messages=messages, tools=tools, max_tokens=48
            )
            message = completion.choices[0].message
            messages.append(_echoed(message))
            if not message.tool_calls:
                answer = message.content
                break
            for call in message.tool_calls:
                door = _door(call)
                content = door_task.lookup(task, door)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return door_task.reward(task, door=door, answer=answer)


def _echoed(message: ChatCompletionMessage) -> dict[str, Any]:
    """The assistant's message as agents send it back: parsed and written again.

    Many agent frameworks keep arguments as objects and write them anew, so keys and spaces are no
    longer the model's. This is what breaks a token prefix, and what the gateway heals.
    """
    echoed: dict[str, Any] = {"role": "assistant", "content": (message.content or "").strip()}
    if message.tool_calls:
        calls = [call.model_dump(exclude_none=True) for call in message.tool_calls]
        for call in calls:
            call["function"]["arguments"] = json.dumps(_arguments(call["function"]["arguments"]))
        echoed["tool_calls"] = calls
    return echoed


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _door(call: ChatCompletionMessageToolCallUnion) -> object:
    """The door that was asked for; "" when the call names none."""
    arguments = _arguments(call.function.arguments) if call.type == "function" else None
    return arguments.get("door", "") if isinstance(arguments, dict) else ""

"""A whole agent, written with the plain `openai` SDK: open a door by asking for its code.

    user       open door 3
    assistant  lookup(door="3")
    tool       code 5
    assistant  the code is 5

Run it for every task that the dispatcher hands out:

    turnfold worker --agent examples/door_agent.py:run

`task` is a row of the data set, here {"door": 3, "code": 5}. `rollout` brings the base URL and the
key; nothing else tells the agent that it is being trained. What it returns is the reward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

MAX_TURNS = 3

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "parameters": {
                "type": "object",
                "properties": {"door": {"type": "string"}},
                "required": ["door"],
            },
        },
    }
]


async def run(task: Mapping[str, Any], rollout: Any) -> float:
    """Talk to the model until it answers, and score the answer."""
    messages: list[Any] = [{"role": "user", "content": f"open door {task['door']}"}]
    asked_for: str | None = None
    # Retries of the SDK carry the agent over a restart of the gateway or of the engine.
    async with AsyncOpenAI(
        base_url=rollout.base_url, api_key=rollout.api_key, max_retries=8
    ) as client:
        for _ in range(MAX_TURNS):
            completion = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS, max_tokens=48
            )
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return score(task, asked_for, message.content or "")
            for call in message.tool_calls:
                asked_for = requested_door(call)
                content = lookup(task, asked_for)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return score(task, asked_for, "")


def lookup(task: Mapping[str, Any], door: str) -> str:
    """The tool: the code, if it is asked for the right door."""
    return f"code {task['code']}" if door == str(task["door"]) else "no such door"


def requested_door(call: Any) -> str:
    """The door that a tool call names; empty when its arguments make no sense."""
    try:
        return str(json.loads(call.function.arguments)["door"])
    except (ValueError, TypeError, KeyError):
        return ""


def score(task: Mapping[str, Any], asked_for: str | None, answer: str) -> float:
    """0.1 for any call, 0.5 for the right door, 1.0 when the answer names the code as well."""
    if asked_for is None:
        return 0.0
    if asked_for != str(task["door"]):
        return 0.1
    return 1.0 if re.findall(r"\d+", answer) == [str(task["code"])] else 0.5

"""The toy task: look up the code of a door with a tool, then say it.

    user       open door 3
    assistant  <tool_call> {"name": "lookup", "arguments": {"door": "3"}} </tool_call>
    tool       code 5                     (or `no such door`, when another door was asked for)
    assistant  the code is 5

Both answers of the assistant are a copy of something in its context: which door to ask for, and
which code to repeat. That is little enough for a model of a hundred thousand weights, and it needs
two turns and a tool.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

NUM_DOORS = 8
NUM_CODES = 8
TOOL_NAME = "lookup"
NO_SUCH_DOOR = "no such door"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "parameters": {
                "type": "object",
                "properties": {"door": {"type": "string"}},
                "required": ["door"],
            },
        },
    }
]
"""The `tools` of a chat completion request. Short on purpose: it is in every prompt."""

REWARD_VALID_CALL = 0.1
REWARD_RIGHT_DOOR = 0.4
REWARD_RIGHT_ANSWER = 0.5


def tasks(num_tasks: int, seed: int = 0) -> list[dict[str, int]]:
    """`num_tasks` payloads such as `{"door": 3, "code": 5}`, the same ones for the same seed.

    Every run of `NUM_DOORS` tasks asks for each door once and uses each code once, in an order that
    the seed decides: batches then hold no accidental majority that a policy could profit from.
    """
    payloads: list[dict[str, int]] = []
    for first in range(0, num_tasks, NUM_DOORS):
        doors = _shuffled(NUM_DOORS, f"{seed}/doors/{first}")
        codes = _shuffled(NUM_CODES, f"{seed}/codes/{first}")
        payloads += [{"door": door, "code": codes[i % NUM_CODES]} for i, door in enumerate(doors)]
    return payloads[:num_tasks]


def question(payload: Mapping[str, Any]) -> str:
    """What the user asks: `open door 3`."""
    return f"open door {payload['door']}"


def lookup(payload: Mapping[str, Any], door: object) -> str:
    """What the tool answers when it is called with `door`: `code 5`, or `no such door`."""
    return f"code {payload['code']}" if _is_door(payload, door) else NO_SUCH_DOOR


def reward(payload: Mapping[str, Any], *, door: object | None, answer: str | None) -> float:
    """The reward of one rollout, 0 to 1.

    `door` is the argument of the assistant's call of `lookup`, None when it made no valid call.
    `answer` is the text of its last message, None when there was none. Credit is partial, so that a
    group of attempts differs early: 0.1 for a valid call, 0.4 more for the right door, 0.5 more for
    an answer that names the code and no other number. The code cannot be known without the right
    door, so a lucky guess earns nothing.
    """
    if door is None:
        return 0.0
    if not _is_door(payload, door):
        return REWARD_VALID_CALL
    if re.findall(r"\d+", answer or "") != [str(payload["code"])]:
        return REWARD_VALID_CALL + REWARD_RIGHT_DOOR
    return REWARD_VALID_CALL + REWARD_RIGHT_DOOR + REWARD_RIGHT_ANSWER


def _is_door(payload: Mapping[str, Any], door: object) -> bool:
    """True for "3" and for 3: a model that writes the number unquoted has understood."""
    return str(door).strip() == str(payload["door"])


def _shuffled(count: int, key: str) -> list[int]:
    """0..count-1 in an order that depends on the key alone."""

    def rank(number: int) -> bytes:
        return hashlib.sha256(f"{key}/{number}".encode()).digest()

    return sorted(range(count), key=rank)

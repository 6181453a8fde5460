"""An agent of a few turns that insists on an answer, and notes each one it got.

An answer that arrived is an acknowledged turn, and a reward that was taken an acknowledged reward:
whatever happens afterwards, it must be in the log.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

NUM_TURNS = 3
RECORD_FILE = "TURNFOLD_CHAOS_RECORD"
"""Environment variable with the path of a file that gets a line for each acknowledgement:
`turn <rollout_id> <turn_id>` or `reward <rollout_id> <reward>`."""

_PATIENCE_S = 60.0


async def run(task: Mapping[str, Any], rollout: Any) -> None:
    """Asks about a door and goes on asking; every other rollout of a group is rewarded."""
    record = Path(os.environ[RECORD_FILE])
    messages = [{"role": "user", "content": f"open door {task['door']}"}]
    async with httpx.AsyncClient(timeout=30.0) as client:
        for number in range(NUM_TURNS):
            answer = await _answer(client, rollout, messages, f"{rollout.rollout_id}-{number}")
            turn_id = answer["id"].removeprefix("chatcmpl-")
            _append(record, f"turn {rollout.rollout_id} {turn_id}\n")
            content = answer["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": content})
            messages.append({"role": "user", "content": f"and {number} more"})
    reward = reward_of(rollout.rollout_id)
    await rollout.finish(reward)
    _append(record, f"reward {rollout.rollout_id} {reward}\n")


def reward_of(rollout_id: str) -> float:
    """A function of the rollout's place in its group, which its id ends in."""
    return float(int(rollout_id[-2:]) % 2)


async def _answer(
    client: httpx.AsyncClient, rollout: Any, messages: list[dict[str, str]], key: str
) -> dict[str, Any]:
    """The reply to a request, which is repeated as it is while nobody can answer it."""
    give_up_at = time.monotonic() + _PATIENCE_S
    while True:
        try:
            response = await client.post(
                f"{rollout.base_url}/chat/completions",
                json={"model": "policy", "messages": messages, "max_tokens": 48},
                headers={"authorization": f"Bearer {rollout.api_key}", "idempotency-key": key},
            )
            if response.status_code == 200:
                answer: dict[str, Any] = response.json()
                return answer
            if response.status_code < 500 and response.status_code != 429:
                raise RuntimeError(f"{response.status_code}: {response.text[:200]}")
        except httpx.TransportError:
            pass  # the gateway was killed under this request, or the network cut
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"no answer to {key} within {_PATIENCE_S:.0f} s")
        await asyncio.sleep(0.1)


def _append(record: Path, line: str) -> None:
    with record.open("a") as file:
        file.write(line)

"""An agent whose rollouts take heavy-tailed times, and of which some hang, crash or kill the worker.

What a rollout does is in its task, so that each kind comes about: {"does": "hangs", …}.
"""

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

from turnfold.agents import EnvironmentFailed

MEDIAN_S = 0.05
LONGEST_S = 50 * MEDIAN_S


async def run(task: Any, rollout: Any) -> float:
    """Two model calls with a wait in between; every other rollout of a group is rewarded."""
    index = int(rollout.rollout_id[-2:])
    messages = [{"role": "user", "content": f"open door {task['door']}"}]
    async with rollout.http() as client:
        await ask(client, messages)
        if index == 1:
            await misbehave(task["does"])
        await asyncio.sleep(heavy_tailed(rollout.rollout_id))
        await ask(client, messages)
    return float(index % 2)


async def ask(client: Any, messages: list[dict[str, str]]) -> None:
    """One turn, sent again while the gateway cannot answer it."""
    while True:
        response = await client.post("chat/completions", json={"messages": messages, "model": "m"})
        if response.status_code < 500:
            break
        await asyncio.sleep(0.1)
    response.raise_for_status()
    messages.append(response.json()["choices"][0]["message"])
    messages.append({"role": "user", "content": "and then?"})


def heavy_tailed(rollout_id: str) -> float:
    """Seconds, Pareto distributed: half of them below twice the median, some fifty times as long."""
    return min(LONGEST_S, MEDIAN_S * random.Random(rollout_id).paretovariate(1.0))


async def misbehave(how: str) -> None:
    """What one rollout of a group does instead of going on."""
    match how:
        case "hangs":
            await asyncio.Event().wait()
        case "crashes":
            raise ZeroDivisionError("a bug of the agent")
        case "loses-its-world":
            raise EnvironmentFailed("the sandbox died")
        case "kills-its-worker" if is_first_time():
            os.kill(os.getpid(), signal.SIGKILL)


def is_first_time() -> bool:
    """True once in a run, whatever is killed."""
    try:
        Path(os.environ["KILLED_FILE"]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

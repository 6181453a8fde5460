"""The demo's agent, noting every answer it got: an answer that arrived is an acknowledged turn."""

import os
from pathlib import Path
from typing import Any

import openai

from turnfold.embedded.tiny.agent import run as run_door_agent


async def run(task: Any, rollout: Any) -> float:
    """As the demo's agent; appends `rollout_id turn_id` to $RECORD_FILE for each answer."""
    record = Path(os.environ["RECORD_FILE"])

    async def note(response: Any) -> None:
        await response.aread()
        if response.status_code == 200 and response.request.url.path.endswith("/completions"):
            turn_id = response.json()["id"].removeprefix("chatcmpl-")
            append(record, f"{rollout.rollout_id} {turn_id}")

    http_client = openai.DefaultAsyncHttpxClient(event_hooks={"response": [note]})
    async with http_client:
        return await run_door_agent(task, rollout, http_client=http_client)


def append(record: Path, line: str) -> None:
    with record.open("a") as file:
        file.write(line + "\n")

"""Two agents in one rollout: an author, and a critic with a conversation of its own.

    turnfold worker --agent examples/two_agents.py:run

The critic gets a session: another key for the same rollout. Its turns are rows of the same
trajectory, they share the one reward, and neither conversation is mistaken for an edit of the other.
Any process can open one: POST $OPENAI_BASE_URL/rollouts/current/sessions with the rollout's key.

The task is a row of examples/sums.jsonl: {"question": "What is 12 * 7?", "answer": 84}.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

MAX_ROUNDS = 2
CRITIC = "Somebody was asked: {question}\nThe answer was: {answer}\nSay `right`, or what is wrong."


async def run(task: Mapping[str, Any], rollout: Any) -> float:
    """Draft, have it criticised, and improve; only the last answer is scored."""
    session = await rollout.session("critic")
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    async with client_of(rollout) as author, client_of(session) as critic:
        answer = await reply(author, messages)
        for _ in range(MAX_ROUNDS):
            prompt = CRITIC.format(question=task["question"], answer=answer)
            remark = await reply(critic, [{"role": "user", "content": prompt}])
            if remark.strip().lower().startswith("right"):
                break
            messages.append({"role": "user", "content": remark or "Try again."})
            answer = await reply(author, messages)
    numbers = re.findall(r"-?\d+(?:\.\d+)?", answer)
    return float(bool(numbers) and float(numbers[-1]) == float(task["answer"]))


def client_of(access: Any) -> AsyncOpenAI:
    """The same for a rollout and for a session."""
    return AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=8)


async def reply(client: Any, messages: list[Any]) -> str:
    """One turn; the model's message is added to the conversation."""
    completion = await client.chat.completions.create(
        model="policy", messages=messages, max_tokens=256
    )
    message = completion.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    return message.content or ""

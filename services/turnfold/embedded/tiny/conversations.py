"""Example conversations of the toy task for the warm-up, as token ids with a mask."""

import json
from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from turnfold.embedded.tiny import task
from turnfold.embedded.tiny.tokenizer import render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Example(NamedTuple):
    """A whole conversation. `is_answer[i]` says whether token i was written by the assistant."""

    token_ids: list[int]
    is_answer: list[bool]


def examples(
    tokenizer: "PreTrainedTokenizerFast", random: Random, right_share: float, odd_call_share: float
) -> Iterator[Example]:
    """Endless conversations. Each answer is right with `right_share`, else a random number."""
    while True:
        payload = {
            "door": random.randrange(task.NUM_DOORS),
            "code": random.randrange(task.NUM_CODES),
        }
        is_right_door, is_right_code = (random.random() < right_share for _ in range(2))
        door = payload["door"] if is_right_door else random.randrange(task.NUM_DOORS)
        code = payload["code"] if is_right_code else random.randrange(task.NUM_CODES)
        is_odd = random.random() < odd_call_share
        spelling = random.choice((_without_spaces, _keys_reversed)) if is_odd else json.dumps
        messages = conversation(payload, spelling(_call(door)), door, code)
        yield encode(tokenizer, messages)


def right_examples(tokenizer: "PreTrainedTokenizerFast") -> list[Example]:
    """One perfect conversation for each door, to measure by. The codes differ from the doors."""
    rights = []
    for door in range(task.NUM_DOORS):
        payload = {"door": door, "code": (3 * door + 1) % task.NUM_CODES}
        call = json.dumps(_call(door))
        rights.append(encode(tokenizer, conversation(payload, call, door, payload["code"])))
    return rights


def conversation(
    payload: dict[str, int], call_json: str, door: int, code: int
) -> list[dict[str, Any]]:
    """Messages in which the assistant asks for `door` and then names `code`, right or wrong."""
    return [
        {"role": "user", "content": task.question(payload)},
        {"role": "assistant", "content": f"<tool_call>\n{call_json}\n</tool_call>"},
        {"role": "tool", "content": task.lookup(payload, door)},
        {"role": "assistant", "content": f"the code is {code}"},
    ]


def encode(tokenizer: "PreTrainedTokenizerFast", messages: list[dict[str, Any]]) -> Example:
    """Token ids as a rollout makes them: prompt, answer, what comes between, answer."""
    token_ids: list[int] = []
    is_answer: list[bool] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:i], add_generation_prompt=True)
        assert prompt[: len(token_ids)] == token_ids, "the chat template rewrote an earlier answer"
        answer = tokenizer.encode(message["content"], add_special_tokens=False)
        answer.append(tokenizer.eos_token_id)
        is_answer += [False] * (len(prompt) - len(token_ids)) + [True] * len(answer)
        token_ids = prompt + answer
    return Example(token_ids, is_answer)


def _call(door: int) -> dict[str, Any]:
    return {"name": task.TOOL_NAME, "arguments": {"door": str(door)}}


def _without_spaces(call: dict[str, Any]) -> str:
    return json.dumps(call, separators=(",", ":"))


def _keys_reversed(call: dict[str, Any]) -> str:
    return json.dumps(dict(reversed(call.items())))

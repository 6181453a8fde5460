"""Real token ids recorded from Qwen runs; skipped where the recordings are not beside the checkout."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from turnfold.history.heal import plan_prompt
from turnfold.history.render import TemplateRenderer
from turnfold.history.session import Session
from turnfold.schemas.events import TurnCompleted
from turnfold.schemas.messages import ChatMessage, ToolCall
from turnfold.schemas.wire import Logprobs, TokenIds

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
TOKENS = SHARED / "tokens"

pytestmark = pytest.mark.skipif(not TOKENS.is_dir(), reason="no recordings beside this checkout")


@cache
def qwen3() -> TemplateRenderer:
    folder = SHARED / "tokenizers" / "qwen3"
    return TemplateRenderer(
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        (folder / "chat_template.jinja").read_text(encoding="utf-8"),
    )


class Transcript:
    """A renderer whose template is the identity: messages hold the marked-up text itself."""

    def __init__(self, model: TemplateRenderer) -> None:
        self.encode, self.decode, self.special_ids = model.encode, model.decode, model.special_ids
        self.boundaries = model.boundaries

    def render(
        self, messages: Any, tools: Any, add_generation_prompt: bool, memo: Any = None
    ) -> str:
        return "".join(message.content for message in messages)


def first_turn(prompt: list[int], output: list[int], **fields: Any) -> TurnCompleted:
    return TurnCompleted(
        rollout_id="r1",
        event_id="e0",
        session_id="s1",
        turn_id="t0",
        prompt_tail=TokenIds.of(prompt),
        output_ids=TokenIds.of(output),
        logprobs=Logprobs.of([-0.1] * len(output)),
        num_prompt_tokens=len(prompt),
        **fields,
    )


def test_history_of_7819_sampled_tokens_is_continued_without_a_change() -> None:
    """The re-encoded history has the same text and five drifts, as [' Skin', 'ny'] → [' Skinny']."""
    recorded = json.loads((TOKENS / "maybe_correct_merged_tokens_test_data.json").read_text())
    seen, rendered = recorded["seen_token_ids"], recorded["output_prompt_token_ids"]
    renderer = Transcript(qwen3())
    text, whole = (renderer.decode(np.array(ids, np.uint32)) for ids in (seen, rendered))
    assert renderer.encode(whole).tolist() == rendered
    assert whole.startswith(text)

    # What the last turn sampled is everything after the last generation opening.
    start = len(seen) - seen[::-1].index(151644) + 2
    asked, answered = (
        renderer.decode(np.array(i, np.uint32)) for i in (seen[:start], seen[start:])
    )
    session = Session("s1")
    question = ChatMessage(role="user", content=asked)
    reply = ChatMessage(role="assistant", content=answered)
    session.apply(first_turn(seen[:start], seen[start:], new_messages=(question,), reply=reply))
    result = ChatMessage(role="tool", content=whole[len(text) :])
    plan = plan_prompt(session, renderer, [question, reply, result])

    assert plan.prompt_ids.tolist() == recorded["expected_output"]
    assert plan.prompt_ids.tolist()[: len(seen)] == seen
    assert renderer.decode(plan.prompt_ids) == whole


def qwen_messages(text: str) -> list[ChatMessage]:
    """The messages of a Qwen prompt, read back from its text."""
    messages = []
    for part in text.split("<|im_start|>")[1:-1]:
        role, content = part.removesuffix("<|im_end|>\n").split("\n", 1)
        if content.startswith("<tool_response>"):
            answers = content.removesuffix("\n</tool_response>").split("\n</tool_response>\n")
            messages += [
                ChatMessage(role="tool", content=answer.removeprefix("<tool_response>\n"))
                for answer in answers
            ]
        else:
            messages.append(qwen_reply(content) if role == "assistant" else _message(role, content))
    return messages


def qwen_reply(text: str) -> ChatMessage:
    reasoning, _, rest = text.removeprefix("<think>\n").rpartition("\n</think>\n\n")
    content, *calls = rest.removesuffix("<|im_end|>").split("<tool_call>\n")
    parsed = [json.loads(call.split("\n</tool_call>")[0]) for call in calls]
    return ChatMessage(
        role="assistant",
        content=content,
        reasoning=reasoning,
        tool_calls=tuple(ToolCall(name=c["name"], arguments=c["arguments"]) for c in parsed),
    )


def _message(role: str, content: str) -> ChatMessage:
    return ChatMessage(role=role, content=content)


def recorded_turns() -> list[dict[str, Any]]:
    recorded = json.loads((TOKENS / "gym_round_trip_test_data.json").read_text())
    found: list[dict[str, Any]] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            if value.get("prompt_token_ids") and value.get("generation_token_ids"):
                found.append(value)
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(recorded["expected_output_return_token_id_information"])
    return found


def test_recorded_tool_turn_is_continued_where_the_recording_drifted() -> None:
    """Qwen3-0.6B: the second prompt of the recording does not extend the first and its output."""
    renderer = qwen3()
    first, second = recorded_turns()[:2]
    prompt, output = first["prompt_token_ids"], first["generation_token_ids"]
    session = Session("s1")
    asked = qwen_messages(renderer.decode(np.array(prompt, np.uint32)))
    reply = qwen_reply(renderer.decode(np.array(output, np.uint32)))
    assert reply.tool_calls
    session.apply(first_turn(prompt, output, new_messages=tuple(asked), reply=reply))

    drifted = session.sequences.longest_prefix(np.array(second["prompt_token_ids"], np.uint32))
    assert drifted is not None
    assert drifted.shared_len < session.sequences.length("t0")

    answers = qwen_messages(renderer.decode(np.array(second["prompt_token_ids"], np.uint32)))
    results = [message for message in answers if message.role == "tool"]
    assert results
    plan = plan_prompt(session, renderer, [*asked, reply, *results])
    saved = session.sequences.full("t0").tolist()
    assert plan.prompt_ids.tolist()[: len(saved)] == saved
    # The recording shows the thinking in another form; the template itself continues it exactly.
    assert (plan.parent_turn_id, plan.continuity) == ("t0", "extended")
    text = renderer.decode(plan.prompt_ids)
    assert text.count("<|im_end|>") == text.count("<|im_start|>") - 1
    assert text.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")

"""Requests of clients that compact, edit, branch, retry or re-serialise real conversations.

Skipped where the recordings are not beside the checkout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from turnfold.gateway.protocols.openai_messages import read_messages
from turnfold.history.render import TemplateRenderer
from turnfold.history.testing import ScriptedModel
from turnfold.schemas.messages import ChatMessage

TRACES = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
SEQUENCES = TRACES / "derived_request_sequences.jsonl"

pytestmark = pytest.mark.skipif(not SEQUENCES.is_file(), reason="no recordings beside the checkout")

COSMETIC = {
    "ws-trimmed": "whitespace",
    "reasoning-dropped": "reasoning_dropped",
    "args-reordered": "tool_arguments_reordered",
}


def sequences(*kinds: str) -> list[dict[str, Any]]:
    if not SEQUENCES.is_file():
        return []
    found = map(json.loads, SEQUENCES.read_text(encoding="utf-8").splitlines())
    return [sequence for sequence in found if sequence["kind"] in kinds]


def raw(messages: Sequence[dict[str, Any]]) -> list[msgspec.Raw]:
    """The messages as they stand in a request."""
    return [msgspec.Raw(msgspec.json.encode(message)) for message in messages]


def originals() -> dict[str, list[ChatMessage]]:
    """The conversations that the sequences were made of, by id."""
    found = {}
    for path in TRACES.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            trace = json.loads(line)
            if "messages" in trace:
                found[trace["id"]] = list(read_messages(raw(trace["messages"])))
    return found


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[ChatMessage]]:
    return originals()


def play(converse: Any, renderer: TemplateRenderer, sequence: Any, original: Any = None) -> Any:
    """Answer every request with what the next ones, or the original, hold as its reply."""
    chat, model = converse(renderer), ScriptedModel(renderer)
    requests = [list(read_messages(raw(request))) for request in sequence["requests"]]
    for number, request in enumerate(requests):
        reply = reply_to(request, [original] if original else requests[number + 1 :])
        chat.turn(request, model.sample(reply, sequence["tools"]), reply, sequence["tools"])
    return chat


def reply_to(request: list[ChatMessage], later: Sequence[list[ChatMessage]]) -> ChatMessage:
    for messages in later:
        is_continued = len(messages) > len(request) and messages[0] == request[0]
        if is_continued and messages[len(request)].role == "assistant":
            return messages[len(request)]
    return ChatMessage(role="assistant", content="Done.")


def ids(sequence: dict[str, Any]) -> str:
    return str(sequence["id"])


@pytest.mark.parametrize("sequence", sequences(*COSMETIC), ids=ids)
def test_client_that_writes_history_otherwise_is_one_row(
    sequence: dict[str, Any], bpe: Any, converse: Any, recorded: Any
) -> None:
    original = recorded.get(sequence["from"].rpartition("#")[2])
    if original is None:
        pytest.skip("the conversation that it was made of is not recorded")
    chat = play(converse, bpe, sequence, original)
    assert set(chat.continuities()) <= {"first", "extended", "healed"}
    assert len(chat.rows()) == 1
    if any(
        original[index] != m for index, m in enumerate(read_messages(raw(sequence["requests"][-1])))
    ):
        assert COSMETIC[sequence["kind"]] in chat.causes()


@pytest.mark.parametrize("sequence", sequences("sub-agent"), ids=ids)
def test_sub_agent_has_its_own_row_and_breaks_nothing(
    sequence: dict[str, Any], bpe: Any, converse: Any
) -> None:
    chat = play(converse, bpe, sequence)
    assert set(chat.continuities()) <= {"first", "extended", "healed"}
    assert chat.continuities().count("first") == len(chat.rows()) == 2


@pytest.mark.parametrize("sequence", sequences("fork-retry"), ids=ids)
def test_retry_and_branch_continue_where_they_began(
    sequence: dict[str, Any], bpe: Any, converse: Any
) -> None:
    chat = play(converse, bpe, sequence)
    assert "forked" in chat.continuities()
    assert "reset" not in chat.continuities()


@pytest.mark.parametrize("sequence", sequences("compaction"), ids=ids)
def test_compaction_begins_one_new_row(sequence: dict[str, Any], bpe: Any, converse: Any) -> None:
    chat = play(converse, bpe, sequence)
    assert chat.continuities().count("reset") == 1
    assert "compaction" in chat.causes()
    assert len(chat.rows()) == 2


@pytest.mark.parametrize("sequence", sequences("context-edit", "tool-output-truncated"), ids=ids)
def test_edited_tool_results_break_once_each_at_the_first_edit(
    sequence: dict[str, Any], bpe: Any, converse: Any
) -> None:
    chat = play(converse, bpe, sequence)
    requests = [read_messages(raw(request)) for request in sequence["requests"]]
    edits = [first_difference(*pair) for pair in pairwise(requests)]
    broken = [event for event in chat.events if event.continuity in ("forked", "reset")]
    assert [event.divergence.message_index for event in broken] == [
        edit for edit in edits if edit is not None
    ]
    assert {event.divergence.cause for event in broken} <= {"content_edited"}


def first_difference(one: Sequence[ChatMessage], other: Sequence[ChatMessage]) -> int | None:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), None)

"""The worked example of docs/healing.md; run where its tokenizer is beside the checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from turnfold.history.render import TemplateRenderer
from turnfold.schemas.events import Divergence
from turnfold.schemas.messages import ChatMessage

ROOT = Path(__file__).resolve().parents[2]
QWEN3 = ROOT.parent / "shared" / "tokenizers" / "qwen3-instruct-2507"

ASKED = [151644, 872, 198, 23085, 33289, 30, 151645, 198, 151644, 77091, 198]
SAMPLED = [785, 26951, 3834, 6174, 13]
ENCODED = [785, 94224, 6174, 13]
TAIL = [151645, 198, 151644, 872, 198, 10234, 30, 151645, 198, 151644, 77091, 198]


@pytest.fixture(scope="module")
def qwen3() -> TemplateRenderer:
    if not QWEN3.is_dir():
        pytest.skip("the tokenizer of the example is not beside this checkout")
    return TemplateRenderer(
        Tokenizer.from_file(str(QWEN3 / "tokenizer.json")),
        (QWEN3 / "chat_template.jinja").read_text(encoding="utf-8"),
    )


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


ANSWER = ChatMessage(role="assistant", content="The Skinny ones.")
SECOND = [user("Which jeans?"), ANSWER, user("Why?")]


def test_linear_mode_continues_the_sampled_tokens(qwen3: TemplateRenderer, converse: Any) -> None:
    chat = converse(qwen3)
    first = chat.turn(SECOND[:1], SAMPLED, ANSWER)
    assert first.prompt_ids.tolist() == ASKED
    plan = chat.turn(SECOND, [17949, 0])
    assert plan.prompt_ids.tolist() == ASKED + SAMPLED + TAIL
    assert (plan.parent_turn_id, plan.shared_len) == ("t0", 16)
    assert plan.prompt_tail.tolist() == TAIL
    assert plan.continuity == "healed"
    assert plan.divergence == Divergence(cause="retokenized", message_index=1, token_index=12)
    assert [sum(mask) for _, mask in chat.rows()] == [7]


def test_stop_token_that_was_kept_stands_once(qwen3: TemplateRenderer, converse: Any) -> None:
    chat = converse(qwen3)
    chat.turn(SECOND[:1], [*SAMPLED, 151645], ANSWER)
    plan = chat.plan(SECOND)
    assert plan.prompt_tail.tolist() == TAIL[1:]
    assert plan.prompt_ids.tolist() == ASKED + SAMPLED + TAIL


def test_tree_mode_forks_at_the_token(qwen3: TemplateRenderer, converse: Any) -> None:
    chat = converse(qwen3, mode="tree")
    chat.turn(SECOND[:1], SAMPLED, ANSWER)
    plan = chat.turn(SECOND, [17949, 0])
    assert plan.prompt_ids.tolist() == ASKED + ENCODED + TAIL
    assert (plan.parent_turn_id, plan.shared_len, plan.continuity) == ("t0", 12, "forked")
    assert plan.divergence == Divergence(cause="retokenized", token_index=12)
    assert [sum(mask) for _, mask in chat.rows()] == [5, 2]


def test_asked_again_the_prompt_is_the_same(qwen3: TemplateRenderer, converse: Any) -> None:
    chat = converse(qwen3)
    chat.turn(SECOND[:1], SAMPLED, ANSWER)
    chat.turn(SECOND, [17949, 0])
    plan = chat.plan(SECOND)
    assert plan.prompt_ids.tolist() == ASKED + SAMPLED + TAIL
    assert (plan.parent_turn_id, plan.shared_len, plan.continuity) == ("t0", 16, "forked")
    assert plan.num_renders == 0


def test_page_shows_these_ids() -> None:
    page = (ROOT / "docs" / "healing.md").read_text(encoding="utf-8")
    for ids in (ASKED, SAMPLED, ENCODED, TAIL):
        assert str(ids).strip("[]") in page, ids

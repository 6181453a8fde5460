"""A render encoded in parts gives the very tokens of the whole."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from turnfold.history.boundaries import safe_boundaries
from turnfold.history.encoding import encode_render
from turnfold.history.render import TemplateRenderer
from turnfold.history.session import Session
from turnfold.history.template_facts import template_facts

PIECES = [
    "<|im_start|>", "<|im_end|>", "<|im_", "start|>", "<tool_call>", "</think>", "\n", "\n\n", " ",
    "  Hello", "world ", "é", "e\u0301", "日本", "\ufeff", "\0", "<", "|>", "user", "123", "𝕏", "\r\n",
]  # fmt: skip

texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=30).map("".join)


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(first=texts, second=texts)
def test_parts_encode_as_the_whole(bpe: TemplateRenderer, first: str, second: str) -> None:
    assert template_facts(bpe).cuts is not None
    session = Session("s1")
    for text in (first, first + second, first + "<|im_start|>" + second, second):
        assert encode_render(session, bpe, text).tolist() == bpe.encode(text).tolist()


def test_only_new_parts_are_encoded(toy: Any) -> None:
    encoded: list[str] = []

    class Recording(type(toy)):  # type: ignore[misc]
        def encode(self, text: str) -> Any:
            encoded.append(text)
            return super().encode(text)

    renderer, session = Recording(), Session("s1")
    template_facts(renderer)
    encoded.clear()
    for text in ("❨uq1u❩❨a", "❨uq1u❩❨abca❩❨uq2u❩❨a", "❨uq1u❩❨abca❩❨uq3u❩❨a"):
        encode_render(session, renderer, text)
    assert encoded == ["", "❨uq1", "u❩", "❨a", "❨abc", "a❩", "❨uq2", "❨uq3"]


def tokenizer_with(*tokens: AddedToken) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def plain(content: str, **options: bool) -> AddedToken:
    return AddedToken(content, normalized=False, **options)


@pytest.mark.parametrize(
    ("tokens", "safe"),
    [
        ([plain("<a>"), plain("<b>")], {"<a>", "<b>"}),
        ([plain("<a>"), plain("x<a")], set()),
        ([plain("<a>"), plain("x<a>y")], set()),
        ([plain("<a>"), plain("<a>y")], {"<a>", "<a>y"}),
        ([plain("<<")], set()),
        ([plain("<a>", lstrip=True)], set()),
        ([plain("<a>", rstrip=True)], set()),
        ([plain("<a>", single_word=True)], set()),
        ([plain("word")], set()),
        ([AddedToken("<a>", normalized=True)], set()),
    ],
)
def test_marks_that_something_could_reach_across_are_no_boundaries(
    tokens: list[AddedToken], safe: set[str]
) -> None:
    template = " ".join(token.content for token in tokens)
    assert safe_boundaries(tokenizer_with(*tokens), template) == safe


def test_marks_that_the_template_does_not_write_are_left_out() -> None:
    assert safe_boundaries(tokenizer_with(plain("<a>"), plain("<b>")), "… <a> …") == {"<a>"}


def test_tokenizer_that_cuts_long_texts_has_no_boundaries() -> None:
    tokenizer = tokenizer_with(plain("<a>"))
    tokenizer.enable_truncation(10)
    assert safe_boundaries(tokenizer, "<a>") == frozenset()

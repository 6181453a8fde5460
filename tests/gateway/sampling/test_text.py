"""Text of tokens that come one by one is the text of all of them."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from turnfold.embedded.tiny.tokenizer import build_tokenizer
from turnfold.gateway.turns.sampling.text import TextBeforeStop, TokenText

REAL = Path(__file__).parents[3].parent / "shared" / "tokenizers"
FOUND = [n for n in ("llama-3.1", "qwen3", "devstral-2507") if (REAL / n).is_dir()]
NAMES = ["bytes", "tiny", *FOUND]


@cache
def tokenizer(name: str) -> tokenizers.Tokenizer:
    """Each byte a token; the tiny model's; or one that lies beside the checkout."""
    if name == "tiny":
        return build_tokenizer().backend_tokenizer
    if name == "bytes":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        made = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.decoder = decoders.ByteLevel()
        made.add_special_tokens(["<|end|>"])
        return made
    return tokenizers.Tokenizer.from_file(str(REAL / name / "tokenizer.json"))


def decode(name: str, ids: list[int]) -> str:
    text: str = tokenizer(name).decode(ids, skip_special_tokens=False)
    return text


def pieces(name: str, ids: list[int], cuts: list[int]) -> list[str]:
    text = TokenText(lambda array: decode(name, array.tolist()))
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    return [*(text.feed(ids[a:b]) for a, b in pairwise(bounds)), text.end()]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_random_tokens_in_pieces_give_the_text_of_all(name: str, data: st.DataObject) -> None:
    vocabulary = tokenizer(name).get_vocab_size(with_added_tokens=True)
    # Low ids are single bytes in most vocabularies, so that characters break often.
    any_id = st.integers(0, vocabulary - 1) | st.integers(0, min(300, vocabulary - 1))
    ids = data.draw(st.lists(any_id, max_size=150))
    cuts = data.draw(st.lists(st.integers(1, 150), max_size=10))
    assert "".join(pieces(name, ids, cuts)) == decode(name, ids)
    assert "".join(pieces(name, ids, list(range(len(ids))))) == decode(name, ids)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(text=st.text(max_size=80))
def test_valid_text_is_never_shown_with_broken_characters(name: str, text: str) -> None:
    ids = tokenizer(name).encode(text, add_special_tokens=False).ids
    whole = decode(name, ids)
    shown = pieces(name, ids, list(range(len(ids))))
    assert "".join(shown) == whole
    if "\ufffd" not in whole:
        assert all("\ufffd" not in piece for piece in shown)


def test_a_character_waits_for_its_last_byte() -> None:
    ids = tokenizer("bytes").encode("aé€😀b", add_special_tokens=False).ids
    shown = pieces("bytes", ids, list(range(len(ids))))
    assert shown == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]


def test_bytes_that_are_no_character_are_shown_once_they_cannot_become_one() -> None:
    text = TokenText(lambda array: decode("bytes", array.tolist()))
    (first,) = tokenizer("bytes").encode("é", add_special_tokens=False).ids[:1]
    assert [text.feed([first]), text.feed([first]), text.end()] == ["", "\ufffd", "\ufffd"]


def test_the_work_grows_with_the_number_of_tokens_and_not_its_square() -> None:
    def num_decoded(ids: list[int]) -> int:
        total = 0

        def counting(array: np.ndarray) -> str:
            nonlocal total
            total += len(array)
            return decode("bytes", array.tolist())

        text = TokenText(counting)
        for token_id in ids:
            text.feed([token_id])
        return total

    euro = tokenizer("bytes").encode("€", add_special_tokens=False).ids
    for ids in (euro, euro[:1], euro[1:2], [0]):
        small, large = num_decoded(ids * 300), num_decoded(ids * 3000)
        assert large < 12 * small


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.text("ab", max_size=20), STOPS, st.data())
def test_text_before_a_stop_is_what_the_whole_text_has_before_it(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(1, 20), max_size=6))
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for reason in (None, 7, *stops):
        before = TextBeforeStop(stops)
        shown = [before.feed(text[a:b]) for a, b in pairwise(bounds)]
        whole = text.partition(reason)[0] if isinstance(reason, str) else text
        assert "".join([*shown, before.end(reason)]) == whole


def test_text_that_may_begin_a_stop_sequence_is_held_back() -> None:
    before = TextBeforeStop(["\n\n", "END"])
    assert [before.feed(piece) for piece in ("one\n", "two", "E", "N", "x")] == [
        "one",
        "\ntwo",
        "",
        "",
        "ENx",
    ]


def test_after_a_whole_stop_sequence_only_the_end_decides() -> None:
    before = TextBeforeStop(["END"])
    assert before.feed("a END b") == "a "
    assert before.feed("c") == ""
    assert before.end(None) == "END bc"

import numpy as np
import pytest

from turnfold.gateway.parsing import gpt_oss, qwen
from turnfold.gateway.parsing.replies import ReplyPart, Situation
from turnfold.gateway.parsing.spans import num_reasoning_tokens, num_tokens
from turnfold.gateway.parsing.tagged import begin
from turnfold.history.sequences import Ids

PIECES = [b" caf", b"\xc3", b"\xa9", b"!", b"<think>", b"hm", b"</think>", b"", b"k>\n"]


def decode(ids: Ids) -> str:
    return b"".join(PIECES[i] for i in ids).decode(errors="replace")


def ids_of(*ids: int) -> Ids:
    return np.array(ids, dtype=np.uint32)


def test_a_character_of_several_tokens_belongs_to_all_of_them() -> None:
    ids = ids_of(0, 1, 2, 3)
    assert num_tokens(4, 5, ids, decode) == 2
    assert num_tokens(4, 6, ids, decode) == 3
    assert num_tokens(0, 6, ids, decode) == 4


def test_a_token_counts_where_it_begins() -> None:
    ids = ids_of(0, 0, 0)  # 4 characters each
    assert num_tokens(2, 6, ids, decode) == 1
    assert num_tokens(4, 6, ids, decode) == 1
    assert num_tokens(2, 4, ids, decode) == 0


def test_no_text_has_no_tokens() -> None:
    assert num_tokens(4, 4, ids_of(0, 3), decode) == 0
    assert num_tokens(0, 0, ids_of(), decode) == 0


def test_a_character_that_is_never_whole_is_counted_once() -> None:
    assert num_tokens(0, 5, ids_of(0, 1), decode) == 2


@pytest.mark.parametrize(
    ("ids", "is_open", "expected"),
    [
        ((4, 5, 5, 6, 3), False, 2),
        ((5, 5, 5, 6, 3), True, 3),
        ((4, 5, 5), False, 2),  # cut off
        ((4, 6, 3), False, 0),
        ((0, 3), False, 0),
        ((6, 3), True, 0),
    ],
)
def test_tokens_between_the_marks_are_reasoning(
    ids: tuple[int, ...], is_open: bool, expected: int
) -> None:
    sampled = ids_of(*ids)
    parser = begin(qwen.GRAMMAR, Situation(is_reasoning_open=is_open))
    parts: list[ReplyPart] = [*parser.feed(decode(sampled)), *parser.end()]
    assert num_reasoning_tokens(parts, sampled, decode) == expected


def test_each_analysis_of_gpt_oss_is_reasoning() -> None:
    text = (
        "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>final<|message|>so"
        "<|end|><|start|>assistant<|channel|>analysis<|message|>three<|end|>"
    )
    parser = gpt_oss.begin(Situation())
    parts = [*parser.feed(text), *parser.end()]

    def one_token_a_character(ids: Ids) -> str:
        return "".join(map(chr, ids))

    sampled = np.array(list(map(ord, text)), dtype=np.uint32)
    assert num_reasoning_tokens(parts, sampled, one_token_a_character) == len("onethree")

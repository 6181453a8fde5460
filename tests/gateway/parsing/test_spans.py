from collections.abc import Sequence

from turnfold.gateway.parsing.spans import token_ends, token_span

PIECES = [b" caf", b"\xc3", b"\xa9", b"!"]


def decode(ids: Sequence[int]) -> str:
    return b"".join(PIECES[i] for i in ids).decode(errors="replace")


def test_a_token_inside_a_character_adds_no_text() -> None:
    assert token_ends([0, 1, 2, 3], decode) == [4, 4, 5, 6]


def test_a_character_of_several_tokens_belongs_to_all_of_them() -> None:
    ends = [4, 4, 5, 6]
    assert token_span(4, 6, ends) == (1, 4)
    assert token_span(4, 5, ends) == (1, 3)


def test_a_span_takes_the_tokens_that_it_touches() -> None:
    ends = [2, 4, 6, 8]
    assert token_span(0, 8, ends) == (0, 4)
    assert token_span(3, 5, ends) == (1, 3)
    assert token_span(2, 4, ends) == (1, 2)

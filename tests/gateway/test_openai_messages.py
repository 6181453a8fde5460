"""Messages of a request, read once as long as somebody holds them."""

from typing import Any

import msgspec
import pytest

from turnfold.gateway.protocols.openai_messages import read_messages
from turnfold.gateway.refusals import Refusal


def raw(*messages: Any) -> list[msgspec.Raw]:
    return [msgspec.Raw(msgspec.json.encode(message)) for message in messages]


def test_a_message_that_is_held_is_the_same_object_when_it_comes_again() -> None:
    first, second = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
    held = read_messages(raw(first))
    again = read_messages(raw(first, second))
    assert again[0] is held[0]
    assert again[1].content == "b"


def test_messages_that_differ_in_their_json_alone_are_read_apart() -> None:
    one = {"role": "user", "content": "a"}
    held = read_messages(raw(one, dict(reversed(one.items()))))
    assert held[0] == held[1]
    assert held[0] is not held[1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("text", r"messages\[1\]: Expected `object`, got `str`"),
        (None, r"messages\[1\]: Expected `object`, got `null`"),
        ({"role": "robot"}, r"messages\[1\].role: 'robot' is not supported"),
        ({"role": "user", "content": 5}, r"messages\[1\].content: expected text"),
    ],
)
def test_a_message_that_is_none_is_refused_where_it_stands(wrong: Any, said: str) -> None:
    for _ in range(2):
        with pytest.raises(Refusal, match=said) as refusal:
            read_messages(raw({"role": "user", "content": "a"}, wrong))
        assert str(refusal.value.param).startswith("messages[1]")

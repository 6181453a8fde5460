from typing import Any

import pytest

from turnfold.gateway.calls import ModelCall, request_digest
from turnfold.gateway.settings import Settings
from turnfold.gateway.turns.pinning import compile_pins, pin_nonces
from turnfold.schemas.messages import ChatMessage
from turnfold.schemas.settings import SettingsError

PINS = compile_pins(Settings().pinned_patterns)


def call(*contents: str, role: str = "system") -> ModelCall:
    messages: Any = tuple(ChatMessage(role=role, content=content) for content in contents)
    return ModelCall(protocol="p", model="m", messages=messages)


def test_a_nonce_in_system_text_is_replaced_and_kept() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=36ee5;"
    pinned = pin_nonces(call(f"{header}\nYou are", "no nonce"), PINS)
    assert pinned.messages[0].content == f"{header[:-6]}0;\nYou are"
    assert pinned.messages[1].content == "no nonce"
    assert pinned.pinned == (("cch=36ee5;", "cch=0;"),)


def test_requests_that_differ_in_the_nonce_are_the_same_request() -> None:
    first, second = (pin_nonces(call(f"cch={nonce};"), PINS) for nonce in ("36ee5", "0aaa9"))
    assert first.messages == second.messages
    assert request_digest(first) == request_digest(second)
    assert first.pinned != second.pinned


def test_what_a_user_writes_is_not_touched() -> None:
    for role in ("user", "assistant", "tool"):
        assert pin_nonces(call("cch=36ee5;", role=role), PINS) == call("cch=36ee5;", role=role)


def test_nothing_is_pinned_without_patterns() -> None:
    assert pin_nonces(call("cch=36ee5;"), compile_pins([])) == call("cch=36ee5;")


def test_a_group_that_did_not_match_changes_nothing() -> None:
    pins = compile_pins(["a(b)?"])
    assert pin_nonces(call("a ab"), pins).messages[0].content == "a a0"


@pytest.mark.parametrize(
    ("pattern", "problem"), [("(", "missing"), ("cch", "0 groups"), ("(a)(b)", "2 groups")]
)
def test_a_pattern_that_makes_no_sense_is_named(pattern: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as caught:
        compile_pins([pattern])
    assert "TURNFOLD_PINNED_PATTERNS" in str(caught.value)

import base64
import hmac

import msgspec
import pytest

from turnfold.gateway.keys import BadKey, ExpiredKey, KeyRefused, SessionKey, matches, sign, verify

KEY = SessionKey(rollout_id="g1-00", session_id="main", partition=2, offset=17, expires_at=1000)


def test_a_signed_key_states_what_it_was_made_of() -> None:
    assert verify(sign(KEY, "secret"), "secret", now=999.0) == KEY


def test_payload_and_signature_have_the_published_form() -> None:
    prefix, _, rest = sign(KEY, "secret").partition("-")
    payload, signature = (
        base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)) for part in rest.split(".")
    )
    assert prefix == "tf"
    assert msgspec.msgpack.decode(payload) == {
        "r": "g1-00",
        "s": "main",
        "p": 2,
        "o": 17,
        "x": 1000,
    }
    assert signature == hmac.new(b"secret", payload, "sha256").digest()


def test_a_key_ends_at_its_second() -> None:
    with pytest.raises(ExpiredKey):
        verify(sign(KEY, "secret"), "secret", now=1000.0)


def test_a_key_that_was_good_ends_all_the_same() -> None:
    api_key = sign(KEY, "secret")
    assert verify(api_key, "secret", now=999.0) == KEY
    with pytest.raises(ExpiredKey):
        verify(api_key, "secret", now=1000.0)
    with pytest.raises(BadKey):
        verify(api_key, "other", now=999.0)


def test_a_key_of_another_gateway_is_refused() -> None:
    with pytest.raises(BadKey):
        verify(sign(KEY, "other"), "secret", now=0.0)


def test_no_character_of_a_key_can_be_changed() -> None:
    key = sign(KEY, "secret")
    for at, character in enumerate(key):
        changed = key[:at] + ("A" if character != "A" else "B") + key[at + 1 :]
        with pytest.raises(KeyRefused):
            verify(changed, "secret", now=0.0)


@pytest.mark.parametrize(
    "text", ["", "tf-", "tf-.", "sk-abc", "tf-a.b", "tf-é.é", "tf-" + "a" * 9000]
)
def test_what_is_no_key_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(BadKey) as caught:
        verify(text, "secret", now=0.0)
    assert not text or text not in str(caught.value)


def test_secrets_are_compared_whole() -> None:
    assert matches("abc", "abc")
    assert not matches("ab", "abc")
    assert not matches("", "abc")

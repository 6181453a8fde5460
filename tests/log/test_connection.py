"""What clients of Kafka are told, from settings; no broker is asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import rich.pretty

from turnfold.log.connection import client_options
from turnfold.log.settings import KafkaSettings, ServiceSettings
from turnfold.schemas.settings import SettingsError, load

LOGIN: dict[str, Any] = {"kafka_security_protocol": "SASL_PLAINTEXT", "kafka_username": "ann"}


def test_an_address_alone_is_that_of_a_broker_that_lets_in_everybody() -> None:
    expected = {"bootstrap_servers": "a:1,b:2", "security_protocol": "PLAINTEXT"}
    assert client_options("a:1,b:2") == expected
    assert client_options(KafkaSettings(bootstrap="a:1,b:2")) == expected


def test_a_user_and_a_password_come_from_the_environment() -> None:
    environment = {
        "TURNFOLD_BOOTSTRAP": "a:1",
        "TURNFOLD_KAFKA_SECURITY_PROTOCOL": "SASL_PLAINTEXT",
        "TURNFOLD_KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
        "TURNFOLD_KAFKA_USERNAME": "ann",
        "TURNFOLD_KAFKA_PASSWORD": '["secret"]',
    }
    assert client_options(load(ServiceSettings, environment)) == {
        "bootstrap_servers": "a:1",
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_plain_username": "ann",
        "sasl_plain_password": '["secret"]',
    }


def test_a_password_may_be_in_a_file_whose_last_line_end_is_not_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(b" secret \r\n")
    options = client_options(KafkaSettings(**LOGIN, kafka_password_file=str(file)))
    assert options["sasl_plain_password"] == " secret "


def test_only_listed_authorities_are_trusted_when_some_are_listed(papers: Any) -> None:
    listed = KafkaSettings(kafka_security_protocol="SSL", kafka_ca=str(papers.ca))
    assert len(client_options(listed)["ssl_context"].get_ca_certs()) == 1


@pytest.mark.parametrize("secret", ["kafka_password", "control_key", "key_secret"])
def test_a_secret_is_not_printed_with_its_settings(secret: str) -> None:
    from turnfold.gateway.settings import Settings

    settings = Settings(**{secret: "s3cret"})
    for shown in (repr(settings), str(settings), rich.pretty.pretty_repr(settings)):
        assert "s3cret" not in shown
        assert f"{secret}='***'" in shown
    assert f"{secret}=''" in repr(Settings())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kafka_ca": "ca.pem"}, "KAFKA_CA is set and would not be used: expected .* SSL or SASL_"),
        ({"kafka_username": "ann"}, "KAFKA_USERNAME is set and would not be used: expected .*SASL"),
        ({"kafka_security_protocol": "SASL_SSL"}, "KAFKA_USERNAME: expected a user"),
        (LOGIN, "KAFKA_PASSWORD or .*_FILE: expected one of them since .*; none is set"),
        (
            {**LOGIN, "kafka_password": "s3cret", "kafka_password_file": "f"},
            "KAFKA_PASSWORD or .*_FILE: expected one of them since .*; both are set",
        ),
        ({**LOGIN, "kafka_password_file": "/nowhere"}, "FILE=/nowhere: .*No such file"),
        ({**LOGIN, "kafka_password_file": "/dev/null"}, "FILE=/dev/null: .* found an empty file"),
        ({"kafka_security_protocol": "SSL", "kafka_ca": "/nowhere"}, "CA=/nowhere: .*No such file"),
        ({"kafka_security_protocol": "SSL", "kafka_ca": __file__}, "CA=.*: expected a PEM file"),
        ({"kafka_security_protocol": "SSL", "kafka_key": "k.pem"}, "CERTIFICATE: expected the"),
        (
            {"kafka_security_protocol": "SSL", "kafka_certificate": __file__},
            "CERTIFICATE=.*: expected PEM files",
        ),
    ],
)
def test_settings_that_cannot_work_are_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said) as raised:
        client_options(KafkaSettings(**fields))
    assert "TURNFOLD_KAFKA_" in str(raised.value)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SECURITY_PROTOCOL", "TLS", "PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"),
        ("SASL_MECHANISM", "GSSAPI", "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"),
    ],
)
def test_a_word_that_is_none_of_them_is_answered_with_all_of_them(
    name: str, value: str, expected: str
) -> None:
    with pytest.raises(SettingsError, match=re.escape(f"expected one of {expected}")):
        load(ServiceSettings, {f"TURNFOLD_KAFKA_{name}": value})


def test_a_key_that_needs_a_passphrase_is_refused_and_nobody_is_asked_for_it(
    papers: Any, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization as keys

    key = keys.load_pem_private_key(papers.client.read_bytes(), None)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(
        key.private_bytes(
            keys.Encoding.PEM, keys.PrivateFormat.PKCS8, keys.BestAvailableEncryption(b"passphrase")
        )
    )
    settings = KafkaSettings(
        kafka_security_protocol="SSL",
        kafka_certificate=str(papers.client),
        kafka_key=str(locked),
    )
    with pytest.raises(SettingsError, match=r"locked\.pem: expected .* not encrypted"):
        client_options(settings)


def sources() -> dict[str, str]:
    """Text of every module of services and trainer, by path."""
    root = Path(__file__).parents[2]
    paths = [path for name in ("services", "trainer") for path in (root / name).rglob("*.py")]
    return {path.relative_to(root).as_posix(): path.read_text() for path in sorted(paths)}


def test_only_one_package_tells_a_client_where_kafka_is() -> None:
    found = [path for path, text in sources().items() if "bootstrap_servers" in text]
    assert [Path(path).parent.as_posix() for path in found] == ["services/turnfold/log"] * 3


def test_no_service_takes_only_the_address_from_its_settings() -> None:
    connecting = r"\b(Producer|Reader|message_broker|reader_from_start|\w+_topics|\w+(Log|Source))"
    calls = re.compile(connecting + r"\(\s*[\w.]*settings\.bootstrap\b")
    assert [path for path, text in sources().items() if calls.search(text)] == []
    assert calls.search("async with Producer(self.settings.bootstrap) as producer:")

"""Certificates and brokers that ask who is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from turnfold.embedded.broker.testing import BrokerProcess
from turnfold.log.settings import KafkaSettings

USER, PASSWORD = "ann,lee=x", "{not: json, 7ö"  # what must be escaped somewhere on the way


class Papers:
    """PEM files of two authorities: ours, and one that nobody has reason to trust."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        authority, stranger = trustme.CA(), trustme.CA()
        self.ca, self.strange_ca = folder / "ca.pem", folder / "strange-ca.pem"
        authority.cert_pem.write_to_path(self.ca)
        stranger.cert_pem.write_to_path(self.strange_ca)
        self.broker = self._issue(authority, "127.0.0.1")
        self.client = self._issue(authority, "client")
        self.strange_client = self._issue(stranger, "stranger")

    def _issue(self, authority: trustme.CA, name: str) -> Path:
        path = self.folder / f"{name}.pem"
        authority.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(path)
        return path


@pytest.fixture(scope="session")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


class Guarded:
    """Brokers of our own that want something, each with the settings that it lets in."""

    def __init__(self, folder: Path, papers: Papers) -> None:
        users = folder / "users"
        users.write_text(f"{USER}:{PASSWORD}\n")
        tls = ("--tls-certificate", str(papers.broker))
        login = ("--users", str(users))
        wanted = {
            "nothing": (),
            "tls": tls,
            "password": login,
            "both": (*tls, *login),
            "certificate": (*tls, "--tls-client-ca", str(papers.ca)),
        }
        self.brokers = {
            name: BrokerProcess(folder / name, options=options) for name, options in wanted.items()
        }
        ca = {"kafka_ca": str(papers.ca)}
        user = {"kafka_username": USER, "kafka_password": PASSWORD}
        self._right: dict[str, dict[str, Any]] = {
            "nothing": {},
            "tls": {"kafka_security_protocol": "SSL", **ca},
            "password": {"kafka_security_protocol": "SASL_PLAINTEXT", **user},
            "both": {"kafka_security_protocol": "SASL_SSL", **ca, **user},
            "certificate": {
                "kafka_security_protocol": "SSL",
                "kafka_certificate": str(papers.client),
                **ca,
            },
        }

    def right(self, name: str, **changes: Any) -> KafkaSettings:
        """Settings that the broker lets in, or these with changes."""
        return self.settings(name, **{**self._right[name], **changes})

    def settings(self, name: str, **fields: Any) -> KafkaSettings:
        return KafkaSettings(bootstrap=self.brokers[name].bootstrap, **fields)

    def as_for(self, other: str, name: str) -> KafkaSettings:
        """What the broker `other` would let in, tried at `name`."""
        right = self.right(other)
        return msgspec.structs.replace(right, bootstrap=self.brokers[name].bootstrap)


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory, papers: Papers) -> Iterator[Guarded]:
    found = Guarded(tmp_path_factory.mktemp("guarded"), papers)
    try:
        for broker in found.brokers.values():
            broker.start()
        yield found
    finally:
        for broker in found.brokers.values():
            broker.kill9()

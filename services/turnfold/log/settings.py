"""Settings that every process of turnfold shares."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from turnfold.schemas.settings import Secret, is_secret
from turnfold.schemas.topics import Topics
from turnfold.schemas.wire import Wire

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


class KafkaSettings(Wire, frozen=True, kw_only=True):
    """Where Kafka is and how to be let in; `turnfold.log.connection` turns it into a connection.

    Printed without the password.
    """

    bootstrap: str = "127.0.0.1:9092"
    """Kafka bootstrap servers, host:port, comma separated."""
    kafka_security_protocol: SecurityProtocol = "PLAINTEXT"
    """What the brokers expect: SSL is TLS, SASL_ a user and a password; SASL_SSL is both."""
    kafka_sasl_mechanism: SaslMechanism = "PLAIN"
    """How the password is proven: PLAIN shows it to the broker, SCRAM does not."""
    kafka_username: str = ""
    """User at the brokers."""
    kafka_password: Secret = ""
    """Password of that user."""
    kafka_password_file: str = ""
    """File that holds the password, instead of the variable."""
    kafka_ca: str = ""
    """PEM file with the authorities that sign the brokers' certificates; the system's when unset."""
    kafka_certificate: str = ""
    """PEM file with this client's own certificate, where the brokers ask for one."""
    kafka_key: str = ""
    """PEM file with its private key, not encrypted; needed when it is not in the same file."""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        fields = msgspec.structs.fields(type(self))
        values = [(field, getattr(self, field.name)) for field in fields]
        return [(f.name, "***" if value and is_secret(f.type) else value) for f, value in values]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"


KAFKA_ACCESS = tuple(n for n in KafkaSettings.__struct_fields__ if n.startswith("kafka_"))
"""All but the address: what a process has to forget that is to talk to a broker of its own."""

Kafka: TypeAlias = KafkaSettings | str
"""Where Kafka is. An address alone is that of brokers that want neither TLS nor a password."""


class ServiceSettings(KafkaSettings, frozen=True, kw_only=True):
    """Base of each service's settings; see `turnfold.schemas.settings.load`."""

    namespace: str = "turnfold"
    """Prefix of all topics."""
    health_port: int | None = None
    """Port of /healthz, /readyz and /metrics on host 0.0.0.0; none when unset."""
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""
    log_format: Literal["text", "json"] = "text"
    """text for people, json for programs: one object a line."""

    @property
    def topics(self) -> Topics:
        return Topics(namespace=self.namespace)

"""What every client of Kafka is told: where the brokers are, and how to be let in.

No other module gives aiokafka or FastStream an address, so that no client can do without the rest.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from turnfold.log.settings import Kafka, KafkaSettings
from turnfold.schemas.settings import SettingsError, variable

PROTOCOL = variable("kafka_security_protocol")
PASSWORD_SETTINGS = ("kafka_username", "kafka_password", "kafka_password_file")
TLS_SETTINGS = ("kafka_ca", "kafka_certificate", "kafka_key")


def settings_of(kafka: Kafka) -> KafkaSettings:
    """An address alone as settings."""
    return KafkaSettings(bootstrap=kafka) if isinstance(kafka, str) else kafka


def client_options(kafka: Kafka) -> dict[str, Any]:
    """Arguments of aiokafka's clients, all of which take the same ones.

        "kafka:9092"  ->  bootstrap_servers="kafka:9092", security_protocol="PLAINTEXT"

    Reads the files that the settings name. Raises SettingsError naming the variable, what was
    expected and what came.
    """
    settings = settings_of(kafka)
    options: dict[str, Any] = {
        "bootstrap_servers": settings.bootstrap,
        "security_protocol": settings.kafka_security_protocol,
    }
    _check_that_all_is_used(settings)
    if has_tls(settings):
        options["ssl_context"] = _tls_context(settings)
    if has_password(settings):
        options["sasl_mechanism"] = settings.kafka_sasl_mechanism
        options["sasl_plain_username"] = settings.kafka_username
        options["sasl_plain_password"] = _password(settings)
    return options


def has_tls(settings: KafkaSettings) -> bool:
    return settings.kafka_security_protocol in ("SSL", "SASL_SSL")


def has_password(settings: KafkaSettings) -> bool:
    return settings.kafka_security_protocol in ("SASL_PLAINTEXT", "SASL_SSL")


def plain(error: Exception) -> str:
    """The text of an error without its number and its file."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _check_that_all_is_used(settings: KafkaSettings) -> None:
    """A setting without effect is a mistake: who sets a password expects to be asked for it."""
    unused = (
        *(() if has_tls(settings) else TLS_SETTINGS),
        *(() if has_password(settings) else PASSWORD_SETTINGS),
    )
    for name in unused:
        if getattr(settings, name):
            wanted = "SSL or SASL_SSL" if name in TLS_SETTINGS else "SASL_SSL or SASL_PLAINTEXT"
            raise SettingsError(
                f"{variable(name)} is set and would not be used: expected {PROTOCOL} to be "
                f"{wanted}, got {settings.kafka_security_protocol}"
            )


def _password(settings: KafkaSettings) -> str:
    because = f"since {PROTOCOL} is {settings.kafka_security_protocol}"
    if not settings.kafka_username:
        raise SettingsError(f"{variable('kafka_username')}: expected a user {because}; it is unset")
    given, path = settings.kafka_password, settings.kafka_password_file
    if bool(given) == bool(path):
        names = f"{variable('kafka_password')} or {variable('kafka_password_file')}"
        found = "both are set" if given else "none is set"
        raise SettingsError(f"{names}: expected one of them {because}; {found}")
    return given or _password_in(path)


def _password_in(path: str) -> str:
    name = variable("kafka_password_file")
    try:
        password = Path(path).read_text().rstrip("\r\n")
    except OSError as error:
        raise SettingsError(f"{name}={path}: cannot be read ({plain(error)})") from error
    except UnicodeDecodeError:
        # Without its cause, which holds the bytes of the file.
        raise SettingsError(f"{name}={path}: expected a password in UTF-8") from None
    if not password:
        raise SettingsError(f"{name}={path}: expected a password, found an empty file")
    return password


def _tls_context(settings: KafkaSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.kafka_ca or None)
    except OSError as error:
        raise SettingsError(
            f"{variable('kafka_ca')}={settings.kafka_ca}: expected a PEM file with the "
            f"certificates of authorities ({plain(error)})"
        ) from error
    if settings.kafka_certificate:
        _load_certificate(context, settings.kafka_certificate, settings.kafka_key)
    elif settings.kafka_key:
        raise SettingsError(
            f"{variable('kafka_certificate')}: expected the certificate that goes with "
            f"{variable('kafka_key')}; it is unset"
        )
    return context


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str) -> None:
    files = f"{variable('kafka_certificate')}={certificate}"
    if key:
        files += f" and {variable('kafka_key')}={key}"

    def ask() -> str:
        # Without this OpenSSL would ask for it on the terminal.
        raise SettingsError(f"{files}: expected a private key that is not encrypted")

    try:
        context.load_cert_chain(certificate, key or None, password=ask)
    except OSError as error:
        raise SettingsError(
            f"{files}: expected PEM files with a certificate chain and its private key "
            f"({plain(error)})"
        ) from error

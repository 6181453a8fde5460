"""Why a client could not start, in words that name the setting.

aiokafka only logs what went wrong on the way to the first broker and then says that it could not
bootstrap. What is found out here is found out by trying once more, step by step, and a broker that
says nothing clear may just be down: only a plain answer makes a `NotLetIn`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiokafka.conn import AIOKafkaConnection, collect_hosts, create_conn
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    IllegalSaslStateError,
    KafkaConnectionError,
    KafkaError,
    KafkaTimeoutError,
    NodeNotReadyError,
    SaslAuthenticationFailed,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    UnsupportedSaslMechanismError,
)
from aiokafka.protocol.admin import SaslHandShakeRequest

from turnfold.log.connection import (
    PASSWORD_SETTINGS,
    PROTOCOL,
    client_options,
    has_password,
    has_tls,
    plain,
)
from turnfold.log.settings import KafkaSettings
from turnfold.schemas.errors import UserError
from turnfold.schemas.settings import variable

_TIMEOUT_S = 5.0
_GOODBYE_TIMEOUT_S = 1.0
_IS_AWAY = (KafkaConnectionError, NodeNotReadyError, OSError)
_NOT_ALLOWED = (
    ClusterAuthorizationFailedError,
    GroupAuthorizationFailedError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
)


class BrokerUnavailable(UserError):
    """No broker answers at the address; the text says what to do."""

    def __init__(self, bootstrap: str, cause: object = "") -> None:
        detail = f" ({cause})" if str(cause) else ""
        super().__init__(
            f"no Kafka broker answers at {bootstrap}{detail}: start one with "
            "`turnfold broker --data ./data`, or set TURNFOLD_BOOTSTRAP"
        )


class NotLetIn(UserError):
    """A broker answers, and what it wants is not what the settings say; the text names them."""


class WorkEnded(UserError):
    """A broker answers, and a connection to it is of no more use; only a new process helps."""

    what = "work with"

    def __init__(self, bootstrap: str, cause: BaseException | None) -> None:
        reason = repr(cause.__cause__ or cause) if cause is not None else "without a reason"
        super().__init__(f"{self.what} {bootstrap} has ended by itself ({reason}); start again")


def why_ended(settings: KafkaSettings, error: KafkaError) -> UserError:
    """What to raise for an error that a process does not survive."""
    if isinstance(error, _NOT_ALLOWED):
        user = settings.kafka_username or "of a client without a name"
        return NotLetIn(
            f"the brokers at {settings.bootstrap} do not allow what turnfold does ({error!r}): "
            f"give user {user} the rights that docs/operations.md lists"
        )
    if error.retriable or isinstance(error, KafkaTimeoutError):
        return BrokerUnavailable(settings.bootstrap, repr(error))
    return WorkEnded(settings.bootstrap, error)


async def why_not_started(settings: KafkaSettings, error: Exception) -> UserError:
    """What to raise for a client that has failed to start with this error."""
    if isinstance(error, _NOT_ALLOWED):
        return why_ended(settings, error)
    if not isinstance(error, _IS_AWAY):
        return BrokerUnavailable(settings.bootstrap, error)
    options = client_options(settings)
    for host, port, _ in collect_hosts(options.pop("bootstrap_servers")):
        reason = await _refusal(settings, host, port, options)
        if reason is not None:
            return NotLetIn(f"broker {host}:{port} {reason}")
    return BrokerUnavailable(settings.bootstrap)


async def _refusal(
    settings: KafkaSettings, host: str, port: int, options: dict[str, Any]
) -> str | None:
    """What one broker has against us, as far as it says so."""
    ours = f"{PROTOCOL} is {settings.kafka_security_protocol}"
    try:
        async with _connection(host, port, **options) as connection:
            if not has_password(settings) and (offered := await _mechanisms(connection)):
                return f"expects a user and a password ({', '.join(offered)}), but {ours}"
        return None
    except ssl.SSLCertVerificationError as error:
        return (
            f"shows a certificate that is not trusted ({error.verify_message}): expected one for "
            f"{host}, signed by {_authorities(settings)}"
        )
    except SaslAuthenticationFailed:
        names = ", ".join(variable(name) for name in PASSWORD_SETTINGS)
        return f"refuses user {settings.kafka_username} or the password: see {names}"
    except UnsupportedSaslMechanismError:
        name = variable("kafka_sasl_mechanism")
        return f"does not offer the mechanism that {name} names, {settings.kafka_sasl_mechanism}"
    except IllegalSaslStateError:
        return f"expects no user and password, but {ours}"
    except ssl.SSLError as error:
        return f"does not agree on TLS ({plain(error)}): {ours}"
    except (KafkaError, OSError, TimeoutError):
        # It says nothing, as brokers do that are spoken to in the wrong way, and those that are down.
        if not has_tls(settings):
            return f"expects TLS, but {ours}" if await _speaks_tls(host, port) else None
        if await _speaks_without_tls(host, port):
            return f"does not speak TLS, but {ours}"
        return await _goodbye(settings, host, port, options["ssl_context"])


@asynccontextmanager
async def _connection(host: str, port: int, **options: Any) -> AsyncIterator[AIOKafkaConnection]:
    connection = await create_conn(host, port, request_timeout_ms=_TIMEOUT_S * 1000, **options)
    try:
        yield connection
    finally:
        connection.close()


async def _mechanisms(connection: AIOKafkaConnection) -> list[str]:
    """How a password can be proven here; nothing where none is asked for."""
    answer = await connection.send(SaslHandShakeRequest("PLAIN"))
    return [] if answer.error_code == IllegalSaslStateError.errno else answer.enabled_mechanisms


async def _speaks_without_tls(host: str, port: int) -> bool:
    try:
        async with _connection(host, port, security_protocol="PLAINTEXT"):
            return True
    except (KafkaError, OSError, TimeoutError):
        return False


async def _speaks_tls(host: str, port: int) -> bool:
    """Whether a TLS handshake succeeds, with whomever: nothing is sent afterwards."""
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port, ssl=anybody)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def _goodbye(
    settings: KafkaSettings, host: str, port: int, context: ssl.SSLContext
) -> str | None:
    """What a broker has against our side of TLS: it says so, or just leaves, after the handshake."""
    name, path = variable("kafka_certificate"), settings.kafka_certificate
    given = f"{name} is {path}" if path else f"{name} is not set"
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
    except (OSError, TimeoutError):
        return None
    try:
        # Whatever speaks Kafka waits for us to begin, so this ends only where we are not wanted.
        async with asyncio.timeout(_GOODBYE_TIMEOUT_S):
            await reader.read(1)
        return f"leaves after the TLS handshake, as where it wants a certificate: {given}"
    except ssl.SSLError as error:
        return f"does not want our certificate ({plain(error)}): {given}"
    except (OSError, TimeoutError):
        return None
    finally:
        writer.close()


def _authorities(settings: KafkaSettings) -> str:
    name = variable("kafka_ca")
    if settings.kafka_ca:
        return f"an authority in {name}={settings.kafka_ca}"
    return f"an authority that this system trusts ({name} is not set)"

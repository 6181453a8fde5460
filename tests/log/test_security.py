"""TLS and passwords on the wire: who is let in, and what the others are told."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from faststream.kafka import KafkaMessage

from turnfold.log.client import (
    BrokerUnavailable,
    NotLetIn,
    Producer,
    Reader,
    create_topics,
    delete_topics,
    reader_from_start,
    topic_differences,
)
from turnfold.log.faststream import commit, message_broker
from turnfold.log.settings import KafkaSettings
from turnfold.schemas.settings import variable
from turnfold.schemas.tasks import Task
from turnfold.schemas.testing import task
from turnfold.schemas.topics import Topics

DEADLINE_S = 30.0


async def written_and_read(settings: KafkaSettings) -> list[bytes | None]:
    """Through every kind of client: admin, plain and transactional producer, reader, group."""
    topics = Topics(namespace=f"t{uuid4().hex[:8]}")
    specs = topics.specs(num_partitions=1)
    await create_topics(settings, specs)
    async with Producer(settings) as producer:
        await producer.send_raw(topics.events, key=b"k", value=b"plain")
    producing = Producer(settings, transactional_id=topics.namespace)
    async with producing as producer, producer.transaction():
        await producer.send_raw(topics.events, key=b"k", value=b"transactional")
        await producer.commit_offset(topics.namespace, topics.tasks, 0, 7)
    async with reader_from_start(settings, topics.events) as reader:
        values = [record.value async for record in reader.read_to_end()]
    async with Reader(settings, group=topics.namespace) as reader:
        assert await reader.committed(topics.tasks, 0) == (7, "")
    assert not any((await topic_differences(settings, specs)).values())
    await delete_topics(settings, [spec.name for spec in specs])
    return values


@pytest.mark.parametrize("wanted", ["nothing", "tls", "password", "both", "certificate"])
async def test_every_client_is_let_in_with_what_the_broker_wants(guarded: Any, wanted: str) -> None:
    assert await written_and_read(guarded.right(wanted)) == [b"plain", b"transactional"]


@pytest.mark.parametrize("wanted", ["password", "both"])
async def test_a_password_can_be_proven_without_showing_it(guarded: Any, wanted: str) -> None:
    settings = guarded.right(wanted, kafka_sasl_mechanism="SCRAM-SHA-256")
    assert await written_and_read(settings) == [b"plain", b"transactional"]


@pytest.mark.parametrize(
    ("wanted", "mechanism"),
    [("tls", "PLAIN"), ("password", "PLAIN"), ("both", "PLAIN"), ("both", "SCRAM-SHA-256")],
)
async def test_a_subscriber_and_a_publisher_of_faststream_are_let_in(
    guarded: Any, wanted: str, mechanism: Any
) -> None:
    settings = guarded.right(wanted, kafka_sasl_mechanism=mechanism)
    topics = Topics(namespace=f"t{uuid4().hex[:8]}")
    await create_topics(settings, topics.specs(num_partitions=1))
    broker = message_broker(settings, Task, topics.dead_letters, logger=None)
    received: asyncio.Queue[Task] = asyncio.Queue()

    @broker.subscriber(topics.tasks, group_id=topics.namespace, auto_offset_reset="earliest")
    async def take(body: Task, message: KafkaMessage) -> None:
        await commit(message)
        received.put_nowait(body)

    async with broker:
        await broker.start()
        await broker.publish(task("g"), topic=topics.tasks, key=b"g")
        assert await asyncio.wait_for(received.get(), DEADLINE_S) == task("g")


@pytest.mark.parametrize(
    ("wanted", "changes", "said"),
    [
        ("both", {"kafka_password": "s3cret"}, "refuses user ann.* or the password: see TURNFOLD_"),
        ("both", {"kafka_username": "bob"}, "refuses user bob or the password: see TURNFOLD_KAFKA"),
        (
            "both",
            {"kafka_password": "s3cret", "kafka_sasl_mechanism": "SCRAM-SHA-256"},
            "refuses user ann",
        ),
        (
            "both",
            {"kafka_sasl_mechanism": "SCRAM-SHA-512"},
            "does not offer the mechanism that TURNFOLD_KAFKA_SASL_MECHANISM names, SCRAM-SHA-512",
        ),
        ("tls", {"kafka_ca": ""}, "certificate that is not trusted .*KAFKA_CA is not set"),
        ("certificate", {"kafka_certificate": ""}, "TURNFOLD_KAFKA_CERTIFICATE is not set"),
    ],
)
async def test_who_is_not_let_in_is_told_why(
    guarded: Any, wanted: str, changes: dict[str, str], said: str
) -> None:
    settings = guarded.right(wanted, **changes)
    with pytest.raises(NotLetIn, match=said) as raised:
        await written_and_read(settings)
    assert settings.bootstrap in str(raised.value)
    assert "s3cret" not in str(raised.value)


async def test_certificates_of_others_are_told_from_ours(guarded: Any, papers: Any) -> None:
    with pytest.raises(NotLetIn, match=r"not trusted .*KAFKA_CA=.*strange-ca\.pem"):
        await written_and_read(guarded.right("tls", kafka_ca=str(papers.strange_ca)))
    stranger = guarded.right("certificate", kafka_certificate=str(papers.strange_client))
    with pytest.raises(NotLetIn, match=r"KAFKA_CERTIFICATE is .*stranger\.pem"):
        await written_and_read(stranger)


@pytest.mark.parametrize(
    ("meant", "asked", "said"),
    [
        ("nothing", "tls", "expects TLS, but TURNFOLD_KAFKA_SECURITY_PROTOCOL is PLAINTEXT"),
        ("nothing", "both", "expects TLS, but .* is PLAINTEXT"),
        ("nothing", "password", r"expects a user and a password \(PLAIN, SCRAM-SHA-256\), but"),
        ("tls", "both", "expects a user and a password .* is SSL"),
        ("tls", "nothing", "does not speak TLS, but .* is SSL"),
        ("password", "nothing", "expects no user and password, but .* is SASL_PLAINTEXT"),
        ("password", "tls", "expects TLS, but .* is SASL_PLAINTEXT"),
        ("both", "password", "does not speak TLS, but .* is SASL_SSL"),
        ("both", "tls", "expects no user and password, but .* is SASL_SSL"),
    ],
)
async def test_a_broker_that_expects_something_else_is_found_out(
    guarded: Any, meant: str, asked: str, said: str
) -> None:
    with pytest.raises(NotLetIn, match=said):
        await written_and_read(guarded.as_for(meant, asked))


@pytest.mark.parametrize("meant", ["nothing", "tls", "password", "both", "certificate"])
async def test_a_broker_that_is_down_is_no_matter_of_settings(guarded: Any, meant: str) -> None:
    settings = msgspec.structs.replace(guarded.right(meant), bootstrap="127.0.0.1:1")
    with pytest.raises(BrokerUnavailable, match=r"no Kafka broker answers at 127\.0\.0\.1:1"):
        await written_and_read(settings)


@pytest.mark.parametrize("meant", ["nothing", "tls", "password", "both"])
async def test_something_that_takes_connections_and_says_nothing_is_a_broker_that_is_down(
    guarded: Any, meant: str
) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        settings = msgspec.structs.replace(guarded.right(meant), bootstrap=f"127.0.0.1:{port}")
        with pytest.raises(BrokerUnavailable):
            await written_and_read(settings)


async def test_no_log_line_shows_the_password(
    guarded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings = guarded.right("both")
    with caplog.at_level(logging.DEBUG):
        await written_and_read(settings)
        with pytest.raises(NotLetIn):
            await written_and_read(msgspec.structs.replace(settings, kafka_username="bob"))
    assert settings.kafka_password not in caplog.text


def environment(settings: KafkaSettings) -> dict[str, str]:
    """The variables of these settings."""
    fields = msgspec.structs.asdict(settings)
    return {**os.environ, **{variable(name): value for name, value in fields.items()}}


def turnfold(settings: KafkaSettings, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in an environment with these settings."""
    return subprocess.run(
        [sys.executable, "-m", "turnfold.cli", *arguments],
        env={
            **environment(settings),
            "COLUMNS": "300",
            "TURNFOLD_LOG_LEVEL": "DEBUG",
            "TURNFOLD_CONTROL_KEY": "k",
        },
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_commands_and_the_doctor_use_the_settings_of_the_environment(guarded: Any) -> None:
    settings = guarded.right("both", kafka_sasl_mechanism="SCRAM-SHA-256")
    created = turnfold(settings, "topics", "create")
    assert created.returncode == 0, created.stderr
    seen = turnfold(settings, "doctor")
    assert f"{settings.bootstrap} over SASL_SSL as {settings.kafka_username}" in seen.stdout
    assert "6 topics as they should be" in seen.stdout


@pytest.mark.parametrize(
    "command", ["doctor", "healer", "worker", "replay", "dispatcher", "assembler", "relay"]
)
def test_a_process_that_is_not_let_in_says_so_and_never_says_its_password(
    guarded: Any, command: str
) -> None:
    settings = guarded.right("both", kafka_password="s3cret-but-wrong")
    more = {
        "worker": ("--agent", "turnfold.embedded.chaos.agent:run"),
        "dispatcher": ("--dataset", "examples/doors.jsonl"),
    }
    done = turnfold(settings, command, *more.get(command, ()))
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "or the password: see TURNFOLD_KAFKA_USERNAME" in said
    assert "s3cret" not in said
    assert "Traceback" not in said

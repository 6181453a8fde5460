"""FastStream for the stateless edges: turnfold's codec, and settings that lose nothing.

FastStream's own defaults acknowledge a message before its handler has run, guess the type of a body
that says nothing about itself, skip a body that they cannot decode, and send with acks=1.
`message_broker` changes all four.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec
from aiokafka import TopicPartition
from fast_depends.msgspec import MsgSpecSerializer
from faststream import AckPolicy, BaseMiddleware, ContextRepo
from faststream.kafka import KafkaBroker
from faststream.message import StreamMessage
from faststream.security import BaseSecurity, SASLPlaintext, SASLScram256, SASLScram512

from turnfold.log.connection import client_options
from turnfold.log.settings import Kafka
from turnfold.schemas import codec
from turnfold.schemas.dead_letters import DeadLetter
from turnfold.schemas.topics import MAX_MESSAGE_BYTES
from turnfold.schemas.wire import decode_packed

# The request that carries the largest message is a little larger than the message.
_MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES + 1024 * 1024


def message_broker(kafka: Kafka, kind: Any, dead_letters: str, **options: Any) -> KafkaBroker:
    """A FastStream broker for messages of `kind`, a Struct or a union of tagged Structs.

        PolicyEvent = PolicyPublished | PolicyServed
        broker = message_broker("127.0.0.1:9092", PolicyEvent, "turnfold.dead-letters")

        @broker.subscriber("turnfold.policies", group_id="turnfold-relay")
        async def on_policy(event: PolicyEvent, message: KafkaMessage) -> None:
            ...
            await commit(message)

    A handler commits by itself (AckPolicy.MANUAL): what it has not committed is delivered again
    after a restart. What cannot be decoded goes to the topic `dead_letters`. Topics are never
    created on the way. `options` go to KafkaBroker. Raises SettingsError as `client_options` does.
    """
    connection = client_options(kafka)
    settings: dict[str, Any] = {
        "security": _security(connection),
        "codec": MessageCodec(kind),
        "middlewares": [DeadLetters(dead_letters)],
        "ack_policy": AckPolicy.MANUAL,
        "acks": "all",
        "enable_idempotence": True,
        "compression_type": "zstd",
        "max_request_size": _MAX_REQUEST_BYTES,
        "request_timeout_ms": 20_000,
        "allow_auto_create_topics": False,
        # The codec has already made the handler's argument; this passes it on as it is.
        "serializer": MsgSpecSerializer(use_fastdepends_errors=False, dec_hook=decode_packed),
    }
    return KafkaBroker(connection["bootstrap_servers"].split(","), **(settings | options))


_MECHANISMS = {
    "PLAIN": SASLPlaintext,
    "SCRAM-SHA-256": SASLScram256,
    "SCRAM-SHA-512": SASLScram512,
}


def _security(connection: dict[str, Any]) -> BaseSecurity:
    """TLS and password of `client_options`, as FastStream wants to be told."""
    tls = connection.get("ssl_context")
    if "sasl_mechanism" not in connection:
        return BaseSecurity(ssl_context=tls)
    mechanism = _MECHANISMS[connection["sasl_mechanism"]]
    user, password = connection["sasl_plain_username"], connection["sasl_plain_password"]
    return mechanism(user, password, ssl_context=tls)


async def commit(message: StreamMessage[Any]) -> None:
    """Commit the position after this message, and of its partition alone.

    Raises KafkaError or IllegalStateError when the partition has moved to another member: then the
    message will be delivered there. FastStream's own `ack` commits every partition's position, and
    its middleware only logs the failure.
    """
    record = message.raw_message
    await _commit(message.consumer, record)  # type: ignore[attr-defined]


class MessageCodec:
    """Writes msgpack; reads msgpack, or JSON when the content-type header says so.

    A body that is not a message of `kind` raises CodecError.
    """

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    async def decode(self, msg: StreamMessage[Any]) -> Any:
        return codec.decode(self.kind, msg.body, msg.content_type)

    async def encode(self, msg: Any, serializer: object = None) -> tuple[bytes, str | None]:
        if isinstance(msg, bytes):
            return msg, None
        if not isinstance(msg, msgspec.Struct):
            raise TypeError(f"expected a message (a msgspec Struct), got {type(msg).__name__}")
        return codec.encode(msg), codec.MSGPACK

    async def decode_batch(self, msg: StreamMessage[Sequence[Any]]) -> list[Any]:
        return [
            codec.decode(self.kind, body, headers.get("content-type"))
            for body, headers in zip(msg.body, msg.batch_headers, strict=True)
        ]

    async def encode_batch(
        self, msgs: Sequence[Any], serializer: object = None
    ) -> list[tuple[bytes, str | None]]:
        return [await self.encode(msg, serializer) for msg in msgs]


class DeadLetters:
    """Middleware that keeps a record that could not be decoded, whole, with the reason."""

    def __init__(self, topic: str) -> None:
        self.topic = topic

    def __call__(self, msg: Any, context: ContextRepo) -> BaseMiddleware[Any, Any]:
        return _DeadLetters(self.topic, msg, context=context)


class _DeadLetters(BaseMiddleware[Any, Any]):
    def __init__(self, topic: str, msg: Any, *, context: ContextRepo) -> None:
        super().__init__(msg, context=context)
        self.topic = topic

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> bool | None:
        # UnicodeDecodeError: FastStream decodes all headers as text before the codec is asked.
        if not isinstance(exc_val, codec.CodecError | UnicodeDecodeError):
            return False
        record = self.msg
        letter = DeadLetter(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            reason=str(exc_val),
            key=record.key,
            value=record.value,
            headers=tuple(record.headers),
            at=record.timestamp / 1000,
        )
        key = f"{record.topic}/{record.partition}@{record.offset}".encode()
        await self.context.get("broker").publish(letter, topic=self.topic, key=key)
        await _commit(self.context.get("handler_").consumer, record)
        return True


async def _commit(consumer: Any, record: Any) -> None:
    await consumer.commit({TopicPartition(record.topic, record.partition): record.offset + 1})

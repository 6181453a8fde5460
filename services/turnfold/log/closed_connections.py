"""aiokafka on uvloop: writes to a connection that has just closed."""

from __future__ import annotations

from typing import Any

from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaConnectionError

_write: Any = AIOKafkaConnection.send


def expect_closed_connections() -> None:
    """Make such a write the KafkaConnectionError after which aiokafka repeats the request.

    asyncio takes the write and says that the connection is lost a little later. uvloop raises a
    RuntimeError, which aiokafka expects nowhere: the task that fetches or sends would end for good,
    and the consumer give nothing, or the producer take nothing, until the process is started again.
    """
    AIOKafkaConnection.send = _send


def _send(self: Any, request: Any, expect_response: bool = True) -> Any:
    try:
        return _write(self, request, expect_response)
    except RuntimeError as error:
        self.close(reason=CloseReason.CONNECTION_BROKEN)
        raise KafkaConnectionError(
            f"Connection at {self.host}:{self.port} broken: {error}"
        ) from error

"""What the gateway needs of a protocol; a module with these names is one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from turnfold.gateway.calls import Answer, AnswerHead, ModelCall
from turnfold.gateway.protocols.answer_stream import AnswerStream
from turnfold.gateway.refusals import Refusal


class ModelProtocol(Protocol):
    """Translates one protocol; has no state and does no I/O."""

    NAME: str
    """As recorded on the turn."""
    KEEPALIVE: bytes
    """Sent in a stream while there is nothing to say."""

    def read_call(self, body: bytes) -> ModelCall:
        """The request. Raises Refusal naming the field that is wrong or not supported."""

    def answer_body(self, answer: Answer, call: ModelCall) -> bytes:
        """The whole response, as JSON; `call` is what it answers."""

    def answer_events(self, answer: Answer, call: ModelCall) -> Iterator[bytes]:
        """The response as server-sent events, the closing one included."""

    def begin_stream(self, head: AnswerHead, call: ModelCall) -> AnswerStream:
        """The same while the answer comes."""

    def error_body(self, refusal: Refusal, request_id: str) -> bytes:
        """The error object of the protocol, as JSON."""

    def error_event(self, refusal: Refusal, request_id: str) -> bytes:
        """The error as the last server-sent event of a stream in which no answer has begun."""


class CountingProtocol(ModelProtocol, Protocol):
    """A protocol that also says how long a prompt is."""

    def read_count(self, body: bytes) -> ModelCall:
        """The call whose prompt is counted. Raises Refusal."""

    def count_body(self, num_prompt_tokens: int) -> bytes:
        """The number, as JSON."""


class StoringProtocol(ModelProtocol, Protocol):
    """A protocol in which an answer can be asked for again."""

    def read_retrieval(
        self, response_id: str, query: Iterable[tuple[str, str]]
    ) -> tuple[str, ModelCall]:
        """The turn that is meant, and the call that it answers. Raises Refusal."""

"""Endpoints of the model APIs: a request becomes a turn, answered whole or as a stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from turnfold.gateway import keys, metrics
from turnfold.gateway.calls import Answer, ModelCall
from turnfold.gateway.http.errors import error_response, refusal_of, request_id_headers
from turnfold.gateway.http.requests import (
    api_key,
    harness,
    is_retry,
    read_body,
    until_disconnected,
)
from turnfold.gateway.keys import SessionKey
from turnfold.gateway.protocols.protocol import CountingProtocol, ModelProtocol
from turnfold.gateway.refusals import Refusal
from turnfold.gateway.rollouts.app import Flight
from turnfold.gateway.settings import Settings
from turnfold.gateway.turns.app import CallContext, ModelCalls

Endpoint = Callable[[Request], Awaitable[Response]]


class ModelEndpoints:
    """The same for every protocol; whatever goes wrong is told in the protocol's own words."""

    def __init__(self, calls: ModelCalls, settings: Settings) -> None:
        self.calls = calls
        self.settings = settings

    def model_call(self, protocol: ModelProtocol) -> Endpoint:
        """The endpoint that answers a call of the protocol."""

        async def answered(request: Request) -> Response:
            with metrics.IN_FLIGHT.track_inprogress():
                return await self._model_call(request, protocol)

        return _told(answered, protocol)

    def prompt_count(self, protocol: CountingProtocol) -> Endpoint:
        """The endpoint that says how long the prompt of a call of the protocol would be."""

        async def counted(request: Request) -> Response:
            context = self._context(request)
            body = await read_body(request, self.settings.max_body_bytes)
            call = await asyncio.to_thread(protocol.read_count, body)
            number = await self.calls.count_prompt_tokens(call, context)
            return _json_bytes(protocol.count_body(number), request_id_of(request))

        return _told(counted, protocol)

    def session_key(self, request: Request) -> SessionKey:
        """Whose call it is. Raises KeyRefused."""
        return keys.verify(api_key(request), self.settings.key_secret, time.time())

    def _context(self, request: Request) -> CallContext:
        return CallContext(
            key=self.session_key(request),
            idempotency_key=request.headers.get("idempotency-key", ""),
            is_retry=is_retry(request),
            harness=harness(request),
        )

    async def _model_call(self, request: Request, protocol: ModelProtocol) -> Response:
        context = self._context(request)
        body = await read_body(request, self.settings.max_body_bytes)
        call = await asyncio.to_thread(protocol.read_call, body)
        flight = await self.calls.join(call, context)
        is_handed_on = False
        try:
            gone = asyncio.create_task(until_disconnected(request))
            try:
                await _wait(flight, gone, self._patience_s(call))
            finally:
                gone.cancel()
            if flight.task is not None and flight.task.done():
                return self._whole_response(request, protocol, call, _result(flight))
            if gone.done() and not gone.cancelled():
                return Response(status_code=499)
            is_handed_on = True
            events = self._live_events(request, protocol, call, flight)
            return _event_stream(events, request_id_of(request))
        finally:
            if not is_handed_on:
                self.calls.leave(flight)

    def _patience_s(self, call: ModelCall) -> float | None:
        """How long to wait for the turn before a stream is begun without it."""
        return self.settings.stream_keepalive_s if call.is_streamed else None

    def _whole_response(
        self, request: Request, protocol: ModelProtocol, call: ModelCall, answer: Answer
    ) -> Response:
        request_id = request_id_of(request)
        if not call.is_streamed:
            return _json_bytes(protocol.answer_body(answer, call), request_id)

        async def events() -> AsyncIterator[bytes]:
            for event in protocol.answer_events(answer, call):
                yield event

        return _event_stream(events(), request_id)

    async def _live_events(
        self, request: Request, protocol: ModelProtocol, call: ModelCall, flight: Flight
    ) -> AsyncIterator[bytes]:
        """Signs of life while the engine is silent, then the answer, or the error as an event."""
        request_id = request_id_of(request)
        assert flight.task is not None
        metrics.IN_FLIGHT.inc()
        try:
            while not flight.task.done():
                yield protocol.KEEPALIVE
                await asyncio.wait({flight.task}, timeout=self.settings.stream_keepalive_s)
            for event in protocol.answer_events(_result(flight), call):
                yield event
        except Exception as error:
            yield protocol.error_event(refusal_of(error, request_id), request_id)
        finally:
            metrics.IN_FLIGHT.dec()
            self.calls.leave(flight)


def request_id_of(request: Request) -> str:
    """Made up once for each request."""
    if not hasattr(request.state, "request_id"):
        request.state.request_id = f"req_{uuid.uuid4().hex}"
    return str(request.state.request_id)


def _told(endpoint: Endpoint, protocol: ModelProtocol) -> Endpoint:
    """The endpoint with every error as the protocol's own."""

    async def told(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:
            request_id = request_id_of(request)
            refusal = refusal_of(error, request_id)
            return error_response(protocol.error_body(refusal, request_id), refusal, request_id)

    return told


async def _wait(flight: Flight, gone: asyncio.Task[None], timeout_s: float | None) -> None:
    assert flight.task is not None
    await asyncio.wait({flight.task, gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


def _result(flight: Flight) -> Answer:
    """The answer of a turn that is done. Raises what the turn raised."""
    assert flight.task is not None
    if flight.task.cancelled():
        raise Refusal(
            "conflict", "the rollout ended while this turn was made", code="rollout_closed"
        )
    return flight.task.result()


def _json_bytes(body: bytes, request_id: str) -> Response:
    return Response(body, 200, request_id_headers(request_id), media_type="application/json")


def _event_stream(events: AsyncIterator[bytes], request_id: str) -> Response:
    headers = {
        **request_id_headers(request_id),
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
    }
    return StreamingResponse(events, 200, headers, media_type="text/event-stream")

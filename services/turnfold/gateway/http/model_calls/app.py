"""Endpoints of the model APIs: a request becomes a turn, answered whole or as a stream."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from types import MappingProxyType

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from turnfold.gateway import keys, metrics
from turnfold.gateway.calls import Answer, ModelCall
from turnfold.gateway.http.errors import error_response, refusal_of, request_id_headers
from turnfold.gateway.http.limits import CallLimits
from turnfold.gateway.http.model_calls.flight_events import FlightEvents
from turnfold.gateway.http.requests import (
    api_key,
    harness,
    is_retry,
    read_body,
    until_disconnected,
)
from turnfold.gateway.keys import SessionKey
from turnfold.gateway.protocols.protocol import CountingProtocol, ModelProtocol, StoringProtocol
from turnfold.gateway.refusals import Refusal
from turnfold.gateway.rollouts.app import Flight
from turnfold.gateway.settings import Settings
from turnfold.gateway.threads.app import off_loop
from turnfold.gateway.tracing import call_span, within
from turnfold.gateway.turns.app import CallContext, ModelCalls

Endpoint = Callable[[Request], Awaitable[Response]]


class ModelEndpoints:
    """The same for every protocol; whatever goes wrong is told in the protocol's own words."""

    def __init__(self, calls: ModelCalls, settings: Settings) -> None:
        self.calls = calls
        self.settings = settings
        self._limits = CallLimits(
            calls_per_minute=settings.calls_per_minute,
            calls_at_once=settings.calls_at_once,
            clock=time.time,
        )

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
            call = await off_loop(len(body), protocol.read_count, body)
            number = await self.calls.count_prompt_tokens(call, context)
            return _json_bytes(protocol.count_body(number), request_id_of(request))

        return _told(counted, protocol)

    def recorded_response(self, protocol: StoringProtocol) -> Endpoint:
        """The endpoint that gives the answer of a turn again."""

        async def given_again(request: Request) -> Response:
            context, request_id = self._context(request), request_id_of(request)
            turn_id, call = protocol.read_retrieval(
                request.path_params["response_id"], request.query_params.multi_items()
            )
            answer = await self.calls.recorded_answer(
                turn_id, context, has_logprobs=call.has_logprobs
            )
            if not call.is_streamed:
                return _json_bytes(protocol.answer_body(answer, call), request_id)
            body = b"".join(protocol.answer_events(answer, call))
            headers = request_id_headers(request_id)
            return Response(body, 200, headers, media_type="text/event-stream")

        return _told(given_again, protocol)

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
        context, request_id = self._context(request), request_id_of(request)
        with ExitStack() as held:
            held.enter_context(self._limits.call(context.key))
            span = held.enter_context(call_span(protocol.NAME, request_id, request.headers))
            body = await read_body(request, self.settings.max_body_bytes)
            call = await off_loop(len(body), protocol.read_call, body)
            with within(span):
                flight = await self.calls.join(call, context)
            held.callback(self.calls.leave, flight)
            gone = asyncio.create_task(until_disconnected(request))
            try:
                await self._first_news(flight, gone, call)
            finally:
                gone.cancel()
            if flight.is_landed:
                answer = _result(flight)  # an error has its status while nothing is sent yet
                if not call.is_streamed:
                    body = protocol.answer_body(answer, call)
                    return _json_bytes(body, request_id, _unenforced_header(call))
            elif gone.done() and not gone.cancelled():
                return Response(status_code=499)
            events = self._events(request_id, protocol, call, flight)
            return _EventStream(events, request_id, held.pop_all(), _unenforced_header(call))

    async def _first_news(self, flight: Flight, gone: asyncio.Task[None], call: ModelCall) -> None:
        """Return when there is something to answer with, or nobody to answer.

        A stream is begun without anything to say after a while, lest the client give up.
        """
        assert flight.task is not None
        if not call.is_streamed:
            await asyncio.wait({flight.task, gone}, return_when=asyncio.FIRST_COMPLETED)
            return
        news = asyncio.create_task(flight.news(num_known=0))
        patience_s = self.settings.stream_keepalive_s
        try:
            await asyncio.wait(
                {news, gone}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            news.cancel()

    async def _events(
        self, request_id: str, protocol: ModelProtocol, call: ModelCall, flight: Flight
    ) -> AsyncIterator[bytes]:
        """The answer as it comes, with signs of life while there is nothing to say, or the error.

        What ends it is sent once the log has acknowledged the turn.
        """
        events = FlightEvents(protocol, call, flight)
        loop = asyncio.get_running_loop()
        silent_at = loop.time()
        metrics.IN_FLIGHT.inc()
        try:
            while not flight.is_landed:
                due = events.due()
                if not due:
                    try:
                        async with asyncio.timeout_at(silent_at):
                            await flight.news(events.num_known)
                        continue
                    except TimeoutError:
                        due = protocol.KEEPALIVE
                yield due
                silent_at = loop.time() + self.settings.stream_keepalive_s
            if due := events.due():
                yield due
            yield events.end(_result(flight))
        except Exception as error:
            yield events.error(refusal_of(error, request_id), request_id)
        finally:
            metrics.IN_FLIGHT.dec()


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


def _result(flight: Flight) -> Answer:
    """The answer of a turn that is done. Raises what the turn raised."""
    assert flight.task is not None
    if flight.task.cancelled():
        raise Refusal(
            "conflict", "the rollout ended while this turn was made", code="rollout_closed"
        )
    return flight.task.result()


def _unenforced_header(call: ModelCall) -> dict[str, str]:
    """What the request asked for and the answer was not held to."""
    names = ", ".join(constraint.field for constraint in call.constraints)
    return {"x-turnfold-unenforced": names} if names else {}


def _json_bytes(
    body: bytes, request_id: str, headers: Mapping[str, str] = MappingProxyType({})
) -> Response:
    headers = {**request_id_headers(request_id), **headers}
    return Response(body, 200, headers, media_type="application/json")


class _EventStream(StreamingResponse):
    """A response in events; `held` is let go of when it is over, begun or not."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        request_id: str,
        held: ExitStack,
        headers: Mapping[str, str],
    ) -> None:
        headers = {
            **headers,
            **request_id_headers(request_id),
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        super().__init__(events, 200, headers, media_type="text/event-stream")
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)

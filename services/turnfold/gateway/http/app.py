"""HTTP of the gateway: model calls, control API, health, metrics."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from turnfold.gateway import keys
from turnfold.gateway.backends.kinds import engines_of
from turnfold.gateway.backends.model_directory import ModelDirectory
from turnfold.gateway.backends.replicas import ReplicatedEngines
from turnfold.gateway.client import EventLog, LogUnavailable
from turnfold.gateway.control import (
    AbortRollout,
    Control,
    FinishRollout,
    OpenSession,
    ReviseReward,
    StartRollout,
)
from turnfold.gateway.http.errors import error_response, refusal_of, request_id_headers
from turnfold.gateway.http.model_calls.app import Endpoint, ModelEndpoints, request_id_of
from turnfold.gateway.http.requests import bearer, decode, read_body
from turnfold.gateway.parsing.replies import ReplyFormat
from turnfold.gateway.protocols import anthropic_messages, openai_chat, openai_responses
from turnfold.gateway.protocols.protocol import ModelProtocol
from turnfold.gateway.refusals import Refusal, invalid
from turnfold.gateway.rollouts.app import Entry, RolloutStore
from turnfold.gateway.settings import Settings
from turnfold.gateway.turns.app import ModelCalls
from turnfold.gateway.turns.pinning import compile_pins

_CURRENT = "current"
"""In a path: the rollout of the key that came with the request."""

B = TypeVar("B")


class Gateway:
    """The parts of one gateway process, connected.

    async with open_gateway(settings, model, reply_format) as gateway:
        app = create_app(gateway)
    """

    def __init__(
        self,
        settings: Settings,
        model: ModelDirectory,
        engines: ReplicatedEngines,
        store: RolloutStore,
        reply_format: ReplyFormat,
    ) -> None:
        self.settings = settings
        self.model_name = settings.model_name or model.name
        self.engines = engines
        self.store = store
        self.calls = ModelCalls(
            store=store,
            engines=engines,
            renderer=model.renderer,
            reply_format=reply_format,
            pins=compile_pins(settings.pinned_patterns),
            unenforced=settings.unenforced,
            clock=time.time,
            new_id=_new_id,
        )
        self.control = Control(
            store=store,
            key_secret=settings.key_secret,
            key_ttl_s=settings.key_ttl_s,
            history_mode=settings.history_mode,
            nonlinear=settings.nonlinear,
            rewrites=settings.rewrites,
            clock=time.time,
            new_id=_new_id,
        )


@asynccontextmanager
async def open_gateway(
    settings: Settings, model: ModelDirectory, reply_format: ReplyFormat
) -> AsyncIterator[Gateway]:
    """Connect to Kafka and the engines. Raises BrokerUnavailable and MissingTopic."""
    engines = engines_of(
        settings.engine_kind,
        settings.engines,
        vocab_size=model.vocab_size,
        timeout_s=settings.engine_timeout_s,
    )
    store = RolloutStore(settings.max_rollouts)
    try:
        async with EventLog(settings, settings.topics.events, store.on_event) as events:
            store.events = events
            gateway = Gateway(settings, model, engines, store, reply_format)
            yield gateway
            await gateway.calls.drain()
    finally:
        await engines.aclose()


def create_app(gateway: Gateway) -> Starlette:
    """The ASGI application; `/v1/v1/…` is what SDKs make of a base URL that has the version too."""
    models = ModelEndpoints(gateway.calls, gateway.settings)
    http = _Http(gateway, models)
    routes = [
        Route("/healthz", http.healthz),
        Route("/readyz", http.readyz),
        Route("/metrics", http.metrics),
    ]
    posted: dict[str, Endpoint] = {
        "chat/completions": models.model_call(openai_chat),
        "responses": models.model_call(openai_responses),
        "responses/input_tokens": models.prompt_count(openai_responses),
        "messages": models.model_call(anthropic_messages),
        "messages/count_tokens": models.prompt_count(anthropic_messages),
    }
    for prefix in ("/v1", "/v1/v1"):
        rollout = f"{prefix}/rollouts/{{rollout_id}}"
        routes += [Route(f"{prefix}/{path}", posted[path], methods=["POST"]) for path in posted]
        routes += [
            Route(
                f"{prefix}/responses/{{response_id}}", models.recorded_response(openai_responses)
            ),
            Route(f"{prefix}/models", http.list_models),
            Route(f"{prefix}/models/{{model:path}}", http.show_model),
            Route(f"{prefix}/rollouts", http.start, methods=["POST"]),
            Route(rollout, http.inspect),
            Route(f"{rollout}/finish", http.finish, methods=["POST"]),
            Route(f"{rollout}/abort", http.abort, methods=["POST"]),
            Route(f"{rollout}/reward", http.reward, methods=["POST"]),
            Route(f"{rollout}/sessions", http.sessions, methods=["POST"]),
        ]
    return Starlette(
        routes=routes,
        exception_handlers={HTTPException: _http_error, Exception: _internal_error},
    )


class _Http:
    """Endpoints; each turns a request into a call of the parts and a result into a response."""

    def __init__(self, gateway: Gateway, models: ModelEndpoints) -> None:
        self.gateway = gateway
        self.models = models
        self.settings = gateway.settings

    async def healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(self, request: Request) -> Response:
        num_engines = await self.gateway.engines.num_reachable()
        is_log_reachable = await _is_answering(self.gateway.store.events)
        body = {
            "engines": f"{num_engines} of {len(self.gateway.engines.urls)}",
            "log": "reachable" if is_log_reachable else "not reachable",
        }
        return _json(body, 200 if num_engines and is_log_reachable else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def list_models(self, request: Request) -> Response:
        """One list for both kinds of SDKs: OpenAI's names and, after them, Anthropic's."""
        name = self.gateway.model_name
        page = {"has_more": False, "first_id": name, "last_id": name}
        return _json({"object": "list", "data": [await self._model(name)], **page})

    async def show_model(self, request: Request) -> Response:
        """The model under whatever name is asked for, as a call may give it any name."""
        return _json(await self._model(request.path_params["model"]))

    async def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "turnfold",
            "max_model_len": await self.gateway.engines.max_context_tokens(),
            "type": "model",
            "display_name": name,
            "created_at": "1970-01-01T00:00:00Z",
        }

    async def start(self, request: Request) -> Response:
        async def work(body: StartRollout) -> dict[str, Any]:
            return await self.gateway.control.start(body, self._base_url(request))

        return await self._controlled(request, lambda: self._with_body(request, StartRollout, work))

    async def finish(self, request: Request) -> Response:
        return await self._on_rollout(request, FinishRollout, self.gateway.control.finish)

    async def abort(self, request: Request) -> Response:
        return await self._on_rollout(request, AbortRollout, self.gateway.control.abort)

    async def reward(self, request: Request) -> Response:
        return await self._on_rollout(
            request, ReviseReward, self.gateway.control.revise, is_own_key_enough=False
        )

    async def sessions(self, request: Request) -> Response:
        async def work(entry: Entry, body: OpenSession) -> dict[str, Any]:
            return await self.gateway.control.open_session(entry, body, self._base_url(request))

        return await self._on_rollout(request, OpenSession, work)

    async def inspect(self, request: Request) -> Response:
        async def work() -> dict[str, Any]:
            entry = await self._entry(request)
            return await self.gateway.control.inspect(entry)

        return await self._answered(request, work)

    async def _controlled(
        self, request: Request, work: Callable[[], Awaitable[dict[str, Any]]]
    ) -> Response:
        """Work that only the control key may ask for."""

        async def checked() -> dict[str, Any]:
            if not self._is_control_key(bearer(request)):
                raise Refusal("authentication", "the control key is wrong", code="invalid_api_key")
            return await work()

        return await self._answered(request, checked)

    async def _on_rollout(
        self,
        request: Request,
        kind: type[B],
        work: Callable[[Entry, B], Awaitable[dict[str, Any]]],
        *,
        is_own_key_enough: bool = True,
    ) -> Response:
        async def with_entry() -> dict[str, Any]:
            entry = await self._entry(request, is_own_key_enough=is_own_key_enough)
            return await self._with_body(request, kind, lambda body: work(entry, body))

        return await self._answered(request, with_entry)

    async def _with_body(
        self, request: Request, kind: type[B], work: Callable[[B], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        return await work(decode(await read_body(request, self.settings.max_body_bytes), kind))

    async def _answered(
        self, request: Request, work: Callable[[], Awaitable[dict[str, Any]]]
    ) -> Response:
        request_id = request_id_of(request)
        try:
            return _json(await work(), headers=request_id_headers(request_id))
        except Exception as error:
            refusal = refusal_of(error, request_id)
            body = openai_chat.error_body(refusal, request_id)
            return error_response(body, refusal, request_id)

    async def _entry(self, request: Request, *, is_own_key_enough: bool = True) -> Entry:
        """The rollout of the path, for the control key or the rollout's own."""
        asked = request.path_params["rollout_id"]
        given = bearer(request)
        if self._is_control_key(given):
            if asked == _CURRENT:
                raise invalid("`current` is the rollout of a session key; name it", "rollout_id")
            return await self.gateway.store.find(asked)
        key = self.models.session_key(request)
        if asked not in (_CURRENT, key.rollout_id) or not is_own_key_enough:
            raise Refusal(
                "permission", "this key gives no access to that", code="insufficient_permissions"
            )
        return await self.gateway.store.get(key.rollout_id, key.partition, key.offset)

    def _is_control_key(self, given: str) -> bool:
        return keys.matches(given, self.settings.control_key)

    def _base_url(self, request: Request) -> str:
        root = self.settings.public_url or str(request.base_url)
        return f"{root.rstrip('/')}/v1"


async def _is_answering(events: EventLog) -> bool:
    try:
        async with asyncio.timeout(2):
            await events.catch_up(0)
    except (LogUnavailable, TimeoutError):
        return False
    return True


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, in the form of the APIs spoken here."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    refusal = Refusal("not_found", f"{request.method} {path} does not exist here", code="not_found")
    request_id = request_id_of(request)
    protocol: ModelProtocol = anthropic_messages if "/messages" in path else openai_chat
    response = error_response(protocol.error_body(refusal, request_id), refusal, request_id)
    response.status_code = error.status_code
    return response


async def _internal_error(request: Request, error: Exception) -> Response:
    request_id = request_id_of(request)
    refusal = refusal_of(error, request_id)
    return error_response(openai_chat.error_body(refusal, request_id), refusal, request_id)


def _new_id() -> str:
    return uuid.uuid4().hex


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")

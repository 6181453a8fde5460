"""The HTTP server: vLLM's token-in, token-out and control endpoints over one engine."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from turnfold.embedded.inference.engine import Engine, EngineStoppedError, PauseMode
from turnfold.embedded.inference.sampling import SampledToken
from turnfold.embedded.inference.sequences import Completion, GenerationRequest
from turnfold.embedded.inference.server import protocol
from turnfold.embedded.inference.server.metrics import exposition
from turnfold.embedded.inference.server.protocol import ApiError
from turnfold.embedded.inference.weights import WeightsError, read_weights

T = TypeVar("T")

PAUSE_MODES = ("abort", "wait", "keep")
CLIENT_CLOSED_REQUEST = 499
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class ServedModel:
    """What the server says about the model it serves."""

    name: str
    directory: Path
    started_at: int
    """Unix seconds."""
    has_tokenizer: bool


def create_app(engine: Engine, model: ServedModel, *, server_version: str) -> Starlette:
    """The ASGI application over a running engine."""
    api = _Api(engine, model, server_version)
    return Starlette(
        routes=[
            Route("/inference/v1/generate", api.generate, methods=["POST"]),
            Route("/inference/v1/abort_requests", api.abort_requests, methods=["POST"]),
            Route("/abort_requests", api.abort_any, methods=["POST"]),
            Route("/pause", api.pause, methods=["POST"]),
            Route("/resume", api.resume, methods=["POST"]),
            Route("/is_paused", api.is_paused),
            Route("/collective_rpc", api.collective_rpc, methods=["POST"]),
            Route("/update_weight_version", api.update_weight_version, methods=["POST"]),
            Route("/weight_info", api.weight_info),
            Route("/reset_prefix_cache", api.reset_prefix_cache, methods=["POST"]),
            Route("/health", api.health),
            Route("/version", api.version),
            Route("/v1/models", api.models),
            Route("/metrics", api.metrics),
        ],
        exception_handlers={
            ApiError: _api_error,
            EngineStoppedError: _engine_stopped,
            HTTPException: _http_error,
            ClientDisconnect: _client_left,
            Exception: _internal_error,
        },
    )


class _Api:
    """The endpoints. Each one only translates: the engine does the work on its own thread."""

    def __init__(self, engine: Engine, model: ServedModel, server_version: str) -> None:
        self._engine, self._model, self._server_version = engine, model, server_version
        self._reloading = asyncio.Lock()

    async def generate(self, request: Request) -> Response:
        body = await _decode(request, protocol.GenerateBody)
        generation = self._checked(request, body)
        if body.stream:
            chunks = self._stream(body, generation)
            return StreamingResponse(chunks, media_type="text/event-stream")
        future = self._engine.submit(generation)
        completion = await self._completed(request, generation.request_id, future)
        if completion is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        choice = protocol.choice(completion, with_logprobs=_wants_logprobs(body))
        response = self._response(body, generation, [choice])
        response.usage = protocol.usage(completion)
        return _json(response)

    async def abort_requests(self, request: Request) -> Response:
        body = await _decode(request, protocol.AbortBody)
        if body.request_ids is None:
            raise ApiError("request_ids should be a list of request ids", param="request_ids")
        await _result(self._engine.abort(body.request_ids))
        return Response()

    async def abort_any(self, request: Request) -> Response:
        body = await _decode(request, protocol.AbortBody)
        num_aborted = await _result(self._engine.abort(body.request_ids))
        return _json({"status": "aborted", "aborted": num_aborted})

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise ApiError(
                f"mode is {mode!r}, expected one of {', '.join(PAUSE_MODES)}", param="mode"
            )
        await _result(self._engine.pause(cast(PauseMode, mode)))
        if request.query_params.get("clear_cache", "true").lower() != "false":
            await _result(self._engine.reset_prefix_cache())
        return _json({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await _result(self._engine.resume())
        return _json({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return _json({"is_paused": self._engine.is_paused})

    async def collective_rpc(self, request: Request) -> Response:
        body = await _decode(request, protocol.RpcBody)
        if body.method != "reload_weights":
            raise ApiError(f"method is {body.method!r}, expected 'reload_weights'", param="method")
        path = body.kwargs.weights_path
        directory = self._model.directory if path is None else Path(path)
        async with self._reloading:
            await _result(await asyncio.to_thread(self._swap_weights, directory))
        return _json({"results": [None]})

    async def update_weight_version(self, request: Request) -> Response:
        body = await _decode(request, protocol.VersionBody)
        await _result(self._engine.set_version(body.new_version))
        return _json({"success": True, "new_version": body.new_version})

    async def weight_info(self, request: Request) -> Response:
        return _json({"weight_version": self._engine.version})

    async def reset_prefix_cache(self, request: Request) -> Response:
        await _result(self._engine.reset_prefix_cache())
        return _json({"success": True})

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self._engine.is_alive else 503)

    async def version(self, request: Request) -> Response:
        return _json({"version": self._server_version})

    async def models(self, request: Request) -> Response:
        card = {
            "id": self._model.name,
            "object": "model",
            "created": self._model.started_at,
            "owned_by": "turnfold",
            "root": str(self._model.directory),
            "max_model_len": self._engine.model.max_len,
        }
        return _json({"object": "list", "data": [card]})

    async def metrics(self, request: Request) -> Response:
        return Response(exposition(self._engine), media_type=PROMETHEUS_TEXT)

    def _checked(self, request: Request, body: protocol.GenerateBody) -> GenerationRequest:
        """The engine's request. Raises ApiError for what the model or the engine can't do."""
        if body.model is not None and body.model != self._model.name:
            raise ApiError(
                f"The model `{body.model}` does not exist; this server serves `{self._model.name}`",
                status=404,
                param="model",
            )
        served = self._engine.model
        protocol.check_prompt(
            body.token_ids, vocab_size=served.vocab_size, max_model_len=served.max_len
        )
        params = protocol.sampling_params(body.sampling_params)
        if params.stop and not self._model.has_tokenizer:
            raise ApiError(
                f"stop strings need a tokenizer, and {self._model.directory} has none", param="stop"
            )
        own_id = request.headers.get("x-request-id") or body.request_id or uuid.uuid4().hex
        return GenerationRequest(
            request_id=protocol.REQUEST_ID_PREFIX + own_id,
            prompt_ids=tuple(body.token_ids),
            params=params,
            cache_salt=body.cache_salt,
        )

    async def _completed(
        self, request: Request, request_id: str, future: "Future[Completion]"
    ) -> Completion | None:
        """The completion; None when the client left first, which frees its slot at once."""
        completion = asyncio.ensure_future(_result(future))
        client_left = asyncio.ensure_future(_until_disconnected(request))
        try:
            await asyncio.wait({completion, client_left}, return_when=asyncio.FIRST_COMPLETED)
            if completion.done():
                return completion.result()
            return None
        finally:
            if not completion.done():
                self._engine.abort([request_id])
            for task in (completion, client_left):
                task.cancel()

    async def _stream(
        self, body: protocol.GenerateBody, generation: GenerationRequest
    ) -> AsyncIterator[bytes]:
        """Server-sent events: one chunk per token, then the usage if it was asked for.

        The last token's chunk carries finish reason and versions. When the client leaves, this
        generator is closed, which frees the slot.
        """
        tokens = _TokenQueue()
        future = self._engine.submit(generation, tokens.put_threadsafe)
        future.add_done_callback(lambda _: tokens.put_threadsafe(None))
        try:
            held: SampledToken | None = None
            async for token in tokens:
                if held is not None:
                    yield _event(self._response(body, generation, [_delta(body, (held,))]))
                held = token
            completion = await _result(future)
        finally:
            if not future.done():
                self._engine.abort([generation.request_id])
        last = _delta(body, () if held is None else (held,), completion)
        yield _event(self._response(body, generation, [last]))
        if body.stream_options is not None and body.stream_options.include_usage:
            closing = self._response(body, generation, [])
            closing.usage = protocol.usage(completion)
            yield _event(closing)
        yield b"data: [DONE]\n\n"

    def _response(
        self,
        body: protocol.GenerateBody,
        generation: GenerationRequest,
        choices: list[protocol.ChoiceBody],
    ) -> protocol.GenerateResponse:
        return protocol.GenerateResponse(
            request_id=generation.request_id,
            model=self._model.name,
            created=int(time.time()),
            choices=choices,
            prompt_token_ids=body.token_ids if body.return_token_ids else None,
        )

    def _swap_weights(self, directory: Path) -> "Future[None]":
        """Read and check new weights, off the event loop, and hand them to the engine."""
        try:
            return self._engine.load_weights(read_weights(directory))
        except WeightsError as error:
            raise ApiError(
                f"weights were not reloaded, the old ones go on serving: {error}",
                param="weights_path",
            ) from error


class _TokenQueue:
    """Carries tokens from the engine's thread to the event loop. Iteration ends at None."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tokens: asyncio.Queue[SampledToken | None] = asyncio.Queue()

    def put_threadsafe(self, token: SampledToken | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tokens.put_nowait, token)

    async def __aiter__(self) -> AsyncIterator[SampledToken]:
        while (token := await self._tokens.get()) is not None:
            yield token


def _delta(
    body: protocol.GenerateBody,
    tokens: tuple[SampledToken, ...],
    completion: Completion | None = None,
) -> protocol.ChoiceBody:
    """What these tokens add to the stream; with the completion, how it ended too."""
    delta = protocol.ChoiceBody(
        token_ids=[token.token_id for token in tokens],
        logprobs=protocol.logprobs(tokens) if _wants_logprobs(body) else None,
    )
    if completion is not None:
        delta.finish_reason, delta.stop_reason = completion.finish_reason, completion.stop_reason
        delta.weight_versions = protocol.weight_versions(completion)
    return delta


def _wants_logprobs(body: protocol.GenerateBody) -> bool:
    return body.sampling_params.logprobs is not None


async def _decode(request: Request, body_type: Callable[..., T]) -> T:
    """The request's JSON body as a struct. Raises ApiError that says what was expected where."""
    try:
        decoded: T = msgspec.json.decode(await request.body() or b"{}", type=cast(Any, body_type))
        return decoded
    except msgspec.DecodeError as error:
        raise ApiError(f"the request body is not as expected: {error}") from error


async def _result(future: "Future[T]") -> T:
    return await asyncio.wrap_future(future)


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")


def _event(chunk: protocol.GenerateResponse) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(protocol.error_body(error), error.status)


async def _engine_stopped(request: Request, error: Exception) -> Response:
    return _json(protocol.error_body(ApiError(str(error), status=503)), 503)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _json(
        protocol.error_body(ApiError(message, status=error.status_code)), error.status_code
    )


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _internal_error(request: Request, error: Exception) -> Response:
    message = "internal error; the server's log has the details"
    return _json(protocol.error_body(ApiError(message, status=500)), 500)

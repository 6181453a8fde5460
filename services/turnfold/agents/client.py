"""The gateway's control API for agents in Python.

    async with GatewayClient("http://127.0.0.1:8080", control_key) as gateway:
        async with gateway.rollout(group_id="g1", payload={"question": "1+1"}) as rollout:
            client = rollout.openai()           # or rollout.anthropic(), or rollout.http()
            ...
            await rollout.finish(1.0)

Every call is repeated while the gateway is away, for at most `patience_s` seconds: all of them may
be sent twice, so a restart of the gateway loses no rollout.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import httpx
import msgspec

from turnfold.agents.deadlines import Deadlines
from turnfold.agents.results import EnvironmentFailed, SetUpTimedOut
from turnfold.schemas import codec
from turnfold.schemas.tasks import Task

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_NUM_RETRIES = 8
"""Of an SDK's call: they carry an agent over a restart of the gateway or of an engine."""
_CALL_TIMEOUT_S = 600.0

Status = Literal["new", "running", "finished", "aborted"]


class GatewayError(Exception):
    """The gateway refused a call, or could not be reached for as long as we had patience."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        """HTTP status, 0 when there was no answer."""
        self.code = code


class RolloutClosed(GatewayError):
    """The rollout has ended otherwise before, past its deadline for instance."""


class GatewayClient:
    """A connection to the control API, for any number of rollouts at the same time."""

    def __init__(
        self, url: str, control_key: str, *, patience_s: float = 60.0, timeout_s: float = 30.0
    ) -> None:
        self.url = url.rstrip("/")
        self.patience_s = patience_s
        self._http = httpx.AsyncClient(
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            headers={"authorization": f"Bearer {control_key}"},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    def rollout(
        self, *, group_id: str, payload: Mapping[str, Any] | None = None, **fields: Any
    ) -> Rollout:
        """A rollout that starts when it is entered.

        `fields` are those of `POST /v1/rollouts`: rollout_id, task_id, index, timeout_s, sampling,
        split, history_mode, max_turns, …
        """
        return Rollout(self, {"group_id": group_id, **fields}, payload or {})

    def rollout_of(self, task: Task, index: int) -> Rollout:
        """Rollout `index` of a dispatched group."""
        return self.rollout(
            payload=task.payload,
            rollout_id=f"{task.group_id}-{index:02d}",
            group_id=task.group_id,
            run_id=task.run_id,
            task_id=task.task_id,
            index=index,
            attempt=task.attempt,
            split=task.split,
            history_mode=task.history_mode,
            nonlinear=task.nonlinear,
            rewrites=task.rewrites,
            timeout_s=task.rollout_timeout_s,
            sampling=msgspec.to_builtins(task.sampling),
            max_turns=task.max_turns,
            max_context_tokens=task.max_context_tokens,
            dispatch_index=task.dispatch_index,
        )

    async def revise(
        self,
        rollout_id: str,
        reward: float,
        *,
        rewards: Mapping[str, float] | None = None,
        turn_rewards: Mapping[str, float] | None = None,
        reason: str = "",
    ) -> None:
        """Replace the reward of a finished rollout: a judge or a person has decided later.

        It counts for training when it comes before the rollout's batch is cut. Raises GatewayError,
        with the code `rollout_not_finished` when there is no reward to replace.
        """
        body = {
            "reward": reward,
            "rewards": dict(rewards or {}),
            "turn_rewards": dict(turn_rewards or {}),
            "reason": reason,
        }
        await self.post(f"/v1/rollouts/{rollout_id}/reward", body)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST to the control API. Raises GatewayError and RolloutClosed."""
        content = codec.encode_json(body)
        return await self._sent("POST", path, content)

    async def get(self, path: str) -> dict[str, Any]:
        """GET from the control API. Raises GatewayError."""
        return await self._sent("GET", path, None)

    async def _sent(self, method: str, path: str, content: bytes | None) -> dict[str, Any]:
        give_up_at = time.monotonic() + self.patience_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                response = await self._http.request(
                    method,
                    f"{self.url}{path}",
                    content=content,
                    headers={"content-type": codec.JSON},
                )
                if not _is_worth_repeating(response):
                    return _body(response)
                failure = GatewayError(_explained(response), status=response.status_code)
            except httpx.TransportError as error:
                failure = GatewayError(f"no gateway answers at {self.url}: {error!r}")
            if time.monotonic() + pause_s > give_up_at:
                raise failure
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class ModelAccess:
    """A base URL and a key, and clients that are made with them.

    Nothing but these two is needed: any client of the OpenAI or the Anthropic API will do.
    """

    base_url: str
    """For the OpenAI SDK and for plain HTTP; ends in /v1."""
    api_key: str

    @property
    def anthropic_base_url(self) -> str:
        """For the Anthropic SDK, which adds /v1 itself."""
        return self.base_url.removesuffix("/v1")

    def openai(self, **options: Any) -> AsyncOpenAI:
        """A client of the `openai` package; use it in `async with`, or close it."""
        openai = _imported("openai")
        options = {"max_retries": _NUM_RETRIES, **options}
        client: AsyncOpenAI = openai.AsyncOpenAI(
            base_url=self.base_url, api_key=self.api_key, **options
        )
        return client

    def anthropic(self, **options: Any) -> AsyncAnthropic:
        """A client of the `anthropic` package; use it in `async with`, or close it."""
        anthropic = _imported("anthropic")
        options = {"max_retries": _NUM_RETRIES, **options}
        client: AsyncAnthropic = anthropic.AsyncAnthropic(
            base_url=self.anthropic_base_url, api_key=self.api_key, **options
        )
        return client

    def http(self, **options: Any) -> httpx.AsyncClient:
        """A plain HTTP client: `await client.post("chat/completions", json={…})`."""
        options = {"timeout": _CALL_TIMEOUT_S, **options}
        return httpx.AsyncClient(
            base_url=f"{self.base_url}/",
            headers={"authorization": f"Bearer {self.api_key}"},
            **options,
        )


class Session(ModelAccess):
    """Access to one conversation of a rollout."""

    def __init__(self, *, session_id: str, base_url: str, api_key: str) -> None:
        self.session_id = session_id
        self.base_url = base_url
        self.api_key = api_key


class Rollout(ModelAccess):
    """One attempt at a task: where to send model calls, and how to give the reward.

    As a context manager it starts the rollout, and aborts it when the block ends without a reward:
    with the reason `agent_error` on an exception, `environment_error` on EnvironmentFailed,
    `cancelled` when the task was cancelled, `unfinished` otherwise.
    """

    def __init__(
        self, gateway: GatewayClient, fields: Mapping[str, Any], payload: Mapping[str, Any]
    ) -> None:
        self.payload = payload
        """The row of the data set, verbatim."""
        self.status: Status = "new"
        self.rollout_id = ""
        self.base_url = ""
        self.api_key = ""
        self.deadlines: Deadlines | None = None
        """Set by the worker; seconds after the start."""
        self.is_setting_up = False
        self._gateway = gateway
        self._fields = dict(fields)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.status == "running":
            # A cancelled task may still say goodbye. An agent may have ended it by HTTP itself.
            with suppress(RolloutClosed):
                await asyncio.shield(self.abort(*_reason_of(error)))

    async def start(self) -> None:
        """Start the rollout. Raises GatewayError."""
        access = await self._gateway.post("/v1/rollouts", self._fields)
        self.rollout_id = access["rollout_id"]
        self.base_url = access["base_url"]
        self.api_key = access["api_key"]
        self.status = "running"

    async def finish(
        self,
        reward: float,
        *,
        rewards: Mapping[str, float] | None = None,
        turn_rewards: Mapping[str, float] | None = None,
        is_truncated: bool = False,
        info: Mapping[str, str] | None = None,
    ) -> None:
        """Give the reward, and those of single turns by the ids of their responses.

            await rollout.finish(1.0, turn_rewards={completion.id: 0.2})

        Raises RolloutClosed when the rollout has ended otherwise before.
        """
        body = {
            "reward": reward,
            "rewards": dict(rewards or {}),
            "turn_rewards": dict(turn_rewards or {}),
            "is_truncated": is_truncated,
            "info": dict(info or {}),
        }
        await self._closed("finish", body)
        self.status = "finished"

    async def abort(self, reason: str, message: str = "") -> None:
        """End without a reward. Raises RolloutClosed when the rollout is finished already."""
        await self._closed("abort", {"reason": reason, "message": message})
        self.status = "aborted"

    async def session(self, session_id: str = "") -> Session:
        """Access for a sub-agent, whose conversation is another one of the same rollout."""
        access = await self._gateway.post(
            f"/v1/rollouts/{self.rollout_id}/sessions", {"session_id": session_id}
        )
        return Session(
            session_id=access["session_id"],
            base_url=access["base_url"],
            api_key=access["api_key"],
        )

    @asynccontextmanager
    async def set_up(self, timeout_s: float | None = None) -> AsyncIterator[None]:
        """Around what makes the agent's world ready: whatever goes wrong inside is not the agent.

            async with rollout.set_up(120):
                sandbox = await start_sandbox(task["image"])

        Without `timeout_s` the worker's TURNFOLD_SETUP_TIMEOUT_S holds. Raises SetUpTimedOut, and
        EnvironmentFailed in place of any other exception.
        """
        if timeout_s is None and self.deadlines is not None:
            timeout_s = self.deadlines.setup_s
        deadline = asyncio.timeout(timeout_s)
        self.is_setting_up = True
        try:
            async with deadline:
                yield
        except EnvironmentFailed:
            raise
        except Exception as error:
            if deadline.expired():
                raise SetUpTimedOut(f"not ready after {timeout_s:g} s") from error
            raise EnvironmentFailed(f"set-up: {type(error).__name__}: {error}") from error
        finally:
            self.is_setting_up = False

    async def inspect(self) -> dict[str, Any]:
        """Turns, continuity counts and status as the gateway has them in the log."""
        return await self._gateway.get(f"/v1/rollouts/{self.rollout_id}")

    async def _closed(self, how: str, body: Mapping[str, Any]) -> None:
        try:
            await self._gateway.post(f"/v1/rollouts/{self.rollout_id}/{how}", body)
        except RolloutClosed:
            self.status = "aborted" if how == "finish" else "finished"
            raise


def _imported(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"rollout.{package}() needs the package {package}: pip install {package}"
        ) from error


def _reason_of(error: BaseException | None) -> tuple[str, str]:
    match error:
        case None:
            return "unfinished", "the agent ended without giving a reward"
        case EnvironmentFailed():
            return "environment_error", str(error)
        case asyncio.CancelledError():
            return "cancelled", ""
        case _:
            return "agent_error", f"{type(error).__name__}: {error}"


def _is_worth_repeating(response: httpx.Response) -> bool:
    advice = response.headers.get("x-should-retry")
    if advice is not None:
        return bool(advice == "true")
    return response.status_code in (429, 500, 502, 503, 504)


def _body(response: httpx.Response) -> dict[str, Any]:
    if response.is_success:
        body: dict[str, Any] = response.json()
        return body
    code = _error_of(response).get("code") or ""
    kind = RolloutClosed if code == "rollout_closed" else GatewayError
    raise kind(_explained(response), status=response.status_code, code=code)


def _explained(response: httpx.Response) -> str:
    message = _error_of(response).get("message") or response.text[:200]
    return (
        f"{response.request.method} {response.request.url.path}: {response.status_code} {message}"
    )


def _error_of(response: httpx.Response) -> dict[str, Any]:
    try:
        error = response.json().get("error")
    except (ValueError, AttributeError):
        return {}
    return error if isinstance(error, dict) else {}

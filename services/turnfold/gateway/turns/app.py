"""Model calls: from a translated request to a turn that the log has acknowledged."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

import msgspec

from turnfold.gateway import metrics
from turnfold.gateway.backends.engine import EngineError, Engines, GenerateRequest, Generation
from turnfold.gateway.calls import Answer, AnswerHead, CallParams, ModelCall, request_digest
from turnfold.gateway.client import LogUnavailable, UnknownRollout
from turnfold.gateway.constraints import UnenforcedPolicy, counted_field, refuse_unenforced
from turnfold.gateway.keys import SessionKey
from turnfold.gateway.parsing.replies import ParsedReply, ReplyFormat
from turnfold.gateway.refusals import Kind, Refusal, invalid
from turnfold.gateway.rollouts.app import Entry, Flight, RolloutStore
from turnfold.gateway.rollouts.state import RecordedTurn, recorded_turn
from turnfold.gateway.threads.app import off_loop
from turnfold.gateway.tracing import step_span
from turnfold.gateway.turns import steps
from turnfold.gateway.turns.pinning import pin_nonces
from turnfold.gateway.turns.sampling.app import LiveReader, sample
from turnfold.gateway.turns.sampling.reply import LiveReply, token_logprobs
from turnfold.history.errors import NonlinearHistory, RenderError
from turnfold.history.heal import PromptPlan, plan_prompt
from turnfold.history.render import Renderer
from turnfold.history.session import Session
from turnfold.schemas.events import TurnCompleted, TurnFailed
from turnfold.schemas.wire import TokenIds, Wire

log = logging.getLogger(__name__)


class CallContext(Wire, frozen=True, kw_only=True):
    """What came with a call besides its body."""

    key: SessionKey
    idempotency_key: str = ""
    is_retry: bool = False
    """The client says that it sends this request again."""
    harness: str = ""
    """The client by its own account."""


class _Sampled(NamedTuple):
    generation: Generation
    parsed: ParsedReply
    engine_s: float
    """Time that the engine took, in seconds."""


class ModelCalls:
    """Answers model calls.

        flight = await calls.join(call, context)
        try: await asyncio.wait({flight.task})
        finally: calls.leave(flight)

    A turn goes on while somebody waits for it. Its event is acknowledged by the log before its task
    is done, so no answer is seen that a restart could lose.
    """

    def __init__(
        self,
        *,
        store: RolloutStore,
        engines: Engines,
        renderer: Renderer,
        reply_format: ReplyFormat,
        pins: Sequence[re.Pattern[str]] = (),
        unenforced: UnenforcedPolicy = "refuse",
        clock: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self.store = store
        self.engines = engines
        self.renderer = renderer
        self.reply_format = reply_format
        self._pins = pins
        self._unenforced: UnenforcedPolicy = unenforced
        self._clock = clock
        self._new_id = new_id
        self._failures: set[asyncio.Task[None]] = set()

    async def join(self, call: ModelCall, context: CallContext) -> Flight:
        """The turn that answers the call: recorded, in the making, or begun now. Raises Refusal."""
        refuse_unenforced(call.constraints, self._unenforced)
        self._refuse_unreadable_tools(call)
        call = pin_nonces(call, self._pins)
        digest = _digest(call)
        entry = await self._entry(context.key)
        flight = await self._repeated(entry, call, context, digest)
        if flight is None:
            _refuse_closed(entry)
            flight = Flight(
                context.key.session_id, digest, context.idempotency_key, context.harness
            )
            self._take_off(entry, flight, self._make_turn(entry, flight, call))
        flight.num_waiting += 1
        return flight

    async def count_prompt_tokens(self, call: ModelCall, context: CallContext) -> int:
        """Tokens of the prompt that the call would be answered from now. Raises Refusal."""
        refuse_unenforced(call.constraints, self._unenforced)
        self._refuse_unreadable_tools(call)
        call = pin_nonces(call, self._pins)
        entry = await self._entry(context.key)
        _refuse_closed(entry)
        session_id = context.key.session_id
        call = await self._continued(entry, session_id, call)
        return (await self._plan(entry, session_id, call)).num_prompt_tokens

    async def recorded_answer(
        self, turn_id: str, context: CallContext, *, has_logprobs: bool = False
    ) -> Answer:
        """The answer of a turn of the session, as it was given. Raises Refusal."""
        entry = await self._entry(context.key)
        session_id = context.key.session_id
        if entry.state.turn(session_id, turn_id) is None:
            await self.store.catch_up(entry)
        async with entry.lock(session_id):
            entry.fold_foreign(session_id)
            turn = entry.state.turn(session_id, turn_id)
        if turn is None:
            raise Refusal("not_found", f"Response with id 'resp_{turn_id}' not found.")
        return await self._recorded_answer(entry, session_id, turn, has_logprobs)

    def leave(self, flight: Flight) -> None:
        """The client has its answer, or is gone."""
        flight.num_waiting -= 1
        if flight.num_waiting == 0 and flight.task is not None and not flight.task.done():
            flight.abandon()

    async def drain(self) -> None:
        """Wait until failures are recorded."""
        await asyncio.gather(*self._failures, return_exceptions=True)

    def _refuse_unreadable_tools(self, call: ModelCall) -> None:
        if call.tools and not self.reply_format.has_tools:
            raise invalid(
                "tools: this model's template knows no tools, or no parser reads them", "tools"
            )

    async def _entry(self, key: SessionKey) -> Entry:
        try:
            return await self.store.get(key.rollout_id, key.partition, key.offset)
        except UnknownRollout as error:
            raise Refusal(
                "authentication",
                "the api key names a rollout that is not in this log",
                code="unknown_rollout",
            ) from error

    async def _repeated(
        self, entry: Entry, call: ModelCall, context: CallContext, digest: str
    ) -> Flight | None:
        """The turn that a client's retry means, if there is one."""
        key = context.idempotency_key
        if not key and not context.is_retry:
            return None
        session_id = context.key.session_id
        flight = entry.find_flight(session_id, digest, idempotency_key=key)
        if flight is None:
            await self.store.catch_up(entry)
            async with entry.lock(session_id):
                entry.fold_foreign(session_id)
                turn = entry.state.recorded(session_id, digest, idempotency_key=key)
            if turn is None:
                return None
            flight = Flight(session_id, digest, key)
            flight.stage = "recorded"
            work = self._recorded_answer(entry, session_id, turn, call.has_logprobs)
            self._take_off(entry, flight, work)
        metrics.REPEATED.inc()
        return flight

    def _take_off(self, entry: Entry, flight: Flight, work: Coroutine[Any, Any, Answer]) -> None:
        flight.task = asyncio.create_task(work)
        entry.flights.add(flight)

        def landed(task: asyncio.Task[Answer]) -> None:
            entry.flights.discard(flight)
            flight.wake()
            if not task.cancelled():
                task.exception()  # a client that left does not ask for it

        flight.task.add_done_callback(landed)

    async def _make_turn(self, entry: Entry, flight: Flight, call: ModelCall) -> Answer:
        turn_id = self._new_id()
        try:
            return await self._turn(entry, flight, call, turn_id)
        except EngineError as error:
            self._record_failure(entry, flight, turn_id, error.reason, str(error))
            raise _refusal_of(error) from error
        except Refusal as refusal:
            if refusal.code in ("context_length_exceeded", "nonlinear_history"):
                self._record_failure(entry, flight, turn_id, refusal.code, refusal.message)
            raise
        except asyncio.CancelledError:
            self._record_failure(entry, flight, turn_id, "aborted", "nobody waits for the answer")
            raise

    async def _turn(self, entry: Entry, flight: Flight, call: ModelCall, turn_id: str) -> Answer:
        begun = self._clock()
        started = entry.state.started
        params = steps.effective_params(call.params, started)
        _refuse_beyond_turn_limit(entry)
        call = await self._continued(entry, flight.session_id, call)
        with step_span("plan_prompt") as span:
            plan = await self._plan(entry, flight.session_id, call)
            span.set_attribute("turnfold.continuity", plan.continuity)
            span.set_attribute("turnfold.num_prompt_tokens", plan.num_prompt_tokens)
        request = await self._request(entry, flight.session_id, plan, params, turn_id)
        with step_span("sample", turn_id=turn_id):
            sampled = await self._sample(flight, call, plan, request)
        generation, parsed, engine_s = sampled.generation, sampled.parsed, sampled.engine_s
        event = steps.turn_event(
            rollout_id=started.rollout_id,
            session_id=flight.session_id,
            turn_id=turn_id,
            call=call,
            request=request,
            plan=plan,
            generation=generation,
            reply=steps.reply_message(parsed, turn_id),
            at=self._clock(),
            num_reasoning_tokens=parsed.num_reasoning_tokens,
            engine_s=engine_s,
            request_digest=flight.request_digest,
            idempotency_key=flight.idempotency_key,
            harness=flight.harness,
        )
        answer = await self._record(entry, flight, event, call.has_logprobs)
        self._count(event, plan, parsed, self._clock() - begun - engine_s)
        return answer

    async def _continued(self, entry: Entry, session_id: str, call: ModelCall) -> ModelCall:
        """The call with the items and the history that it names, if it names any."""
        if not call.previous_turn_id and not call.references:
            return call
        try:
            return await self._continued_as_known(entry, session_id, call)
        except Refusal:  # of a turn that another gateway may have answered
            await self.store.catch_up(entry)
            return await self._continued_as_known(entry, session_id, call)

    async def _continued_as_known(
        self, entry: Entry, session_id: str, call: ModelCall
    ) -> ModelCall:
        async with entry.lock(session_id):
            entry.fold_foreign(session_id)
            call = steps.resolved_call(call, lambda turn: entry.state.turn(session_id, turn))
            if not call.previous_turn_id:
                return call
            turn = entry.state.turn(session_id, call.previous_turn_id)
            if turn is None:
                raise invalid(
                    f"Previous response with id 'resp_{call.previous_turn_id}' not found.",
                    "previous_response_id",
                    "previous_response_not_found",
                )
            history = entry.state.session(session_id).history(turn.turn_id)
            return steps.continued_call(call, history, turn.has_instructions)

    async def _plan(self, entry: Entry, session_id: str, call: ModelCall) -> PromptPlan:
        planned = await self._plan_as_known(entry, session_id, call)
        if _is_puzzling(planned):
            await self.store.catch_up(entry)
            if entry.has_foreign(session_id):
                planned = await self._plan_as_known(entry, session_id, call)
        if isinstance(planned, NonlinearHistory):
            raise invalid(str(planned), "messages", "nonlinear_history") from planned
        return planned

    async def _plan_as_known(
        self, entry: Entry, session_id: str, call: ModelCall
    ) -> PromptPlan | NonlinearHistory:
        async with entry.lock(session_id):
            entry.fold_foreign(session_id)
            try:
                return await asyncio.to_thread(
                    plan_prompt,
                    entry.state.session(session_id),
                    self.renderer,
                    call.messages,
                    call.tools,
                    mode=entry.state.started.history_mode,
                    nonlinear=entry.state.started.nonlinear,
                    rewrites=entry.state.started.rewrites,
                )
            except NonlinearHistory as error:
                return error
            except RenderError as error:
                raise invalid(
                    f"the chat template refuses these messages: {error}",
                    "messages",
                    "template_error",
                ) from error

    async def _request(
        self, entry: Entry, session_id: str, plan: PromptPlan, params: CallParams, turn_id: str
    ) -> GenerateRequest:
        started = entry.state.started
        engine_limit = await self.engines.max_context_tokens()
        max_tokens = steps.max_output_tokens(
            params.max_tokens,
            started.sampling,
            plan.num_prompt_tokens,
            steps.smallest(started.max_context_tokens, engine_limit),
        )
        affinity = f"{started.rollout_id}/{session_id}"
        return steps.generate_request(turn_id, affinity, plan, params, max_tokens)

    async def _sample(
        self, flight: Flight, call: ModelCall, plan: PromptPlan, request: GenerateRequest
    ) -> _Sampled:
        if flight.is_abandoned:
            raise EngineError("aborted", "nobody waits for the answer")
        begun = self._clock()
        flight.stage = "sampling"
        if call.is_streamed:
            return await self._sample_live(flight, call, plan, request, begun)
        generation = await sample(self.engines, request, self.renderer)
        flight.stage = "recording"
        engine_s = self._clock() - begun
        parsed = await off_loop(
            generation.output_ids.array.nbytes,  # a token is about as many bytes of text
            steps.parse_generation,
            generation,
            plan,
            self.renderer,
            self.reply_format,
            call,
        )
        return _Sampled(generation, parsed, engine_s)

    async def _sample_live(
        self,
        flight: Flight,
        call: ModelCall,
        plan: PromptPlan,
        request: GenerateRequest,
        begun: float,
    ) -> _Sampled:
        """The same, told while it is sampled: clients of the flight see the text as it comes."""
        situation = steps.situation_of(plan, self.renderer, self.reply_format, call)
        reply = LiveReply(
            self.renderer,
            self.reply_format.begin(situation),
            stops=request.params.stop,
            turn_id=request.request_id,
            has_logprobs=call.has_logprobs,
        )
        flight.begin(
            AnswerHead(
                turn_id=request.request_id,
                created=int(begun),
                model=call.model,
                num_prompt_tokens=plan.num_prompt_tokens,
            )
        )
        async with LiveReader(reply, flight.tell) as reader:
            generation = await sample(self.engines, request, self.renderer, reader.on_tokens)
            flight.stage = "recording"
            engine_s = self._clock() - begun
            await reader.finish(generation)
        return _Sampled(generation, reply.parsed, engine_s)

    async def _record(
        self, entry: Entry, flight: Flight, event: TurnCompleted, has_logprobs: bool
    ) -> Answer:
        async with entry.lock(flight.session_id):
            # Closed while the engine was at work: a turn after the end would count for nothing.
            _refuse_closed(entry)
            event = _as_it_turned_out(entry.state.session(flight.session_id), event)
            with step_span("log.append", turn_id=event.turn_id):
                await self.store.events.append(event)
            entry.state.apply(event)
            flight.stage = "recorded"
        return await self._answer(recorded_turn(event), event.output_ids, has_logprobs)

    async def _recorded_answer(
        self, entry: Entry, session_id: str, turn: RecordedTurn, has_logprobs: bool
    ) -> Answer:
        output_ids = TokenIds.of(entry.state.session(session_id).sequences.output(turn.turn_id))
        return await self._answer(turn, output_ids, has_logprobs)

    async def _answer(self, turn: RecordedTurn, output_ids: TokenIds, has_logprobs: bool) -> Answer:
        if not has_logprobs:
            return steps.answer_of(turn)
        # Each token is decoded by itself: not on the event loop.
        logprobs = await asyncio.to_thread(
            lambda: tuple(
                token_logprobs(output_ids.tolist(), turn.logprobs.tolist(), self.renderer)
            )
        )
        return steps.answer_of(turn, logprobs)

    def _record_failure(
        self, entry: Entry, flight: Flight, turn_id: str, reason: str, message: str
    ) -> None:
        """Append a TurnFailed behind the client's back: its answer does not depend on it."""
        metrics.FAILED_TURNS.labels(reason).inc()
        event = TurnFailed(
            rollout_id=entry.state.rollout_id,
            event_id=f"{turn_id}:failed",
            at=self._clock(),
            session_id=flight.session_id,
            turn_id=turn_id,
            reason=reason,
            message=message,
        )
        task = asyncio.create_task(self._append_failure(entry, event))
        self._failures.add(task)
        task.add_done_callback(self._failures.discard)

    async def _append_failure(self, entry: Entry, event: TurnFailed) -> None:
        try:
            await self.store.events.append(event)
            entry.state.apply(event)
        except LogUnavailable:
            log.warning("rollout %s: a failed turn is not in the log", event.rollout_id)

    def _count(
        self, event: TurnCompleted, plan: PromptPlan, parsed: ParsedReply, overhead_s: float
    ) -> None:
        metrics.TURNS.labels(event.protocol, event.continuity, event.finish_reason).inc()
        metrics.OUTPUT_TOKENS.inc(len(event.output_ids))
        metrics.ENGINE_SECONDS.observe(event.engine_s)
        metrics.OVERHEAD_SECONDS.observe(overhead_s)
        for cause, number in Counter(plan.differences).items():
            metrics.DIFFERENCES.labels(cause).inc(number)
        for name in event.unenforced:
            metrics.UNENFORCED.labels(counted_field(name)).inc()
        for call in parsed.malformed:
            metrics.MALFORMED_CALLS.labels(call.reason).inc()


def _digest(call: ModelCall) -> str:
    try:
        return request_digest(call)
    except OverflowError as error:
        raise invalid("the request holds an integer beyond 64 bits") from error


def _is_puzzling(planned: PromptPlan | NonlinearHistory) -> bool:
    """Whether the history holds a reply that we did not give: perhaps another gateway did."""
    if isinstance(planned, NonlinearHistory):
        return True
    return any(message.role == "assistant" for message in planned.new_messages)


def _as_it_turned_out(session: Session, event: TurnCompleted) -> TurnCompleted:
    """A turn planned as an extension is a fork when a parallel one came first."""
    parent = event.parent_turn_id
    is_extension = event.continuity in ("extended", "healed")
    if is_extension and parent is not None and session.sequences.is_continued(parent):
        return msgspec.structs.replace(event, continuity="forked")
    return event


def _refuse_closed(entry: Entry) -> None:
    if entry.state.terminal is not None:
        raise Refusal(
            "conflict",
            f"rollout {entry.state.rollout_id} is {entry.state.status}: it takes no more turns",
            code="rollout_closed",
        )


def _refuse_beyond_turn_limit(entry: Entry) -> None:
    limit = entry.state.started.max_turns
    num_open = sum(flight.stage != "recorded" for flight in entry.flights)
    if limit is not None and entry.state.num_turns + num_open > limit:
        raise invalid(
            f"rollout {entry.state.rollout_id} has had its {limit} turns", code="turn_limit_reached"
        )


_KINDS: dict[str, Kind] = {
    "engine_unavailable": "unavailable",
    "engine_error": "unavailable",
    "engine_refused": "invalid_request",
    "invalid_output": "bad_gateway",
    "aborted": "unavailable",
}


def _refusal_of(error: EngineError) -> Refusal:
    return Refusal(
        _KINDS[error.reason], str(error), code=error.reason, is_retriable=error.is_retriable
    )

"""Continuous batching on a thread of its own: requests join and leave the batch between any two
decode steps.

All state belongs to the engine's thread. Other threads hand it functions to run between two steps
and get futures back, so a weight swap, an abort or a pause needs no lock and never lands in the
middle of a step.
"""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch

from turnfold.embedded.inference.model import SlotModel
from turnfold.embedded.inference.sampling import SampledToken, sample
from turnfold.embedded.inference.sequences import (
    Completion,
    FinishReason,
    GenerationRequest,
    RunningSequence,
    StopRules,
    uncancellable_future,
)
from turnfold.embedded.inference.slots import SlotTable
from turnfold.embedded.inference.weights import check_weights

T = TypeVar("T")

PauseMode = Literal["abort", "wait", "keep"]


class EngineStoppedError(RuntimeError):
    """The engine was closed, or failed and cannot go on."""


class _Command(Generic[T]):
    """A function to run on the engine's thread, and the future of its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.future: Future[T] = uncancellable_future()

    def run(self) -> None:
        """Run it. An error reaches the caller, and the engine, whose state may be half changed."""
        try:
            self.future.set_result(self._function())
        except Exception as error:
            self.future.set_exception(error)
            raise

    def refuse(self, error: Exception) -> None:
        """Tell the caller that it will never run."""
        self.future.set_exception(error)


@dataclass
class EngineCounts:
    """Running totals. Written by the engine's thread, read by anyone."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    weight_updates: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0


class Engine:
    """Runs generation requests over a `SlotModel`. Use as a context manager, or call `start` and
    `close`.
    """

    def __init__(self, model: SlotModel, rules: StopRules, *, version: str = "0") -> None:
        self.model = model
        self.version = version
        """The label that sampled tokens are stamped with; `set_version` changes it, a weight swap
        does not.
        """
        self.counts = EngineCounts()
        self._rules = rules
        self._slots = SlotTable(model.num_slots)
        self._waiting: deque[RunningSequence] = deque()
        self._running: list[RunningSequence] = []
        self._commands: queue.SimpleQueue[_Command[Any]] = queue.SimpleQueue()
        self._is_paused = False
        self._drain: Future[None] | None = None
        self._is_closing = False
        self._intake = threading.Lock()
        self._stopped_by: EngineStoppedError | None = None
        self._failure: BaseException | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called from any thread.

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Start the engine's thread. `on_failure` is called on it if a step ever fails."""
        self._on_failure = on_failure
        self._thread.start()

    def close(self) -> None:
        """Abort what runs and end the thread."""
        with contextlib.suppress(EngineStoppedError):
            self._call(self._close)
        self._thread.join()

    def __enter__(self) -> "Engine":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        """False once a step has failed or the engine was closed."""
        return self._thread.is_alive()

    @property
    def failure(self) -> BaseException | None:
        """What a step failed with, if one did."""
        return self._failure

    @property
    def is_paused(self) -> bool:
        """True from a pause on, also while `wait` still drains, until the next resume."""
        return self._is_paused or self._drain is not None

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, or for a resume."""
        return len(self._waiting)

    def submit(
        self,
        request: GenerationRequest,
        on_token: Callable[[SampledToken], None] | None = None,
    ) -> "Future[Completion]":
        """Queue a request. `on_token` is called on the engine's thread for each sampled token."""
        sequence = RunningSequence(request, self._rules, self.model.max_len, on_token)
        queued = self._call(lambda: self._waiting.append(sequence))
        queued.add_done_callback(lambda _: _pass_on_error(queued, sequence.future))
        return sequence.future

    def abort(self, request_ids: Collection[str] | None = None) -> "Future[int]":
        """End these requests, or all, with what they have so far. Gives the number that were in
        flight.
        """
        return self._call(lambda: self._abort(request_ids))

    def pause(self, mode: PauseMode = "abort") -> "Future[None]":
        """Stop sampling. Requests that arrive while paused wait for `resume`.

        `abort` ends what is in flight with its partial output, `keep` freezes it, `wait` lets what
        runs finish first: its future is done when nothing runs any more.
        """
        drained: Future[None] = uncancellable_future()
        begun = self._call(lambda: self._pause(mode, drained))
        begun.add_done_callback(lambda _: _pass_on_error(begun, drained))
        return drained

    def resume(self) -> "Future[None]":
        """Go on sampling."""
        return self._call(self._resume)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> "Future[None]":
        """Swap all weights between two steps, and recompute the cache of what runs under the new
        ones.

        Raises:
            WeightsError: the weights do not fit; nothing was written. Raised here, not by the
                future.
        """
        check_weights(weights, self.model.parameters(), self.model.aliases())
        return self._call(lambda: self._load_weights(weights))

    def set_version(self, version: str) -> "Future[None]":
        """Stamp tokens sampled from now on with `version`."""

        def apply() -> None:
            self.version = version

        return self._call(apply)

    def reset_prefix_cache(self) -> "Future[None]":
        """Reuse no prompt prefix that was computed so far."""
        return self._call(self._slots.forget)

    def _call(self, function: Callable[[], T]) -> "Future[T]":
        """Run `function` on the engine's thread between two steps."""
        command = _Command(function)
        with self._intake:
            if self._stopped_by is not None:
                raise self._stopped_by
            self._commands.put(command)
        return command.future

    # On the engine's thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._run_commands()
                if self._can_step():
                    self._step()
        except BaseException as error:
            self._failure = error
            self._stop(EngineStoppedError(f"the engine failed: {error!r}"))
            self._on_failure()
            raise
        self._stop(EngineStoppedError("the engine was closed"))

    def _run_commands(self) -> None:
        """Run what was queued; when there is nothing to step, sleep until something comes."""
        if not self._can_step():
            self._commands.get().run()
        while not self._commands.empty() and not self._is_closing:
            self._commands.get().run()

    def _can_step(self) -> bool:
        if self._is_closing or self._is_paused:
            return False
        return bool(self._running) or (bool(self._waiting) and self._drain is None)

    def _step(self) -> None:
        if self._drain is None:
            self._admit()
        if self._running:
            self._decode()
        if self._drain is not None and not self._running:
            self._finish_drain()

    def _admit(self) -> None:
        """Give waiting requests the free slots, and sample the first token of each."""
        while self._waiting and self._slots.num_free:
            sequence = self._waiting.popleft()
            request = sequence.request
            sequence.slot, cached = self._slots.take(request.prompt_ids, request.cache_salt)
            sequence.num_cached_tokens = cached
            self.counts.prompt_tokens += len(request.prompt_ids)
            self.counts.cached_tokens += cached
            self._running.append(sequence)
            self._emit([sequence], self.model.prefill(sequence.slot, request.prompt_ids, cached))

    def _decode(self) -> None:
        """One more token for every running sequence."""
        batch = list(self._running)
        logits_BV = self.model.decode(
            [_slot(s) for s in batch],
            [s.output_ids[-1] for s in batch],
            [s.next_position for s in batch],
        )
        self._emit(batch, logits_BV)

    def _emit(self, batch: list[RunningSequence], logits_BV: torch.Tensor) -> None:
        params = [s.request.params for s in batch]
        tokens = sample(logits_BV, params, [s.next_uniform() for s in batch])
        self.counts.generated_tokens += len(tokens)
        for sequence, token in zip(batch, tokens, strict=True):
            sequence.append(token, self.version)
            if sequence.on_token is not None:
                sequence.on_token(token)
        self._retire()

    def _retire(self) -> None:
        """Answer the sequences that have ended and free their slots."""
        ended = [s for s in self._running if s.finish_reason is not None]
        self._running = [s for s in self._running if s.finish_reason is None]
        for sequence in ended:
            salt = sequence.request.cache_salt
            self._slots.release(_slot(sequence), sequence.cached_ids, salt)
            self._answer(sequence)

    def _answer(self, sequence: RunningSequence) -> None:
        completion = sequence.completion()
        self._count(completion.finish_reason)
        sequence.future.set_result(completion)

    def _count(self, reason: FinishReason) -> None:
        name = f"finished_{reason}"
        setattr(self.counts, name, getattr(self.counts, name) + 1)

    def _abort(self, request_ids: Collection[str] | None) -> int:
        everything = [*self._waiting, *self._running]
        aborted = [
            s for s in everything if request_ids is None or s.request.request_id in request_ids
        ]
        for sequence in aborted:
            sequence.finish("abort")
        queued = [s for s in self._waiting if s.finish_reason is not None]
        self._waiting = deque(s for s in self._waiting if s.finish_reason is None)
        for sequence in queued:
            self._answer(sequence)
        self._retire()
        if self._drain is not None and not self._running:
            self._finish_drain()
        return len(aborted)

    def _pause(self, mode: PauseMode, drained: "Future[None]") -> None:
        if mode == "abort":
            self._abort(None)
        if mode == "wait" and self._running and not self._is_paused:
            self._chain_drain(drained)
            return
        self._is_paused = True
        self._finish_drain()
        drained.set_result(None)

    def _chain_drain(self, drained: "Future[None]") -> None:
        """Two callers may wait for the same drain."""
        if self._drain is None:
            self._drain = Future()
        self._drain.add_done_callback(lambda drain: _pass_on_outcome(drain, drained))

    def _finish_drain(self) -> None:
        self._is_paused = True
        drain, self._drain = self._drain, None
        if drain is not None:
            drain.set_result(None)

    def _resume(self) -> None:
        self._finish_drain()
        self._is_paused = False

    def _load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.model.replace_weights(weights)
        self._slots.forget()
        self.counts.weight_updates += 1
        for sequence in self._running:
            self.model.prefill(_slot(sequence), sequence.cached_ids)

    def _close(self) -> None:
        self._abort(None)
        self._finish_drain()
        self._is_closing = True

    def _stop(self, reason: EngineStoppedError) -> None:
        """Take no more commands, and leave no caller waiting."""
        with self._intake:
            self._stopped_by = reason
        while not self._commands.empty():
            self._commands.get().refuse(reason)
        for sequence in [*self._waiting, *self._running]:
            sequence.future.set_exception(reason)
        if self._drain is not None:
            self._drain.set_exception(reason)


def _slot(sequence: RunningSequence) -> int:
    assert sequence.slot is not None, f"{sequence.request.request_id} holds no slot"
    return sequence.slot


def _pass_on_error(source: "Future[Any]", target: "Future[Any]") -> None:
    """Whoever waits for `target` learns that `source`, on which it depends, has failed."""
    error = source.exception()
    if error is not None:
        target.set_exception(error)


def _pass_on_outcome(source: "Future[None]", target: "Future[None]") -> None:
    _pass_on_error(source, target)
    if not target.done():
        target.set_result(None)

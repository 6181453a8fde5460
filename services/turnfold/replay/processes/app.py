"""The same job on different partitions, in as many processes as there are cores to run them.

    process 0: partitions 0, 2, 4 …
    process 1: partitions 1, 3, 5 …

What a job does to one partition must not depend on the others: then its results do not depend on
the number of processes. The processes end with the one that started them, whatever happens to that.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

import msgspec

from turnfold.log.memory import seldom_look_for_cycles
from turnfold.replay.client import LogSource, OnProgress
from turnfold.schemas.errors import UserError

T = TypeVar("T")

_WORTHWHILE_RECORDS = 20_000
"""From here on several processes save more than the third of a second that it takes to start them."""


class Share(msgspec.Struct, frozen=True):
    """Every `of`-th partition of a topic, from `index` on; all of them unless told otherwise."""

    index: int = 0
    of: int = 1

    def of_partitions(self, partitions: Collection[int]) -> list[int]:
        return [partition for partition in partitions if partition % self.of == self.index]


Job = Callable[[Share, OnProgress], Coroutine[Any, Any, T]]


async def divided(job: Job[T], num_processes: int, on_progress: OnProgress) -> list[T]:
    """What the job returns for each share.

    With several processes the job and its result must be such as pickle. Raises what it raises: a
    UserError with its text, anything else as a RuntimeError with the traceback.
    """
    if num_processes == 1:
        return [await job(Share(), on_progress)]
    loop = asyncio.get_running_loop()

    def tell(number: int) -> None:
        loop.call_soon_threadsafe(on_progress, number)

    shares = [Share(index, num_processes) for index in range(num_processes)]
    with ExitStack() as stack:
        processes = [_Process[T](job, share) for share in shares]
        for process in processes:
            stack.callback(process.end)
        return await asyncio.gather(
            *(asyncio.to_thread(process.result, tell) for process in processes)
        )


async def suitable_number(source: LogSource, topic: str) -> int:
    """How many processes to read a topic with: one for each core, when it is long enough."""
    if await source.num_records(topic) < _WORTHWHILE_RECORDS:
        return 1
    num_partitions = (await source.num_partitions([topic])).get(topic, 1)
    return min(_num_cores(), num_partitions)


def _num_cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Progress(msgspec.Struct, frozen=True):
    number: int


class _Done(msgspec.Struct, frozen=True):
    value: Any


class _Failed(msgspec.Struct, frozen=True):
    text: str
    is_for_users: bool


class _Process(Generic[T]):
    """A process that runs a job on its share; what it has to say comes through a pipe."""

    def __init__(self, job: Job[T], share: Share) -> None:
        # A forked child would share our sockets and threads.
        context = multiprocessing.get_context("spawn")
        self._receiver, sender = context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(job, share, sender), daemon=True)
        with _without_interrupts():
            self._process.start()
        sender.close()  # the process has its own: ours would keep the pipe open when it dies

    def result(self, tell: OnProgress) -> T:
        """Wait for it, telling how many records were read on the way."""
        try:
            while isinstance(message := self._receiver.recv(), _Progress):
                tell(message.number)
        except EOFError:
            self._process.join()
            raise UserError(
                f"a process of this command ended by itself (exit code {self._process.exitcode}): "
                "if memory was short, give --processes 1"
            ) from None
        match message:
            case _Done(value):
                return value  # type: ignore[no-any-return]
            case _Failed(text, is_for_users=True):
                raise UserError(text)
            case _:
                raise RuntimeError(f"in a process of its own:\n{message.text}")

    def end(self) -> None:
        """End it, wherever it is."""
        self._process.terminate()
        self._process.join()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C reaches all processes of a terminal; what is started here leaves it to its parent."""
    resource_tracker.ensure_running()  # which would let interrupts through when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(job: Job[T], share: Share, sender: Connection) -> None:
    """In a process of its own."""
    seldom_look_for_cycles()
    # A broken pipe: the parent has ended without a word, and nobody is left to tell.
    with suppress(BrokenPipeError):
        sender.send(_outcome(job, share, lambda number: sender.send(_Progress(number))))


def _outcome(job: Job[T], share: Share, on_progress: OnProgress) -> _Done | _Failed:
    try:
        return _Done(asyncio.run(job(share, on_progress)))
    except BrokenPipeError:
        raise
    except UserError as error:
        return _Failed(str(error), is_for_users=True)
    except Exception:
        return _Failed(traceback.format_exc(), is_for_users=False)

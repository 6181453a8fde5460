"""Runs a command for each rollout, in a process group of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from turnfold.agents.client import Rollout
from turnfold.agents.commands.output import (
    ENVIRONMENT_CODES,
    how_it_ended,
    no_reward,
    result_in,
    with_tail,
)
from turnfold.agents.commands.template import BadTemplate, Places, filled, split
from turnfold.agents.results import EnvironmentFailed, Result
from turnfold.schemas import codec
from turnfold.schemas.errors import UserError

_PREFIX = "TURNFOLD_"
_LONGEST_TASK_VARIABLE = 64 * 1024
"""Linux takes 128 KiB for one variable; a longer task is in the file only."""
_KEPT_STDOUT = 64 * 1024
_KEPT_STDERR = 8 * 1024
_DEFAULT_GRACE_S = 10.0
_LAST_WORDS_S = 1.0
"""How long output is read after the end: a process that left the group may keep a pipe open."""
_CLEANUP_TIMEOUT_S = 30.0


class CommandError(UserError):
    """A command that cannot be run here at all; the text says what was expected."""


class CommandFailed(Exception):
    """The command ended badly, or without a reward."""


class CommandStopped(CommandFailed):
    """It was told to stop and gave no reward."""


class CommandAgent:
    """An agent that is a command: `await agent(task, rollout)` runs it once.

    The command gets what it needs as variables: OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, TURNFOLD_TASK, TURNFOLD_TASK_FILE, TURNFOLD_RESULT_FILE,
    TURNFOLD_ROLLOUT_ID and TURNFOLD_TIMEOUT_S. No other TURNFOLD_ variable reaches it, the control
    key least of all. Cancelling it sends SIGTERM to its process group and, after the grace,
    SIGKILL; a reward that it gives in between counts.

    `setup` is run before it under the set-up deadline, and its failure is the environment's.
    `cleanup` is run in the end whatever happened: killing `docker run` does not end its container.
    """

    def __init__(self, command: str, *, setup: str = "", cleanup: str = "") -> None:
        self.words = _checked(command, "TURNFOLD_COMMAND")
        self.setup = _checked(setup, "TURNFOLD_SETUP_COMMAND") if setup else []
        self.cleanup = _checked(cleanup, "TURNFOLD_CLEANUP_COMMAND") if cleanup else []
        self._cleaning: set[asyncio.Task[None]] = set()

    async def __call__(self, task: Mapping[str, Any], rollout: Rollout) -> Result | None:
        """The reward; None when the command has given it to the gateway itself.

        Raises CommandFailed, InvalidResult, BadTemplate and EnvironmentFailed.
        """
        with TemporaryDirectory(prefix="turnfold-", ignore_cleanup_errors=True) as directory:
            run = _Run(directory, task, rollout)
            try:
                if self.setup:
                    async with rollout.set_up():
                        await run.helper(self.setup)
                return await run.agent(self.words)
            finally:
                if self.cleanup:
                    await self._clean_up(run)

    async def _clean_up(self, run: _Run) -> None:
        cleaning = asyncio.create_task(run.clean_up(self.cleanup))
        self._cleaning.add(cleaning)
        cleaning.add_done_callback(self._cleaning.discard)
        # Cancelled meanwhile, it goes on by itself, and how the agent ended is not forgotten.
        with suppress(asyncio.CancelledError):
            await asyncio.shield(cleaning)


class _Run:
    """One run of the commands."""

    def __init__(self, directory: str, task: Mapping[str, Any], rollout: Rollout) -> None:
        self.task, self.rollout = task, rollout
        path = Path(directory)
        self.result_file = path / "result.json"
        content = codec.encode_json(task)
        (path / "task.json").write_bytes(content)
        self.places = Places(
            rollout_id=rollout.rollout_id,
            directory=directory,
            task_file=str(path / "task.json"),
            result_file=str(self.result_file),
        )
        self.variables = variables(rollout, self.places, content)

    async def agent(self, words: Sequence[str]) -> Result | None:
        process = await self._start(words)
        code, is_stopped = await process.wait(self._grace_s)
        stdout, stderr = process.output()
        self._check(code, is_stopped, stderr)
        result = self._result(stdout)
        if result is not None or await self._is_finished():
            return result
        if is_stopped:
            raise CommandStopped(self._told("it gave no reward when it was stopped", stderr))
        raise CommandFailed(self._told(no_reward(stdout), stderr))

    def _check(self, code: int, is_stopped: bool, stderr: str) -> None:
        """Raise what an end that is not a clean one means."""
        if code == 0:
            return
        what = self._told(how_it_ended(code), stderr)
        if is_stopped:
            raise CommandStopped(what)
        if code in ENVIRONMENT_CODES:
            raise EnvironmentFailed(what)
        raise CommandFailed(what)

    async def helper(self, words: Sequence[str]) -> None:
        """Run a command that is not the agent. Raises CommandFailed unless it ends well."""
        process = await self._start(words)
        code, is_stopped = await process.wait(0.0)
        if is_stopped:
            raise asyncio.CancelledError
        if code != 0:
            _, stderr = process.output()
            raise CommandFailed(self._told(f"`{words[0]}`: {how_it_ended(code)}", stderr))

    async def clean_up(self, words: Sequence[str]) -> None:
        """Run the cleanup; that it fails changes nothing for the rollout."""
        with suppress(TimeoutError, CommandFailed, BadTemplate, OSError):
            async with asyncio.timeout(_CLEANUP_TIMEOUT_S):
                await self.helper(words)

    async def _start(self, words: Sequence[str]) -> _Process:
        argv = filled(words, self.places, self.task, self.variables)
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)
        }
        return await _Process.start(argv, {**inherited, **self.variables})

    def _result(self, stdout: str) -> Result | None:
        text = self.result_file.read_text() if self.result_file.exists() else ""
        return result_in(text, stdout)

    async def _is_finished(self) -> bool:
        """Whether the command has given its reward to the gateway, or ended the rollout there."""
        outcome = await self.rollout.inspect()
        if outcome["status"] not in ("finished", "aborted"):
            return False
        self.rollout.status = outcome["status"]
        return True

    def _told(self, what: str, stderr: str) -> str:
        return with_tail(what, stderr, self.rollout.api_key)

    @property
    def _grace_s(self) -> float:
        known = self.rollout.deadlines
        return _DEFAULT_GRACE_S if known is None else known.grace_s


class _Process:
    """A process group, and the end of what it writes."""

    def __init__(self, process: asyncio.subprocess.Process, stdout: _Tail, stderr: _Tail) -> None:
        self._process = process
        self._stdout, self._stderr = stdout, stderr

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str]) -> Self:
        stdout, stderr = await _Tail.open(_KEPT_STDOUT), await _Tail.open(_KEPT_STDERR)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                # Not asyncio's own pipes: with those `wait` goes on while anybody holds one open.
                stdout=stdout.write_end,
                stderr=stderr.write_end,
                start_new_session=True,
            )
        except BaseException:
            stdout.close()
            stderr.close()
            raise
        finally:
            os.close(stdout.write_end)
            os.close(stderr.write_end)
        return cls(process, stdout, stderr)

    async def wait(self, grace_s: float) -> tuple[int, bool]:
        """(exit code, whether it was told to stop); nothing of the group is left afterwards."""
        is_stopped = False
        try:
            try:
                await self._process.wait()
            except asyncio.CancelledError:
                is_stopped = True
                await self._stop(grace_s)
        finally:
            # What it started in the background must not outlive it.
            self._signal(signal.SIGKILL)
            await asyncio.wait([self._stdout.reading, self._stderr.reading], timeout=_LAST_WORDS_S)
            self._stdout.close()
            self._stderr.close()
        return await self._process.wait(), is_stopped

    async def _stop(self, grace_s: float) -> None:
        self._signal(signal.SIGTERM)
        # Cancelled once more: the grace is over.
        with suppress(TimeoutError, asyncio.CancelledError):
            await asyncio.wait_for(self._process.wait(), grace_s)
            return
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def output(self) -> tuple[str, str]:
        """The ends of stdout and stderr."""
        return self._stdout.text, self._stderr.text


class _Tail:
    """A pipe that is read to its end, so that nobody is held up, and of which the end is kept."""

    def __init__(self, write_end: int, transport: asyncio.ReadTransport) -> None:
        self.write_end = write_end
        self.reading: asyncio.Task[None]
        self._transport = transport
        self._kept = bytearray()

    @classmethod
    async def open(cls, limit: int) -> Self:
        read_end, write_end = os.pipe()
        stream = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb", 0)
        )
        tail = cls(write_end, transport)
        tail.reading = asyncio.create_task(tail._read(stream, limit))
        return tail

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")

    async def _read(self, stream: asyncio.StreamReader, limit: int) -> None:
        while piece := await stream.read(limit):
            self._kept += piece
            del self._kept[:-limit]

    def close(self) -> None:
        self.reading.cancel()
        self._transport.close()


def variables(rollout: Rollout, places: Places, task: bytes) -> dict[str, str]:
    """What a command is told; `task` is the task as JSON."""
    found = {
        "OPENAI_BASE_URL": rollout.base_url,
        "OPENAI_API_KEY": rollout.api_key,
        "ANTHROPIC_BASE_URL": rollout.anthropic_base_url,
        "ANTHROPIC_API_KEY": rollout.api_key,
        "TURNFOLD_ROLLOUT_ID": places.rollout_id,
        "TURNFOLD_TASK_FILE": places.task_file,
        "TURNFOLD_RESULT_FILE": places.result_file,
    }
    if len(task) <= _LONGEST_TASK_VARIABLE:
        found["TURNFOLD_TASK"] = task.decode()
    if rollout.deadlines is not None:
        found["TURNFOLD_TIMEOUT_S"] = f"{rollout.deadlines.run_s:g}"
    return found


def _checked(command: str, setting: str) -> list[str]:
    try:
        words = split(command)
    except BadTemplate as error:
        raise CommandError(f"{setting}: {error}") from error
    if "{" not in words[0] and shutil.which(words[0]) is None:
        raise CommandError(
            f"{setting}={command!r}: there is no program {words[0]!r} here; a shell's own words "
            "(pipes, &&, $VARIABLES) need `sh -c '…'`"
        )
    return words

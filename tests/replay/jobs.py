"""Jobs for processes: in a module that they can import, which a test is not."""

import asyncio
import os
import signal
import sys
from functools import partial
from pathlib import Path

from turnfold.replay.client import OnProgress
from turnfold.replay.processes.app import Share, divided
from turnfold.schemas.errors import UserError


class NeedsTwo(UserError):
    """As some errors here do, it takes more than its text to make."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


async def describe(share: Share, on_progress: OnProgress, *, told: int) -> tuple[int, int]:
    on_progress(told)
    on_progress(told)
    return share.index, os.getpid()


async def fail(share: Share, _: OnProgress, *, is_for_users: bool) -> None:
    if share.index == 1:
        raise NeedsTwo("nothing", "there") if is_for_users else KeyError("lost")
    await asyncio.sleep(3600)


async def die(share: Share, _: OnProgress) -> None:
    if share.index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(3600)


async def endless(_: Share, on_progress: OnProgress, *, path: Path) -> None:
    """Until the test is over, leaving a file named after the process."""
    (path / str(os.getpid())).touch()
    while True:
        on_progress(1)
        await asyncio.sleep(0.05)


def main(path: Path) -> None:
    """A command of two such processes."""
    try:
        asyncio.run(divided(partial(endless, path=path), 2, lambda _: None))
    except KeyboardInterrupt:
        sys.exit(130)

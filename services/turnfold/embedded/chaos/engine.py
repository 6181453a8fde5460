"""An inference engine whose answer is a function of the prompt, over vLLM's HTTP.

    python -m turnfold.embedded.chaos.engine --model DIR --port 8000 --version-file run/version

The version file names the policy version that it serves.
"""

from __future__ import annotations

import asyncio
import signal
import zlib
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from tokenizers import Tokenizer

from turnfold.gateway.testing import Reply, ScriptedEngine, text_ids

_STOP = "<|im_end|>"
_LONGEST_WAIT_S = 0.1


class PromptEngine(ScriptedEngine):
    """The same prompt gives the same tokens and logprobs, whenever and by whomever it is asked."""

    def __init__(self, tokenizer: Tokenizer, version_file: Path, *, port: int) -> None:
        super().__init__(port=port)
        self._tokenizer, self._version_file = tokenizer, version_file

    async def reply_to(self, body: dict[str, Any]) -> Reply:
        prompt = body["token_ids"]
        number = zlib.crc32(np.asarray(prompt, np.uint32).tobytes())
        # Turns of different lengths, so that rollouts are interleaved in the log.
        await asyncio.sleep(_LONGEST_WAIT_S * (number % 7) / 7)
        ids = text_ids(self._tokenizer, f"the code is {number % 1000}{_STOP}")
        return Reply(
            ids=ids,
            logprobs=[-((number >> place) % 64 + 1) / 64 for place in range(len(ids))],
            weight_versions=[{"version": self._version(), "start": 0, "end": len(ids)}],
        )

    def _version(self) -> str:
        return self._version_file.read_text().strip() if self._version_file.exists() else "0"


def main(
    model: Annotated[Path, typer.Option(help="Directory with tokenizer.json.")],
    port: Annotated[int, typer.Option(help="Port to listen on.")],
    version_file: Annotated[Path, typer.Option(help="File that names the served version.")],
) -> None:
    """Serve until SIGTERM."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with PromptEngine(tokenizer, version_file, port=port):
        signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    typer.run(main)

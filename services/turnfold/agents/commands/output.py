"""What a command said: its reward, or why there is none. Pure.

    the result file, when it is not empty       {"reward": 0.5}
    else the last such line of stdout           {"rewards": {"format": 0.1, "answer": 0.4}}

Besides `reward` or `rewards` an object may have `turn_rewards`, `is_truncated` and `info`; other
fields are ignored.
"""

from __future__ import annotations

import signal
from typing import Any

import msgspec

from turnfold.agents.results import InvalidResult, Result, as_result

MAX_TAIL_CHARS = 1500
ENVIRONMENT_CODES = {
    75: "EX_TEMPFAIL",
    125: "the container could not be run",
}
"""Exit codes that blame the world and not the agent: 75 is sysexits.h's, 125 that of docker."""


class _Said(msgspec.Struct):
    reward: float | None = None
    rewards: dict[str, float] = {}
    turn_rewards: dict[str, float] = {}
    is_truncated: bool = False
    info: dict[str, str] = {}


def result_in(file_text: str, stdout: str) -> Result | None:
    """The reward that a command gave; None when it gave none. Raises InvalidResult.

    >>> result_in("", 'thinking...\\n{"reward": 0.5}\\nbye\\n').reward
    0.5
    """
    if file_text.strip():
        found = _object(file_text)
        if found is None:
            raise InvalidResult(
                f"result file: expected an object such as {_EXAMPLE}, got {file_text[:80]!r}"
            )
        return _result(found)
    for line in reversed(stdout.splitlines()):
        found = _object(line)
        if found is not None:
            return _result(found)
    return None


def no_reward(stdout: str) -> str:
    """Why the output of a command that ended well is no reward."""
    lines = [line for line in stdout.splitlines() if line.strip()]
    last = f"its last line is {lines[-1][:120]!r}" if lines else "it wrote nothing"
    return (
        f"no reward: expected a line such as {_EXAMPLE} on stdout, that object in "
        f"$TURNFOLD_RESULT_FILE, or POST $OPENAI_BASE_URL/rollouts/current/finish; {last}"
    )


def how_it_ended(code: int) -> str:
    """An exit status for people.

    >>> how_it_ended(-9)
    'killed by SIGKILL, as for want of memory'
    """
    number = -code if code < 0 else code - 128
    if code < 0 or 128 < code < 160:
        hint = ", as for want of memory" if number == signal.SIGKILL else ""
        return f"killed by {_signal_name(number)}{hint}"
    if code in ENVIRONMENT_CODES:
        return f"exit code {code} ({ENVIRONMENT_CODES[code]})"
    return f"exit code {code}"


def with_tail(what: str, stderr: str, secret: str) -> str:
    """`what` and the end of stderr, without the key of the rollout."""
    text = stderr.strip()
    if secret:
        text = text.replace(secret, "[key]")
    return f"{what}; the end of its stderr:\n{text[-MAX_TAIL_CHARS:]}" if text else what


_EXAMPLE = '{"reward": 0.5}'


def _object(text: str) -> dict[str, Any] | None:
    """The text as an object with a reward, if it is one."""
    text = text.strip()
    if not text.startswith("{"):
        return None
    try:
        found = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    is_reward = isinstance(found, dict) and ("reward" in found or "rewards" in found)
    return found if is_reward else None


def _result(found: dict[str, Any]) -> Result:
    try:
        said = msgspec.convert(found, _Said)
    except msgspec.ValidationError as error:
        raise InvalidResult(f"{error}, in {str(found)[:120]}") from error
    if said.reward is None:
        parts = as_result(said.rewards)
        said.reward, said.rewards = parts.reward, parts.rewards
    return as_result(
        Result(
            reward=said.reward,
            rewards=said.rewards,
            turn_rewards=said.turn_rewards,
            is_truncated=said.is_truncated,
            info=said.info,
        )
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

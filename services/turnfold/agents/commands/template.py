"""The words of a command for one rollout. Pure.

    docker run --rm --name {name} {env} {image} python agent.py

becomes, for the task {"image": "sandbox:3"} of rollout g7-02,

    docker run --rm --name turnfold-g7-02 -e OPENAI_API_KEY -e OPENAI_BASE_URL … sandbox:3 python agent.py

No shell is involved, so nothing in a task can become a second command. `{env}` names variables
without their values, which docker and podman take from their own environment: no key is to be seen
in a list of processes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_ENV = "{env}"


class BadTemplate(ValueError):
    """A command that cannot be split or filled in; the text says what was expected."""


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """What a command may name besides the fields of the task."""

    rollout_id: str
    directory: str
    """Working directory of the rollout, removed afterwards."""
    task_file: str
    """The task as JSON."""
    result_file: str
    """Where the command may leave its reward."""

    @property
    def name(self) -> str:
        """For a container: what docker takes as a name."""
        return f"turnfold-{_NOT_IN_NAMES.sub('-', self.rollout_id)}"


def split(command: str) -> list[str]:
    """The words of a command as a shell would split them. Raises BadTemplate.

    >>> split("python 'my agent.py' --fast")
    ['python', 'my agent.py', '--fast']
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadTemplate(f"command {command!r}: {error}") from error
    if not words:
        raise BadTemplate("the command is empty: expected one such as `python my_agent.py`")
    return words


def filled(
    words: Sequence[str], places: Places, task: Mapping[str, Any], variables: Iterable[str]
) -> list[str]:
    """The words with every placeholder replaced. Raises BadTemplate naming one that is unknown."""
    values = {**task, **msgspec.structs.asdict(places), "name": places.name}
    done: list[str] = []
    for word in words:
        if word == _ENV:
            done += [part for variable in sorted(variables) for part in ("-e", variable)]
        else:
            done.append(_filled_word(word, values))
    return done


def _filled_word(word: str, values: Mapping[str, Any]) -> str:
    def value_of(match: re.Match[str]) -> str:
        field = match.group(1)
        if field not in values:
            raise BadTemplate(
                f"the command names {{{field}}}, which is neither a field of the task "
                f"nor one of {{name}}, {{rollout_id}}, {{directory}}, {{task_file}}, "
                f"{{result_file}} and {{env}}"
            )
        return _text(values[field])

    text = _PLACEHOLDER.sub(value_of, word)
    if text.startswith("-") and not word.startswith("-"):
        # Otherwise an image called `--privileged` would be an option.
        raise BadTemplate(f"{word} became {text!r}: a value must not begin with a dash")
    return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()

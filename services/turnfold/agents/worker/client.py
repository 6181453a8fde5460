"""Loads the agent that a worker is to run."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from turnfold.agents.client import Rollout
from turnfold.schemas.errors import UserError

Agent = Callable[[Any, Rollout], Awaitable[Any]]
"""`async def agent(task, rollout)`: task is the payload, the result a reward or a Result."""


class AgentError(UserError):
    """An agent that cannot be loaded; the text says what was expected."""


def load_agent(name: str) -> Agent:
    """The function that `package.module:function` or `path/to/file.py:function` names.

    Raises AgentError when there is no such file, module or async function.
    """
    where, colon, function_name = name.rpartition(":")
    if not colon or not where or not function_name:
        raise AgentError(
            f"agent {name!r}: expected module:function or path/to/file.py:function, "
            "such as my_agent.py:run"
        )
    module = _from_file(Path(where)) if where.endswith(".py") else _from_name(where)
    function = getattr(module, function_name, None)
    if function is None:
        raise AgentError(f"agent {name!r}: {where} has no {function_name!r}")
    if not inspect.iscoroutinefunction(function):
        raise AgentError(f"agent {name!r}: expected `async def {function_name}(task, rollout)`")
    return function  # type: ignore[no-any-return]


def _from_name(name: str) -> ModuleType:
    # As `python -m` does: an agent next to where the worker is started can be found.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise AgentError(f"agent module {name!r} cannot be imported: {error}") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise AgentError(f"agent file {path} does not exist")
    # Its neighbours can be imported, as when Python runs the file.
    sys.path.insert(0, str(path.parent.resolve()))
    name = f"turnfold_agent_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, f"{path} ends in .py"
    assert spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

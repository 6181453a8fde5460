"""Finds the agent that a worker is to run."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from turnfold.agents.attempts.app import Agent
from turnfold.agents.commands.app import CommandAgent
from turnfold.agents.worker.settings import Settings
from turnfold.schemas.errors import UserError


class AgentError(UserError):
    """An agent that cannot be loaded; the text says what was expected."""


def agent_of(settings: Settings) -> Agent:
    """The agent that the settings name. Raises AgentError and CommandError."""
    if settings.agent:
        return load_agent(settings.agent)
    return CommandAgent(
        settings.command, setup=settings.setup_command, cleanup=settings.cleanup_command
    )


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
        raise AgentError(f"agent {name!r}: {where} has no {function_name!r}{_meant(module)}")
    if not inspect.iscoroutinefunction(function):
        raise AgentError(
            f"agent {name!r}: expected `async def {function_name}(task, rollout)`. A program that "
            'is not async runs as a command: --command "python my_agent.py"'
        )
    _check_parameters(name, function)
    return function  # type: ignore[no-any-return]


def _meant(module: ModuleType) -> str:
    """The async functions that are there, when the one asked for is not."""
    found = [
        name
        for name, function in vars(module).items()
        if inspect.iscoroutinefunction(function) and not name.startswith("_")
    ]
    return f"; it has async {', '.join(found)}" if found else ""


def _check_parameters(name: str, function: Agent) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind("task", "rollout")
    except TypeError as error:
        raise AgentError(
            f"agent {name!r}: it is called with (task, rollout) and takes {signature}"
        ) from error


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
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise AgentError(f"agent file {path} cannot be loaded: {_what(error)}") from error
    return module


def _what(error: Exception) -> str:
    """An error of the agent's own file, with the line when there is one."""
    line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}: {error.msg if line else error}{line}"  # type: ignore[attr-defined]

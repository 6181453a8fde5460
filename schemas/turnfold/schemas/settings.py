"""Settings of a process: one frozen Struct, filled from TURNFOLD_* variables and options.

class Settings(Wire): bootstrap: str = "127.0.0.1:9092"

load(Settings, os.environ)                        TURNFOLD_BOOTSTRAP, or the default
load(Settings, os.environ, bootstrap="kafka:9")   an option wins over the environment
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from turnfold.schemas.errors import UserError

PREFIX = "TURNFOLD_"

S = TypeVar("S", bound=msgspec.Struct)

Secret = Annotated[str, msgspec.Meta(extra={"is_secret": True})]
"""Type of a setting that no repr and no error may show."""


class SettingsError(UserError, ValueError):
    """A setting that is missing or makes no sense; the text names the variable."""


def variable(field: str) -> str:
    """Environment variable of a field: `max_staleness` is TURNFOLD_MAX_STALENESS."""
    return PREFIX + field.upper()


def load(kind: type[S], environment: Mapping[str, str], /, **options: Any) -> S:
    """Options that are not None win over the environment, which wins over the defaults.

    Raises SettingsError naming the variable, what was expected and what came.
    """
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        name = variable(field.name)
        if options.get(field.name) is not None:
            values[field.name] = _checked(options[field.name], field.type, field.name)
        elif environment.get(name, "") != "":
            values[field.name] = _converted(environment[name], field.type, name)
        elif field.required:
            raise SettingsError(f"{name} is not set and has no default")
    try:
        return kind(**values)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _checked(value: Any, kind: Any, name: str) -> Any:
    """An option as it came, which is one of the words that it may be where these are few."""
    allowed = get_args(kind) if get_origin(kind) is Literal else (value,)
    if value not in allowed:
        option = f"--{name.replace('_', '-')}"
        raise SettingsError(f"{option} {value!r}: expected one of {', '.join(map(str, allowed))}")
    return value


def is_secret(kind: Any) -> bool:
    """Whether a field of this type holds a secret."""
    return bool(kind == Secret)


def _converted(text: str, kind: Any, name: str) -> Any:
    if kind in (str, Secret):  # as it is: a password may begin with a brace
        return text
    is_json = text.lstrip().startswith(("[", "{"))  # lists and mappings are written as JSON
    try:
        if is_json:
            return msgspec.json.decode(text.encode(), type=kind)
        return msgspec.convert(text, kind, strict=False)
    except (msgspec.MsgspecError, ValueError) as error:
        allowed = get_args(kind) if get_origin(kind) is Literal else ()
        hint = f"; expected one of {', '.join(map(str, allowed))}" if allowed else ""
        raise SettingsError(f"{name}={text!r}: {error}{hint}") from error

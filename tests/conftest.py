"""Fixtures that the tests of the whole repository share."""

import importlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

# One thread for each process: two cores run several of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).parent.parent


def _settings_structs() -> list[type[msgspec.Struct]]:
    """Every settings Struct: `Settings` of each settings.py, and the RunConfig."""
    from turnfold.schemas.run import RunConfig

    structs: list[type[msgspec.Struct]] = [RunConfig]
    for source in (ROOT / "services" / "turnfold", ROOT / "trainer" / "turnfold"):
        for path in sorted(source.rglob("settings.py")):
            if path.parent.name == "log":
                continue  # the base of the others
            module = ".".join(path.relative_to(source.parent).with_suffix("").parts)
            structs.append(importlib.import_module(module).Settings)
    return structs


@pytest.fixture(scope="session")
def settings_fields() -> set[str]:
    """Names of all settings that any process reads."""
    return {field for struct in _settings_structs() for field in struct.__struct_fields__}


@pytest.fixture(scope="session")
def settings_defaults() -> dict[str, str]:
    """TURNFOLD_* variable -> its default as the README writes it; empty when there is none."""
    from turnfold.schemas.settings import variable

    return {
        variable(field.name): _shown(field)
        for struct in _settings_structs()
        for field in msgspec.structs.fields(struct)
    }


def _shown(field: Any) -> str:
    default = field.default
    if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    if default is msgspec.NODEFAULT or default is None or default == "":
        return ""
    if isinstance(default, tuple | list | dict):
        return msgspec.json.encode(default).decode()
    return str(default).lower() if isinstance(default, bool) else str(default)

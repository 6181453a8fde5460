"""Whether a directory holds whole weights: asked before an engine is told to load them.

An engine that fails in the middle of a reload has lost its parameters, and the next request ends it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turnfold.schemas.errors import UserError

_INDEX = "model.safetensors.index.json"
_HEADER_BYTES = 8


class UnusableWeights(UserError):
    """The text says which file is missing or cut short."""


def check_weights_directory(uri: str) -> Path:
    """The directory, when config and every shard are there and complete. Raises UnusableWeights."""
    directory = Path(uri.removeprefix("file://"))
    if not directory.is_dir():
        raise UnusableWeights(f"weights directory {directory} does not exist on this machine")
    if not (directory / "config.json").is_file():
        raise UnusableWeights(f"weights directory {directory} has no config.json")
    for shard in _shards(directory):
        _check_shard(shard)
    return directory


def _shards(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if not index.is_file():
        shards = sorted(directory.glob("*.safetensors"))
        if not shards:
            raise UnusableWeights(f"weights directory {directory} has no *.safetensors")
        return shards
    try:
        names: set[str] = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise UnusableWeights(f"{index} is not an index of shards") from error
    return [directory / name for name in sorted(names)]


def _check_shard(shard: Path) -> None:
    """The header of a safetensors file says how long the file must be."""
    if not shard.is_file():
        raise UnusableWeights(f"weights file {shard} is missing")
    size = shard.stat().st_size
    with shard.open("rb") as file:
        header_size = int.from_bytes(file.read(_HEADER_BYTES), "little")
        header = file.read(min(header_size, size))
    try:
        entries: dict[str, Any] = json.loads(header)
    except ValueError as error:
        raise UnusableWeights(f"weights file {shard} is damaged or cut short") from error
    entries.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    expected = _HEADER_BYTES + header_size + end
    if size != expected:
        raise UnusableWeights(f"weights file {shard} has {size} bytes, expected {expected}")

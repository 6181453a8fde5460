"""Whether a directory holds whole weights that fit: asked before an engine is told to load them.

An engine that fails in the middle of a reload may have lost its parameters. vLLM cannot load any
others after that, and SGLang takes a checkpoint in which tensors are missing without a word.
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


def check_fits(directory: Path, reference: Path, *, is_complete: bool) -> None:
    """Whether the tensors have the shapes of those of another directory, both of whole weights.

    With `is_complete` every tensor of the reference must be there too. One that only a base model
    and not its fine-tuned copy has may be right: a tied output layer, scales of a quantization.

    Raises UnusableWeights naming the first tensor that does not fit.
    """
    shapes = _shapes(directory)
    for name, expected in _shapes(reference).items():
        shape = shapes.get(name, None if is_complete else expected)
        if shape is None:
            raise UnusableWeights(
                f"weights directory {directory} has no tensor {name}, which {reference} has"
            )
        if shape != expected:
            raise UnusableWeights(
                f"weights directory {directory}: tensor {name} has shape {shape}, expected "
                f"{expected} as in {reference}"
            )


def _shapes(directory: Path) -> dict[str, list[int]]:
    shapes: dict[str, list[int]] = {}
    for shard in _shards(directory):
        entries, _ = _header(shard)
        shapes |= {name: entry["shape"] for name, entry in entries.items()}
    return shapes


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
    entries, data_starts = _header(shard)
    expected = data_starts + max(
        (entry["data_offsets"][1] for entry in entries.values()), default=0
    )
    size = shard.stat().st_size
    if size != expected:
        raise UnusableWeights(f"weights file {shard} has {size} bytes, expected {expected}")


def _header(shard: Path) -> tuple[dict[str, Any], int]:
    """Name -> dtype, shape and place of each tensor, and the byte at which the data begins."""
    with shard.open("rb") as file:
        header_size = int.from_bytes(file.read(_HEADER_BYTES), "little")
        header = file.read(min(header_size, shard.stat().st_size))
    try:
        entries: dict[str, Any] = json.loads(header)
    except ValueError as error:
        raise UnusableWeights(f"weights file {shard} is damaged or cut short") from error
    entries.pop("__metadata__", None)
    return entries, _HEADER_BYTES + header_size

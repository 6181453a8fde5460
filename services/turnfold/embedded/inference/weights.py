"""Reading a safetensors directory, and checking it against the running model before anything is
overwritten.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MARKER_FILE = "turnfold.json"
"""Written next to published weights: `{"policy_version": 3}`. A server started on them says that
version.
"""

NUM_NAMES_SHOWN = 3


class WeightsError(ValueError):
    """The directory does not hold weights for the running model; says what was expected and what
    was found.
    """


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors directory, by name, on the CPU.

    Raises:
        WeightsError: the directory or one of its files is missing or cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for path in _shards(directory):
        try:
            weights |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"weights file {path} cannot be read: {error}") from error
    return weights


def check_weights(
    weights: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    aliases: Iterable[str] = (),
) -> None:
    """Raise WeightsError unless `weights` has every parameter in its shape, nothing foreign, and
    only finite values.

    `aliases` are further names that may appear, such as that of an output layer tied to the
    embeddings.
    """
    missing = [name for name in parameters if name not in weights]
    if missing:
        raise WeightsError(f"weights lack {_listed(missing)} of the model")
    known = {*parameters, *aliases}
    foreign = [name for name in weights if name not in known]
    if foreign:
        raise WeightsError(f"weights hold {_listed(foreign)} that the model does not have")
    for name, parameter in parameters.items():
        _check_tensor(name, weights[name], parameter)


def marked_version(directory: Path) -> str:
    """The policy version that the directory's marker file names, "0" without one.

    Raises:
        WeightsError: the marker is there but is not `{"policy_version": <number>}`.
    """
    path = directory / MARKER_FILE
    if not path.exists():
        return "0"
    try:
        return str(int(json.loads(path.read_bytes())["policy_version"]))
    except (ValueError, KeyError, TypeError) as error:
        raise WeightsError(f'{path} should be {{"policy_version": <number>}}: {error!r}') from error


def _shards(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise WeightsError(f"weights directory {directory} does not exist")
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    index = directory / INDEX_FILE
    if not index.is_file():
        raise WeightsError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise WeightsError(f"weights index {index} cannot be read: {error!r}") from error
    return [directory / name for name in names]


def _check_tensor(name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
    if tensor.shape != parameter.shape:
        raise WeightsError(
            f"weight {name} has shape {list(tensor.shape)},"
            f" the model expects {list(parameter.shape)}"
        )
    if not torch.isfinite(tensor).all():
        raise WeightsError(f"weight {name} has values that are not finite")


def _listed(names: list[str]) -> str:
    """`3 tensors (a, b, c)`, cut short when there are many."""
    more = ", …" if len(names) > NUM_NAMES_SHOWN else ""
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{len(names)} {noun} ({', '.join(names[:NUM_NAMES_SHOWN])}{more})"

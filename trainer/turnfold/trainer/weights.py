"""Published weights: one directory of safetensors per policy version, ready for any engine.

    weights/LATEST                      v00000007
    weights/v00000007/config.json       with tokenizer and chat template, as transformers loads it
                      turnfold.json       {"policy_version": 7}
                      model.safetensors (or model-00001.safetensors … with an index)

Parameters come from the engine's `get_per_tensor_param`, verl's own export under Hugging Face
names, which every one of its engines has. Its checkpoint-engine hook would hand over the same
iterator; going without keeps versions, order and durability here.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from turnfold.schemas.errors import UserError
from turnfold.schemas.settings import SettingsError
from turnfold.schemas.wire import Wire
from turnfold.trainer.backends import durable

SHARD_BYTES = 4 << 30
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")


class WeightsError(UserError):
    """Weights that no engine should load; the text names directory and parameter."""


def model_dir(setting: str) -> Path:
    """The directory of the initial model. Raises SettingsError when there is none."""
    if not setting:
        raise SettingsError("TURNFOLD_MODEL is not set: give --model the directory of the model")
    directory = Path(setting).expanduser().resolve()
    if not (directory / "config.json").is_file():
        raise SettingsError(
            f"TURNFOLD_MODEL={setting}: expected a directory with config.json, weights and "
            "tokenizer; `turnfold tiny-model` makes a small one"
        )
    return directory


def placeholders(directory: Path) -> dict[int, str]:
    """Tokens that stand for an image, a video or sound in a model's prompts, named by config.json.

    {151655: "image_token_id"}
    """
    config = json.loads((directory / "config.json").read_text())
    names = ("image_token_id", "video_token_id", "audio_token_id", "image_token_index")
    return {int(config[name]): name for name in names if config.get(name) is not None}


def version_dir(root: Path, version: int) -> Path:
    return root / f"v{version:08d}"


class Publication(Wire, frozen=True, kw_only=True):
    """Where a version goes and how."""

    root: Path
    version: int
    model_dir: Path
    """Gives config and tokenizer."""
    dtype: str
    """What parameters are stored as: float32, bfloat16 or float16."""
    shard_bytes: int = SHARD_BYTES

    @property
    def directory(self) -> Path:
        return version_dir(self.root, self.version)


def write(publication: Publication, parameters: Iterable[tuple[str, Any]]) -> Path:
    """Write a version, validate it, give it its name, and point LATEST to it.

    A version that is there and valid stays as it is: engines may be reading it.
    Raises WeightsError when a parameter is not finite.
    """
    target = publication.directory
    if not is_valid(target):
        with durable.new_directory(target) as draft:
            _copy_config(publication.model_dir, draft, publication.dtype)
            _write_json(draft / "turnfold.json", {"policy_version": publication.version})
            _write_shards(draft, parameters, publication.dtype, publication.shard_bytes)
            validate(draft)
    durable.write_text(publication.root / "LATEST", target.name)
    return target


def stored(parameter: Any, dtype: str, *, is_copy: bool) -> Any:
    """A parameter in CPU memory as it is stored; with `is_copy` never the memory of `parameter`."""
    import torch

    tensor = parameter.detach()
    kind = getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype
    return tensor.to("cpu", kind, copy=is_copy).contiguous()


def validate(directory: Path) -> None:
    """Raise WeightsError unless config, tokenizer and every parameter can be read back."""
    from safetensors import SafetensorError, safe_open

    for name in ("config.json", "tokenizer_config.json"):
        if not (directory / name).is_file():
            raise WeightsError(f"{directory}: no {name}")
    expected = _weight_map(directory)
    found: set[str] = set()
    for shard in sorted(set(expected.values())):
        try:
            with safe_open(directory / shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a mapping
                    found.add(name)
                    _check_finite(directory, name, file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{directory}: {shard} cannot be read: {error}") from error
    if found != set(expected):
        raise WeightsError(f"{directory}: missing {sorted(set(expected) - found)[:5]}")


def is_valid(directory: Path) -> bool:
    """Is this a version that an engine can load?"""
    try:
        validate(directory)
    except WeightsError:
        return False
    return True


def num_parameters(directory: Path) -> int:
    """Numbers in the safetensors of a model, from their headers alone."""
    total = 0
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
        total += sum(math.prod(shape) for shape in shapes)
    return total


def versions(root: Path) -> list[int]:
    """Versions on disk, oldest first."""
    return sorted(int(path.name[1:]) for path in root.glob("v????????") if path.is_dir())


def prune(root: Path, *, keep: int, served: int | None) -> list[int]:
    """Remove old versions and return them.

    The newest `keep` stay (2 at least), and so does every version from the served one on: an engine
    that restarts loads it, and others may be on their way past it.
    """
    found = versions(root)
    newest = set(found[-max(keep, 2) :])
    removed = [v for v in found if v not in newest and (served is None or v < served)]
    for version in removed:
        shutil.rmtree(version_dir(root, version))
    return removed


def _copy_config(model_dir: Path, draft: Path, dtype: str) -> None:
    for pattern in _COPIED:
        for path in model_dir.glob(pattern):
            if not path.name.endswith(".index.json"):
                shutil.copyfile(path, draft / path.name)
    config = json.loads((draft / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    _write_json(draft / "config.json", config)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _write_shards(
    draft: Path, parameters: Iterable[tuple[str, Any]], dtype: str, shard_bytes: int
) -> None:
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(_shards(parameters, dtype, shard_bytes), 1):
        name = f"model-{number:05d}.safetensors"
        save_file(shard, draft / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(set(weight_map.values())) == 1:
        (draft / "model-00001.safetensors").rename(draft / "model.safetensors")
        return
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(draft / "model.safetensors.index.json", index)


def _shards(
    parameters: Iterable[tuple[str, Any]], dtype: str, shard_bytes: int
) -> Iterator[dict[str, Any]]:
    """Parameters on the CPU, in parts of about `shard_bytes`, so that no full copy is held."""
    shard: dict[str, Any] = {}
    for name, parameter in parameters:
        shard[name] = stored(parameter, dtype, is_copy=False)
        if sum(t.nbytes for t in shard.values()) >= shard_bytes:
            yield shard
            shard = {}
    if shard:
        yield shard


def _weight_map(directory: Path) -> dict[str, str]:
    """Shard by parameter, from the index or from the only shard."""
    from safetensors import SafetensorError, safe_open

    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return weight_map
        with safe_open(directory / "model.safetensors", framework="pt") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise WeightsError(f"{directory}: no readable weights: {error}") from error


def _check_finite(directory: Path, name: str, tensor: Any) -> None:
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise WeightsError(f"{directory}: parameter {name} has values that are not finite")

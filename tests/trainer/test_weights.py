from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnfold.schemas.trajectories import Row
from turnfold.trainer import weights
from turnfold.trainer.rows import TrainRow

pytestmark = pytest.mark.verl


def parameters(value: float = 1.0) -> list[tuple[str, Any]]:
    import torch

    return [("a", torch.full((2, 3), value)), ("b", torch.zeros(4)), ("c", torch.ones(5))]


def write(root: Path, version: int, model: Path, **options: Any) -> Path:
    made = options.pop("parameters", None) or parameters()
    chosen = {"dtype": "float32", **options}
    return weights.write(
        weights.Publication(root=root, version=version, model_dir=model, **chosen), made
    )


def test_a_version_is_a_directory_with_config_tokenizer_and_a_pointer(
    tmp_path: Path, tiny_model: Path
) -> None:
    directory = write(tmp_path, 7, tiny_model)
    assert directory.name == "v00000007"
    assert (tmp_path / "LATEST").read_text() == "v00000007"
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= {
        path.name for path in directory.iterdir()
    }
    assert json.loads((directory / "turnfold.json").read_text()) == {"policy_version": 7}
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_large_models_are_stored_in_shards_with_an_index(tmp_path: Path, tiny_model: Path) -> None:
    directory = write(tmp_path, 1, tiny_model, shard_bytes=24)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "a": "model-00001.safetensors",
        "b": "model-00002.safetensors",
        "c": "model-00002.safetensors",
    }
    assert index["metadata"]["total_size"] == 60
    (directory / "model-00002.safetensors").unlink()
    with pytest.raises(weights.WeightsError, match=r"model-00002.safetensors cannot be read"):
        weights.validate(directory)


def test_weights_are_stored_in_the_dtype_asked_for(tmp_path: Path, tiny_model: Path) -> None:
    from safetensors.torch import load_file

    directory = write(tmp_path, 1, tiny_model, dtype="bfloat16")
    assert str(load_file(directory / "model.safetensors")["a"].dtype) == "torch.bfloat16"
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_parameter_that_is_not_finite_is_never_published(
    tmp_path: Path, tiny_model: Path
) -> None:
    with pytest.raises(weights.WeightsError, match="parameter a has values that are not finite"):
        write(tmp_path, 3, tiny_model, parameters=parameters(float("nan")))
    assert list(tmp_path.iterdir()) == []


def test_a_valid_version_is_left_alone_and_a_damaged_one_is_written_again(
    tmp_path: Path, tiny_model: Path
) -> None:
    directory = write(tmp_path, 1, tiny_model)
    first = (directory / "model.safetensors").read_bytes()
    write(tmp_path, 1, tiny_model, parameters=parameters(2.0))
    assert (directory / "model.safetensors").read_bytes() == first
    (directory / "model.safetensors").write_bytes(first[:-3])
    assert not weights.is_valid(directory)
    write(tmp_path, 1, tiny_model)
    assert (directory / "model.safetensors").read_bytes() == first


def test_pruning_keeps_the_newest_and_everything_from_the_served_version_on(tmp_path: Path) -> None:
    for version in range(8):
        weights.version_dir(tmp_path, version).mkdir()
    assert weights.prune(tmp_path, keep=1, served=4) == [0, 1, 2, 3]
    assert weights.prune(tmp_path, keep=3, served=None) == [4]
    assert weights.prune(tmp_path, keep=0, served=7) == [5]
    assert weights.versions(tmp_path) == [6, 7]


def test_transformers_loads_published_weights_and_gives_the_trainers_logprobs(
    make_backend: Callable[..., Any],
    random_row: Callable[..., Row],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from turnfold.trainer.plan import plan

    backend, schedule = make_backend(optimizer="AdamW")
    rng = np.random.default_rng(5)
    rows = [TrainRow(f"r{i}", f"g{i}", random_row(rng), float(rng.normal())) for i in range(8)]
    backend.update(rows, plan([row.size for row in rows], schedule))
    exported = dict(backend.weights())
    assert "lm_head.weight" not in exported  # tied to the embedding
    directory = write(tmp_path, 1, tiny_model, parameters=exported.items())

    model = AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.float32
    assert len(AutoTokenizer.from_pretrained(directory)) == len(
        AutoTokenizer.from_pretrained(tiny_model)
    )
    for row, expected in zip(rows, backend.logprobs(rows), strict=True):
        ids = torch.tensor([row.row.token_ids.tolist()])
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])
        assert logprobs[row.num_prompt - 1 :, 0].tolist() == pytest.approx(expected, abs=1e-5)

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from turnfold.embedded.inference.weights import (
    WeightsError,
    check_weights,
    marked_version,
    read_weights,
)

PARAMETERS = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}


def test_a_single_file_is_read(tmp_path: Path) -> None:
    save_file(PARAMETERS, tmp_path / "model.safetensors")
    assert read_weights(tmp_path).keys() == {"a", "b"}


def test_the_shards_of_an_index_are_read_together(tmp_path: Path) -> None:
    save_file({"a": PARAMETERS["a"]}, tmp_path / "model-00001.safetensors")
    save_file({"b": PARAMETERS["b"]}, tmp_path / "model-00002.safetensors")
    weight_map = {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert read_weights(tmp_path).keys() == {"a", "b"}


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="nowhere does not exist"):
        read_weights(tmp_path / "nowhere")


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        read_weights(tmp_path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read"):
        read_weights(tmp_path)


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"model-00001\.safetensors cannot be read"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"b": None}, r"lack 1 tensor \(b\)"),
        ({"c": torch.zeros(1)}, r"hold 1 tensor \(c\) that the model does not have"),
        ({"b": torch.zeros(5)}, r"b has shape \[5\], the model expects \[4\]"),
        ({"a": torch.full((2, 3), torch.nan)}, "a has values that are not finite"),
        ({"a": torch.full((2, 3), torch.inf)}, "a has values that are not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict[str, Any], complaint: str) -> None:
    weights = {k: v for k, v in {**PARAMETERS, **change}.items() if v is not None}
    with pytest.raises(WeightsError, match=complaint):
        check_weights(weights, PARAMETERS)


def test_the_second_name_of_a_tied_tensor_is_welcome() -> None:
    check_weights({**PARAMETERS, "tied": PARAMETERS["a"]}, PARAMETERS, aliases=["tied"])


def test_a_directory_without_a_marker_is_version_zero(tmp_path: Path) -> None:
    assert marked_version(tmp_path) == "0"


def test_the_marker_names_the_version(tmp_path: Path) -> None:
    (tmp_path / "turnfold.json").write_text('{"policy_version": 12}')
    assert marked_version(tmp_path) == "12"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"policy_version": "new"}'])
def test_a_marker_that_names_no_version_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "turnfold.json").write_text(text)
    with pytest.raises(WeightsError, match="policy_version"):
        marked_version(tmp_path)

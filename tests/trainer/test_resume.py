from __future__ import annotations

from pathlib import Path

import pytest

from turnfold.trainer import checkpoints
from turnfold.trainer.checkpoints import Checkpoint, CheckpointError, State
from turnfold.trainer.resume import Origin, origin

MODEL = Path("/models/initial")


def saved(root: Path, num_processes: int, *, has_full_weights: bool, batch: int = 7) -> Checkpoint:
    state = State(run_id="t", batch=batch, config_digest="c", num_processes=num_processes)
    draft = checkpoints.begin(root, batch)
    (draft / "actor" / "huggingface").mkdir(parents=True)
    if has_full_weights:
        (draft / "actor" / "huggingface" / "model.safetensors").write_bytes(b"weights")
    return checkpoints.commit(root, state, draft)


def test_a_run_without_a_checkpoint_starts_from_the_model() -> None:
    assert origin(None, model=MODEL, num_processes=2, is_lora=False) == Origin(None, MODEL)


def test_as_many_processes_load_the_checkpoint_itself(tmp_path: Path) -> None:
    found = saved(tmp_path, 2, has_full_weights=True)
    assert origin(found, model=MODEL, num_processes=2, is_lora=False) == Origin(found, MODEL)


def test_another_number_of_processes_goes_on_from_full_weights(tmp_path: Path) -> None:
    found = saved(tmp_path, 2, has_full_weights=True)
    full = tmp_path / "b00000007" / "actor" / "huggingface"
    assert origin(found, model=MODEL, num_processes=1, is_lora=False) == Origin(None, full)


@pytest.mark.parametrize(("has_full_weights", "is_lora"), [(False, False), (True, True)])
def test_without_usable_full_weights_another_number_of_processes_is_refused(
    tmp_path: Path, has_full_weights: bool, is_lora: bool
) -> None:
    found = saved(tmp_path, 2, has_full_weights=has_full_weights)
    reason = r"saved by 2 process\(es\) .* here are 1: start as many, or train with .*hf_model"
    with pytest.raises(CheckpointError, match=reason):
        origin(found, model=MODEL, num_processes=1, is_lora=is_lora)


def test_before_the_first_batch_any_number_of_processes_starts_from_the_model(
    tmp_path: Path,
) -> None:
    found = saved(tmp_path, 2, has_full_weights=False, batch=0)
    assert origin(found, model=MODEL, num_processes=1, is_lora=False) == Origin(None, MODEL)

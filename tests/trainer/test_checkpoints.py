from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from turnfold.trainer import checkpoints
from turnfold.trainer.backends import durable
from turnfold.trainer.checkpoints import Checkpoint, CheckpointError, State


def state(batch: int) -> State:
    return State(run_id="t", batch=batch, config_digest="c", metrics={"reward_mean": 0.5})


def write(root: Path, state: State, save: Callable[[Path], None]) -> Checkpoint:
    draft = checkpoints.begin(root, state.batch)
    save(draft / "actor")
    return checkpoints.commit(root, state, draft)


def saver(content: bytes) -> Callable[[Path], None]:
    def save(directory: Path) -> None:
        (directory / "huggingface").mkdir(parents=True)
        (directory / "model.pt").write_bytes(content)
        (directory / "huggingface" / "config.json").write_bytes(b"{}")

    return save


def test_the_newest_checkpoint_comes_back_as_it_was_written(tmp_path: Path) -> None:
    for batch in (0, 1, 12):
        write(tmp_path, state(batch), saver(b"%d" % batch))
    found = checkpoints.newest_good(tmp_path)
    assert found is not None
    assert found.state == state(12)
    assert (found.actor_dir / "model.pt").read_bytes() == b"12"


def test_there_is_no_checkpoint_in_an_empty_directory(tmp_path: Path) -> None:
    assert checkpoints.newest_good(tmp_path) is None


@pytest.mark.field_case("prime-rl#1712")
def test_a_checkpoint_that_was_not_finished_has_no_name(tmp_path: Path) -> None:
    def failing(directory: Path) -> None:
        saver(b"half")(directory)
        raise RuntimeError("disk full")

    write(tmp_path, state(1), saver(b"one"))
    with pytest.raises(RuntimeError, match="disk full"):
        write(tmp_path, state(2), failing)
    assert checkpoints.newest_good(tmp_path) == read_back(tmp_path, 1)
    durable.remove_drafts(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["b00000001"]


def read_back(root: Path, batch: int) -> Checkpoint:
    return checkpoints.read(root / f"b{batch:08d}")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: (d / "actor" / "model.pt").write_bytes(b"twx"), "not what was written"),
        (lambda d: (d / "actor" / "model.pt").write_bytes(b"t"), "expected 3 bytes, found 1"),
        (lambda d: (d / "actor" / "model.pt").unlink(), "missing"),
        (lambda d: (d / "state.json").write_bytes(b"{"), "state.json"),
        (lambda d: (d / "state.json").unlink(), "state.json"),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_with_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], object],
    reason: str,
) -> None:
    write(tmp_path, state(1), saver(b"one"))
    damage(write(tmp_path, state(2), saver(b"two")).directory)
    found = checkpoints.newest_good(tmp_path)
    assert found is not None
    assert found.state.batch == 1
    assert "damaged checkpoint, taking the one before" in caplog.text
    assert reason in caplog.text


def test_when_every_checkpoint_is_damaged_the_run_does_not_start_anew(tmp_path: Path) -> None:
    (write(tmp_path, state(1), saver(b"one")).directory / "state.json").unlink()
    with pytest.raises(CheckpointError, match="none of 1 checkpoints is usable"):
        checkpoints.newest_good(tmp_path)


def test_the_newest_checkpoints_stay(tmp_path: Path) -> None:
    for batch in range(5):
        write(tmp_path, state(batch), saver(b"x"))
    checkpoints.prune(tmp_path, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "b00000002",
        "b00000003",
        "b00000004",
    ]
    checkpoints.prune(tmp_path, keep=0)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_newest_checkpoint_of_each_hour_stays_for_some_hours(tmp_path: Path) -> None:
    minutes = [8 * 60 + 55, 9 * 60 + 10, 9 * 60 + 50, 10 * 60 + 20, 10 * 60 + 40, 665, 680, 690]
    for batch, minute in enumerate(minutes):
        written = State(run_id="t", batch=batch, config_digest="c", at=minute * 60.0)
        write(tmp_path, written, saver(b"x"))
    checkpoints.prune(tmp_path, keep=2, hours=3)
    assert [int(path.name[1:]) for path in sorted(tmp_path.iterdir())] == [0, 2, 4, 6, 7]
    checkpoints.prune(tmp_path, keep=2, hours=2)
    assert [int(path.name[1:]) for path in sorted(tmp_path.iterdir())] == [2, 4, 6, 7]


def test_an_old_checkpoint_without_a_readable_inventory_has_no_age_and_goes(tmp_path: Path) -> None:
    for batch in range(4):
        write(tmp_path, state(batch), saver(b"x"))
    (tmp_path / "b00000000" / "state.json").unlink()
    checkpoints.prune(tmp_path, keep=2, hours=9)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["b00000002", "b00000003"]

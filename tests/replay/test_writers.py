"""Trajectories written for other tools."""

import io
import json

import pyarrow.parquet as pq
import pytest

from turnfold.replay.writers import writer_for
from turnfold.schemas import codec
from turnfold.schemas.errors import UserError
from turnfold.schemas.testing import row, trajectory
from turnfold.schemas.trajectories import Trajectory

TRAJECTORIES = [
    trajectory("r1", rows=[row([1, 2], [0, 1]), row([3, 4, 5], [0, 1, 1])], reward=0.5),
    trajectory("r2", rows=[], reward=None, reason="deadline"),
]


def written(suffix: str) -> io.BytesIO:
    file = io.BytesIO()
    writer = writer_for(suffix, file)
    for made in TRAJECTORIES:
        writer.add(made)
    writer.close()
    file.seek(0)
    return file


def test_msgpack_is_one_array_of_trajectories() -> None:
    assert codec.decode(list[Trajectory], written(".msgpack").read()) == TRAJECTORIES


def test_json_lines_hold_plain_integers_and_decode_again() -> None:
    lines = written(".jsonl").read().splitlines()
    assert json.loads(lines[0])["rows"][0]["token_ids"] == [1, 2]
    assert [codec.decode(Trajectory, line, codec.JSON) for line in lines] == TRAJECTORIES


def test_parquet_has_one_line_for_each_training_row() -> None:
    lines = pq.read_table(written(".parquet")).to_pylist()
    assert [(line["rollout_id"], line["row"]) for line in lines] == [("r1", 0), ("r1", 1)]
    assert lines[1]["token_ids"] == [3, 4, 5]
    assert lines[1]["loss_mask"] == [0, 1, 1]
    assert lines[1]["logprobs"] == [0, -0.5, -0.5]
    assert lines[1]["reward"] == 0.5


def test_another_ending_is_refused_with_those_that_work() -> None:
    with pytest.raises(UserError, match=r"\.msgpack, \.jsonl or \.parquet, got '\.csv'"):
        writer_for(".csv", io.BytesIO())

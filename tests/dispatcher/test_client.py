"""Data sets of every kind, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turnfold.dispatcher.client import DatasetError, open_dataset

ROWS = [{"question": "1+1", "answer": 2}, {"question": "2+3", "answer": 5}]


def write_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def rows_of(path: Path, split: str = "train") -> list[dict[str, Any]]:
    dataset = open_dataset(path, split)
    return [dataset[index] for index in range(len(dataset))]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    assert rows_of(path) == ROWS


def test_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "tasks.parquet")
    assert rows_of(tmp_path / "tasks.parquet") == ROWS


def test_arrow_streams_and_arrow_files(tmp_path: Path) -> None:
    write_stream(tmp_path / "stream.arrow", ROWS)
    assert rows_of(tmp_path / "stream.arrow") == ROWS
    table = pa.Table.from_pylist(ROWS)
    with (
        pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    assert rows_of(tmp_path / "file.arrow") == ROWS


def test_a_saved_data_set_keeps_the_order_of_its_shards(tmp_path: Path) -> None:
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    for name, row in zip(names, ROWS, strict=True):
        write_stream(tmp_path / name, [row])
    state = {"_data_files": [{"filename": name} for name in names]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert rows_of(tmp_path) == ROWS


def test_a_saved_data_set_dictionary_by_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:1])}
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "saved"))
    assert rows_of(tmp_path / "saved") == ROWS
    assert rows_of(tmp_path / "saved", "test") == ROWS[:1]
    with pytest.raises(DatasetError, match=r"has the splits \['train', 'test'\], not 'dev'"):
        open_dataset(tmp_path / "saved", "dev")


def test_a_directory_laid_out_as_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number, row in enumerate(ROWS):
        path = tmp_path / "data" / f"train-{number:05d}-of-00002.parquet"
        pq.write_table(pa.Table.from_pylist([row]), path)
    pq.write_table(pa.Table.from_pylist(ROWS[:1]), tmp_path / "data" / "trainee.parquet")
    assert rows_of(tmp_path) == ROWS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", r"tasks\.jsonl:2: expected a JSON object, got no JSON"),
        ("[1, 2]", r"tasks\.jsonl:2: expected a JSON object, got list"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(DatasetError, match=message):
        open_dataset(path)


def test_what_is_missing_empty_or_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"nowhere\.jsonl does not exist"):
        open_dataset(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DatasetError, match="is empty"):
        open_dataset(tmp_path / "empty.jsonl")
    (tmp_path / "tasks.csv").write_text("a,b\n")
    with pytest.raises(DatasetError, match=r"expected \.jsonl, \.parquet, \.arrow"):
        open_dataset(tmp_path / "tasks.csv")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DatasetError, match=r"has no train\*\.parquet"):
        open_dataset(tmp_path / "folder")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DatasetError, match=r"cannot read data set .*damaged\.parquet"):
        open_dataset(tmp_path / "damaged.parquet")


@pytest.mark.field_case("agent-lightning#559")
def test_a_data_set_of_images_is_refused(tmp_path: Path) -> None:
    image = {"bytes": b"png", "path": "a.png"}
    pq.write_table(pa.Table.from_pylist([{"q": "?", "photo": image}]), tmp_path / "t.parquet")
    with pytest.raises(DatasetError, match="column 'photo' holds images"):
        open_dataset(tmp_path / "t.parquet")

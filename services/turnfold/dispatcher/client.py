"""Reads data sets: JSON lines, parquet, arrow, and Hugging Face data set directories."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from turnfold.schemas.errors import UserError

_SUFFIXES = (".jsonl", ".parquet", ".arrow")

Row = dict[str, Any]


class DatasetError(UserError):
    """A data set that cannot be used; the text names file and line."""


class Dataset:
    """Rows by number: `len(dataset)`, `dataset[3]`."""

    def __init__(self, path: Path, num_rows: int, read: Callable[[int], Row]) -> None:
        self.path = path
        self._num_rows = num_rows
        self._read = read

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> Row:
        return self._read(index)


def open_dataset(path: Path | str, split: str = "train") -> Dataset:
    """Open a data set.

        tasks.jsonl                              one JSON object a line
        tasks.parquet, tasks.arrow               one table
        directory/ of `Dataset.save_to_disk`     and of `DatasetDict.save_to_disk`, by `split`
        directory/data/train-00000-of-00002.parquet   as the Hugging Face hub lays it out

    Raises DatasetError when there is nothing to read, or something else than rows.
    """
    path = Path(path)
    files = _split_files(path, split) if path.is_dir() else [path]
    suffixes = {file.suffix for file in files}
    if len(suffixes) > 1:
        raise DatasetError(f"{path}: expected files of one kind, found {sorted(suffixes)}")
    (suffix,) = suffixes
    try:
        dataset = _rows(path, files) if suffix == ".jsonl" else _tables(path, files, suffix)
    except FileNotFoundError as error:
        raise DatasetError(f"data set {error.filename} does not exist") from error
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"cannot read data set {path}: {error}") from error
    if len(dataset) == 0:
        raise DatasetError(f"data set {path} is empty")
    return dataset


def _split_files(directory: Path, split: str) -> list[Path]:
    if (directory / "dataset_dict.json").exists():
        return _split_files_of_dict(directory, split)
    if (directory / "state.json").exists():
        return _saved_files(directory)
    found = [
        file
        for folder in (directory, directory / "data")
        for file in sorted(folder.glob("*"))
        if file.suffix in _SUFFIXES and re.match(rf"{re.escape(split)}(\b|_|-)", file.name)
    ]
    if not found:
        raise DatasetError(
            f"data set {directory} has no {split}*.parquet, {split}*.jsonl or {split}*.arrow, "
            "and was not written by save_to_disk"
        )
    return found


def _split_files_of_dict(directory: Path, split: str) -> list[Path]:
    splits = msgspec.json.decode((directory / "dataset_dict.json").read_bytes())["splits"]
    if split not in splits:
        raise DatasetError(f"data set {directory} has the splits {splits}, not {split!r}")
    return _saved_files(directory / split)


def _saved_files(directory: Path) -> list[Path]:
    state = msgspec.json.decode((directory / "state.json").read_bytes())
    return [directory / entry["filename"] for entry in state["_data_files"]]


def _rows(path: Path, files: list[Path]) -> Dataset:
    rows: list[Row] = []
    for file in files:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    rows.append(_row(line, f"{file}:{number}"))
    return Dataset(path, len(rows), rows.__getitem__)


def _row(line: bytes, where: str) -> Row:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise DatasetError(f"{where}: expected a JSON object, got no JSON: {error}") from error
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def _tables(path: Path, files: list[Path], suffix: str) -> Dataset:
    readers: dict[str, Callable[[Path], Any]] = {".parquet": pq.read_table, ".arrow": _arrow_table}
    if suffix not in readers:
        raise DatasetError(f"data set {path}: expected {', '.join(_SUFFIXES)} or a directory")
    table = pa.concat_tables([readers[suffix](file) for file in files])
    for field in table.schema:
        _refuse_images(path, field)
    return Dataset(path, table.num_rows, lambda index: table.slice(index, 1).to_pylist()[0])


def _arrow_table(file: Path) -> Any:
    """`datasets` writes arrow streams, others arrow files; both are mapped, not read."""
    source = pa.memory_map(str(file))
    try:
        return pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_file(source).read_all()


def _refuse_images(path: Path, field: Any) -> None:
    """Rows are token ids only: training on an image task without its images would look fine."""
    if not pa.types.is_struct(field.type):
        return
    if {child.name for child in field.type} == {"bytes", "path"}:
        raise DatasetError(
            f"data set {path}: column {field.name!r} holds images or audio, "
            "and turnfold trains on text only; leave the column out if the agent needs none"
        )

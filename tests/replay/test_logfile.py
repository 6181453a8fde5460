"""A log in a file: everything comes back, and a file that is not whole says so."""

import io

import pytest

from turnfold.log.records import Record
from turnfold.replay import logfile
from turnfold.replay.logfile import Header, LogFileError, LogReader, write_log

HEADER = Header(namespace="turnfold", topics={"turnfold.events": 2})


def records(number: int) -> list[Record]:
    return [
        Record(
            topic="turnfold.events",
            partition=offset % 2,
            offset=offset * 3,
            key=None if offset == 1 else b"r1",
            value=None if offset == 2 else bytes([offset % 256]) * 50,
            timestamp=1.5 + offset,
            headers=(("content-type", b"application/json"), ("x", b"\xff")),
        )
        for offset in range(number)
    ]


def written(number: int) -> bytes:
    file = io.BytesIO()
    assert write_log(file, HEADER, records(number)) == number
    return file.getvalue()


@pytest.mark.parametrize("number", [0, 1, 200])
def test_every_record_comes_back(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "_FRAME_BYTES", 1000)  # several frames
    reader = LogReader(io.BytesIO(written(number)), "x.tflog")
    assert reader.header == HEADER
    assert list(reader) == records(number)


@pytest.mark.parametrize("lost", [1, 3, 40, 100])
def test_a_file_that_was_cut_off_is_noticed(lost: int) -> None:
    reader = LogReader(io.BytesIO(written(200)[:-lost]), "x.tflog")
    with pytest.raises(LogFileError, match=r"x\.tflog is cut off or damaged"):
        list(reader)


def test_a_changed_byte_is_noticed_wherever_it_is() -> None:
    whole = written(3)
    for place in range(len(whole)):
        changed = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        with pytest.raises(LogFileError):
            list(LogReader(io.BytesIO(changed), "x.tflog"))


def test_another_kind_of_file_is_refused() -> None:
    with pytest.raises(LogFileError, match="is no turnfold log file"):
        LogReader(io.BytesIO(b"PK\x03\x04 a zip file"), "x.zip")

"""Lines reach the file or are counted; whatever happens, it keeps its bound and whole lines."""

import logging
import os
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.telemetry.record_file import RecordFile

BATCHES = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=40), max_size=30)


def written(path: Path, batches: list[bytes], max_bytes: int) -> RecordFile:
    file = RecordFile(str(path), max_bytes)
    for batch in batches:
        file.write(batch)
        assert file.flush()
    return file


@given(BATCHES)
def test_both_files_have_the_last_lines_whole_and_keep_the_bound(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]]
) -> None:
    path = tmp_path_factory.mktemp("record") / "trace.jsonl"
    lines = [b"".join(b"%d%b\n" % (size, b"x" * size) for size in batch) for batch in batches]
    file = written(path, lines, 1000)
    file.close()
    kept, before = path.read_bytes(), path.with_name("trace.jsonl.1")
    older = before.read_bytes() if before.exists() else b""
    assert max(len(kept), len(older)) <= 500
    assert b"".join(lines).endswith(older + kept)
    assert older or kept == b"".join(lines)
    assert file.dropped == 0
    assert {p.name for p in path.parent.iterdir()} <= {"trace.jsonl", "trace.jsonl.1"}


def test_a_new_record_leaves_the_one_before_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for name in (b"one\n", b"two\n"):
        written(path, [name], 1 << 20).close()
    RecordFile(str(path), 1 << 20).close()
    RecordFile(str(path), 1 << 20).close()  # an empty one replaces nothing
    assert path.read_bytes() == b""
    assert path.with_name("trace.jsonl.1").read_bytes() == b"two\n"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_missing_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"trace\.jsonl"):
        RecordFile(str(tmp_path / "none" / "trace.jsonl"), 1 << 20)


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_full_disk_costs_lines_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    file = written(Path("/dev/full"), [b"one\ntwo\n"] * 300, 1000)
    assert file.dropped == 600
    assert complaints(caplog) == [
        "--record /dev/full: lines are lost: No space left on device"
    ]  # fmt: skip
    file.close()
    assert not Path("/dev/full.1").exists()


def test_a_disk_that_is_full_in_the_middle_of_a_line_leaves_no_part_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, before = tmp_path / "trace.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    file = RecordFile(str(path), 1 << 20)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        for _ in range(60):
            file.write(b"x" * 99 + b"\n")
        assert file.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == (b"x" * 99 + b"\n") * 40
    assert file.dropped == 20
    assert len(complaints(caplog)) == 1
    file.write(b"y\n")  # there is room again
    file.close()
    assert path.read_bytes().endswith(b"x\ny\n")


def test_a_folder_that_vanishes_costs_lines_until_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "trace.jsonl"
    path.parent.mkdir()
    file = written(path, [b"x" * 39 + b"\n"], 100)
    path.parent.rename(tmp_path / "away")
    for _ in range(3):  # neither can be renamed nor begun
        file.write(b"x" * 39 + b"\n")
        assert file.flush()
    assert (file.dropped, len(complaints(caplog))) == (3, 1)
    assert os.listdir(tmp_path / "away") == ["trace.jsonl"]
    assert (tmp_path / "away" / "trace.jsonl").read_bytes() == b"x" * 39 + b"\n"
    path.parent.mkdir()
    file.write(b"y" * 39 + b"\n")
    file.close()
    assert path.read_bytes() == b"y" * 39 + b"\n"

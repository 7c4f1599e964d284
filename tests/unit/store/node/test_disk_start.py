"""What a node with an SSD tier does not start with: one sentence, and exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.disk import DISK, DiskNode

pytestmark = pytest.mark.slow


def run_store(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("kvrouter")), "store", "--port", "0"]
    command += ["--http-port", "0", "--unix-socket", str(folder / "t.sock"), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_second_node_does_not_get_the_folder(tmp_path: Path) -> None:
    with DiskNode(tmp_path):
        done = run_store(tmp_path, "--disk", str(tmp_path / "disk"), "--disk-size", DISK)
    assert done.returncode == 2
    assert "is used by another node" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--disk-size", "1PiB"], "give a smaller --disk-size"),
        ([], "needs --disk-size"),
        (["--disk-size", "1MiB"], "needs --disk-size"),
    ],
)
def test_a_size_that_cannot_be_is_one_sentence(
    tmp_path: Path, flags: list[str], sentence: str
) -> None:
    done = run_store(tmp_path, "--disk", str(tmp_path), *flags)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    done = run_store(tmp_path, "--disk", str(tmp_path / "away"), "--disk-size", DISK)
    assert done.returncode == 2
    assert f"mkdir -p {tmp_path / 'away'}" in done.stderr


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    data = tmp_path / "kvstore.data"
    data.write_bytes(b"letters of my grandmother")
    done = run_store(tmp_path, "--disk", str(tmp_path), "--disk-size", DISK)
    assert done.returncode == 2
    assert "move it away" in done.stderr
    assert data.read_bytes() == b"letters of my grandmother"


def test_the_files_are_for_the_owner_alone(tmp_path: Path) -> None:
    with DiskNode(tmp_path):
        pass
    for name in ("kvstore.data", "kvstore.journal"):
        assert (tmp_path / "disk" / name).stat().st_mode & 0o777 == 0o600

"""The demo's folder in the temporary directory, and its removal."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvrouter.tools.demo.children import demo_folder

HOLD = """
import sys
from kvrouter.tools.demo.children import demo_folder
with demo_folder() as folder:
    (folder / "router.log").write_text("words")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of this process and of those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


class Demo:
    """Another process with a folder of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.folder = Path(self._process.stdout.readline().strip())

    def end(self) -> None:
        self._process.communicate()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_a_folder_goes_with_its_demo(temporary: Path) -> None:
    with demo_folder() as folder:
        assert folder.parent == temporary
        assert folder.is_dir()
    assert not list(temporary.iterdir())


def test_the_next_demo_removes_what_a_killed_one_left(temporary: Path) -> None:
    dead = Demo()
    dead.kill()
    assert (dead.folder / "router.log").exists()
    with demo_folder() as folder:
        assert list(temporary.iterdir()) == [folder]


def test_the_folder_of_a_living_demo_stays(temporary: Path) -> None:
    del temporary
    living = Demo()
    with demo_folder():
        assert (living.folder / "router.log").exists()
    living.end()
    assert not living.folder.exists()


def test_what_the_demo_did_not_make_stays(temporary: Path) -> None:
    foreign = temporary / "kvrouter-demo-by-hand"
    foreign.mkdir()
    (foreign / "notes").write_text("mine")
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text("")
    os.symlink(elsewhere, temporary / "kvrouter-demo-link")
    with demo_folder():
        pass
    assert (foreign / "notes").exists()
    assert (elsewhere / "lock").exists()

"""The demo's folder in the temporary directory. The next demo removes that of a killed one."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "kvrouter-demo-"
LOCK = "lock"


@contextmanager
def demo_folder() -> Iterator[Path]:
    """A new folder for the time of the context. Removes those of dead demos first.

    A demo holds a lock (flock(2)) on a file in its folder. The kernel releases it when the process
    ends in any way.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            _remove_if_dead(folder)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        with (folder / f"{LOCK}.new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / LOCK)  # never visible under this name without its lock
            yield folder


def _remove_if_dead(folder: Path) -> None:
    """Raises OSError if the folder has no lock, or a living demo holds it."""
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        return
    descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)

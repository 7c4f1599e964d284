"""The folder of a demo in the temporary directory. The next demo removes what a killed one left."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["demo_folder"]

PREFIX = "kvrouter-demo-"
LOCK = "lock"


@contextmanager
def demo_folder() -> Iterator[Path]:
    """A new folder for the time of the context; those of demos that are dead are removed before.

    A demo holds a lock (flock(2)) on a file in its folder while it lives: the kernel gives it up
    with the process, however that ends.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        with (folder / f"{LOCK}.new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / LOCK)  # under this name it was never without its lock
            yield folder


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if not folder.is_symlink() and folder.stat().st_uid == os.geteuid():
                _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    """Raises OSError where there is no lock, or a living demo holds it."""
    descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)

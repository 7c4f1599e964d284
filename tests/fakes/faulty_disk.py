"""A disk whose calls fail as a test says: builds faulty_disk.c for a node that runs with it."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_suffix(".c")


def built(folder: Path) -> Path:
    """The library; skips without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler (apt-get install gcc)")
    library = folder / "faulty_disk.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run([*command, "-lpthread"], check=True)
    return library


@dataclass
class FaultyDisk:
    """What nodes that were started with `use` see of their disk."""

    shared_object: Path
    told: Path

    def use(self, patch: pytest.MonkeyPatch) -> None:
        self.told.write_text("")
        patch.setenv("LD_PRELOAD", str(self.shared_object))
        patch.setenv("FAULTY_DISK", str(self.told))

    def fail(self, call: str, error: str, first: int = 1, count: int = 1) -> None:
        """From its `first` occurrence on, `count` of these calls fail; the others do well."""
        self._tell(f"{call} {error} {first} {count}\n")

    def heal(self) -> None:
        self._tell("")

    def _tell(self, line: str) -> None:
        new = self.told.with_suffix(".new")
        new.write_text(line)
        new.replace(self.told)

"""How a check runs a program, and what it tells."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Checked:
    """How many files a program has read, and what it says against them."""

    files: int
    complaints: list[str]


class Absent(Exception):
    """The program is not here; a sentence with the remedy."""


def found(name: str, remedy: str) -> str:
    """Where the program is; Absent."""
    path = shutil.which(name)
    if path is None:
        raise Absent(f"there is no {name} ({remedy})")
    return path


def ran(program: str, *arguments: str | Path, silent: bool = False) -> list[str]:
    """The end of what a program says where it fails, or says where it should be `silent`."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).strip()
    if done.returncode == 0 and not (silent and said):
        return []
    return [f"{Path(program).name} {arguments[0]}: {said[-800:]}"]

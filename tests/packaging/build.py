"""Builds the distributions of this checkout with wheels/build.py, for every supported Python.

As a command: python -m tests.packaging.build FOLDER.
"""

import subprocess
import sys
import tempfile
import venv
from hashlib import sha256
from pathlib import Path

from tests.docs.pages import DOCS, commands
from tests.packaging.containers import IMAGES, no_engine, run_in

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "CMakeLists.txt", "csrc", "examples", "router", "store", "wheels")


def build(folder: Path, *, processor: str = "x86_64") -> None:
    """Build into the folder, unless it holds what these sources make.

    For x86-64 each Python builds in a container of its image. Else, and where none can be started,
    only this Python builds, in an environment of its own.
    """
    made_of = folder / "sources.sha256"
    key = _digest_of_sources()
    if made_of.exists() and made_of.read_text() == key:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    if processor == "x86_64" and no_engine() is None:
        for image in IMAGES:
            _build_in(image, folder)
    else:
        _build_here(folder, processor)
    made_of.write_text(key)


def _build_in(image: str, folder: Path) -> None:
    script = f"""
        python -m venv v
        . v/bin/activate
        cd /src
        {"; ".join(commands(DOCS / "install.md", "build container"))} /wheels
    """
    run_in(image, script, mounts={ROOT: "/src:ro", folder: "/wheels"})


def _build_here(folder: Path, processor: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        venv.create(name, with_pip=True)
        python = Path(name) / "bin" / "python"
        needed = ROOT / "wheels/requirements.txt"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", needed], check=True)
        script = str(ROOT / "wheels/build.py")
        command = [str(python), script, "--target", processor, str(folder)]
        subprocess.run(command, check=True)


def _digest_of_sources() -> str:
    total = sha256()
    for source in SOURCES:
        base = ROOT / source
        for path in sorted(base.rglob("*")) if base.is_dir() else [base]:
            if path.is_file() and "__pycache__" not in path.parts:
                total.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return total.hexdigest()


if __name__ == "__main__":
    build(Path(sys.argv[1]).absolute())

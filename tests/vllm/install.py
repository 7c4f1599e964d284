"""Installs the store of this checkout into the environment of a vLLM engine, as a user would.

As a command: python -m tests.vllm.install PYTHON.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

from tests.vllm.models import cache_folder

CHECKOUT = Path(__file__).parents[2]


def install_into(python: Path) -> Path | None:
    """Install kvrouter-store unless it is installed. Returns what engines need beside that.

    For development, KVROUTER_VLLM_SITE names a folder to put onto the engines' PYTHONPATH instead;
    nothing is installed then, nor into the Python that runs this: there it is (.ci/gpu-check).
    """
    site = os.environ.get("KVROUTER_VLLM_SITE")
    if site:
        return Path(site)
    if python == Path(sys.executable):
        return None
    key = _source_key()
    marker = cache_folder() / f"installed-{sha256(str(python).encode()).hexdigest()[:16]}"
    marker.parent.mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build folder, and one pip in an environment
        if not marker.exists() or marker.read_text() != key:
            wheel = _wheel(python, cache_folder() / f"wheel-{key[:16]}")
            _pip(python, "uninstall", "--yes", "kvrouter")  # older checkouts had one distribution
            _pip(python, "install", "--force-reinstall", wheel)
            marker.write_text(key)
    return None


def _wheel(python: Path, folder: Path) -> Path:
    """The wheel of the store, built into the folder where it is not there: one for every series."""
    if not (found := list(folder.glob("*.whl"))):
        build = CHECKOUT / "build" / "engines"
        _pip(python, "wheel", "--wheel-dir", folder, f"-Cbuild-dir={build}", CHECKOUT / "store")
        found = list(folder.glob("*.whl"))
        for old in cache_folder().glob("wheel-*"):
            if old != folder:
                shutil.rmtree(old)
    return found[0]


def _pip(python: Path, command: str, *arguments: str | Path) -> None:
    whole = [python, "-m", "pip", command, "--quiet", *arguments]
    subprocess.run(whole, check=True, timeout=1200)


def _source_key() -> str:
    """A digest over all that is built into the wheel."""
    total = sha256((CHECKOUT / "CMakeLists.txt").read_bytes())
    for root in ("store", "csrc", "examples"):
        for path in sorted((CHECKOUT / root).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                total.update(str(path.relative_to(CHECKOUT)).encode() + path.read_bytes())
    return total.hexdigest()


if __name__ == "__main__":
    install_into(Path(sys.argv[1]))

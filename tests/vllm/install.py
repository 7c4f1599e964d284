"""Puts this checkout into the environment of a vLLM engine, as a user would: pip, --no-deps."""

import os
import subprocess
from hashlib import sha256
from pathlib import Path

from tests.vllm.models import cache_folder

CHECKOUT = Path(__file__).parents[2]


def install_into(python: Path) -> Path | None:
    """Install the checkout where it is not installed yet. Returns what engines need beside that.

    For development, KVROUTER_VLLM_SITE names a folder to put onto the engines' PYTHONPATH instead;
    nothing is installed then.
    """
    site = os.environ.get("KVROUTER_VLLM_SITE")
    if site:
        return Path(site)
    key = _source_key()
    marker = cache_folder() / f"installed-{sha256(str(python).encode()).hexdigest()[:16]}"
    if not marker.exists() or marker.read_text() != key:
        marker.parent.mkdir(parents=True, exist_ok=True)
        build = cache_folder() / "build"
        subprocess.run(
            [
                *(python, "-m", "pip", "install", "--quiet", "--no-deps"),
                *("--force-reinstall", f"-Cbuild-dir={build}", CHECKOUT),
            ],
            check=True,
            timeout=600,
        )
        marker.write_text(key)
    return None


def _source_key() -> str:
    """A digest over all that is built into the wheel."""
    total = sha256((CHECKOUT / "pyproject.toml").read_bytes())
    for root in ("router", "store", "csrc"):
        for path in sorted((CHECKOUT / root).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                total.update(str(path.relative_to(CHECKOUT)).encode() + path.read_bytes())
    return total.hexdigest()

"""Other routers to measure beside, each from its own package in a virtual environment of its own.

Never part of the product and never in its environment: the peers' pins are theirs. The environments
lie in the user's cache, outside the tree, and are kept between runs.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

INSTALL_DEADLINE_S = 180


@dataclass(frozen=True)
class Peer:
    """A peer as pip knows it, and the module that runs it."""

    requirement: str
    module: str

    @property
    def home(self) -> Path:
        """Where its environment lies: the user's cache, a folder per requirement."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return cache / "kvrouter-bench" / self.requirement.replace("==", "-")


SGLANG_ROUTER = Peer("sglang-router==0.3.2", "sglang_router.launch_router")


def install(peer: Peer) -> Path:
    """Make the peer's environment where there is none; return its Python.

    Raises:
        RuntimeError: It cannot be installed; the text says why.
    """
    python = peer.home / "bin" / "python"
    if (peer.home / "installed").exists():
        return python
    commands = (
        [sys.executable, "-m", "venv", "--clear", str(peer.home)],
        [str(python), "-m", "pip", "install", "--quiet", peer.requirement],
    )
    for command in commands:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{peer.requirement}: {error}") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no output"]
            raise RuntimeError(f"{peer.requirement}: {lines[-1]}")
    (peer.home / "installed").touch()
    return python


if __name__ == "__main__":
    print(install(SGLANG_ROUTER))

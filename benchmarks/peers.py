"""Other products to compare with, each in a virtual environment of its own.

They are no part of the product, and have pins of their own. The environments are in the user's
cache, keyed by their pins, and stay there between runs.
"""

import fcntl
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

INSTALL_DEADLINE_S = 900


@dataclass(frozen=True)
class Peer:
    """A peer for pip: packages to install, one after the other, and the module that runs it."""

    requirements: tuple[str, ...]
    module: str = ""

    @property
    def home(self) -> Path:
        """The folder of its environment in the user's cache, one for each set of pins."""
        return cache() / "+".join(self.requirements).replace("==", "-")

    @property
    def python(self) -> Path | None:
        """The interpreter of the finished environment, or None."""
        return self.home / "bin" / "python" if (self.home / "installed").exists() else None


SGLANG_ROUTER = Peer(("sglang-router==0.3.2",), "sglang_router.launch_router")
SMG = Peer(("smg==1.13.0",), "smg.launch_router")  # the successor of sglang-router
# torch first, by its own version: what InfiniStore asks for by itself brings gigabytes of CUDA.
# uvloop: the server drives the loop of this one by a libuv of its own, and aborts under later ones.
INFINISTORE = Peer(("torch==2.13.0", "infinistore==0.2.35", "uvloop==0.21.0"))
MOONCAKE = Peer(("mooncake-transfer-engine-non-cuda==0.3.13.post1",))


def cache() -> Path:
    """The folder of all environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrouter-bench"


def install(peer: Peer) -> Path:
    """The Python of the peer's environment, which is made if needed.

    Raises:
        RuntimeError: it cannot be installed; the text says why.
    """
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if peer.python is None:
            _make(peer)
    return peer.home / "bin" / "python"


def _make(peer: Peer) -> None:
    commands = [[sys.executable, "-m", "venv", "--clear", str(peer.home)]]
    pip = [str(peer.home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    commands += [[*pip, requirement] for requirement in peer.requirements]
    for command in commands:
        run(command, peer.requirements[-1])
    (peer.home / "installed").touch()


def run(command: list[str], what: str) -> None:
    """Run one step of an installation. Raises RuntimeError with its last line if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{what}: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise RuntimeError(f"{what}: {lines[-1]}")

"""Other products to compare with: `python -m benchmarks.peers_setup [NAME...]` installs the stores.

Mooncake gets an environment in the user's cache, keyed by its pin; so do the routers that
`benchmarks.wire` compares with, when it runs. Redis, and a library of Mooncake's, are packages of
the distribution, installed if this runs as root on Debian. Prints for each store what is installed,
or why it is not; exit status 1 if one is missing.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from benchmarks.arguments import parser_of
from benchmarks.wire_rig import compile_native

INSTALL_DEADLINE_S = 900
NAMES = ("Mooncake", "Redis")


@dataclass(frozen=True)
class Peer:
    """A peer for pip: its package, and the module that runs it."""

    requirement: str
    module: str = ""

    @property
    def home(self) -> Path:
        """The folder of its environment in the user's cache."""
        return cache() / self.requirement.replace("==", "-")

    @property
    def python(self) -> Path | None:
        """The interpreter of the finished environment, or None."""
        return self.home / "bin" / "python" if (self.home / "installed").exists() else None


SGLANG_ROUTER = Peer("sglang-router==0.3.2", "sglang_router.launch_router")
SMG = Peer("smg==1.13.0", "smg.launch_router")  # the successor of sglang-router
MOONCAKE = Peer("mooncake-transfer-engine-non-cuda==0.3.13.post1")


def cache() -> Path:
    """The folder of all environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvrouter-bench"


def install(peer: Peer) -> Path:
    """The Python of the peer's environment, which is made if needed.

    Raises:
        RuntimeError: it cannot be installed; the text says why.
    """
    cache().mkdir(parents=True, exist_ok=True)
    python = peer.home / "bin" / "python"
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if peer.python is None:
            run([sys.executable, "-m", "venv", "--clear", str(peer.home)], peer.requirement)
            pip = [str(python), "-m", "pip", "install", "--quiet", peer.requirement]
            run(pip, peer.requirement)
            (peer.home / "installed").touch()
    return python


def run(command: list[str], what: str) -> str:
    """What a step of an installation prints. RuntimeError: it fails; has its last line."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{what}: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise RuntimeError(f"{what}: {lines[-1]}")
    return done.stdout.strip()


@dataclass(frozen=True)
class Found:
    """A store that can run: its program, or its environment's Python, and a library to preload."""

    name: str
    program: Path
    version: str
    preload: Path | None = None


def find(name: str) -> Found:
    """An installed store. Raises RuntimeError, which says why, if it is not installed."""
    if name == "Mooncake":
        if MOONCAKE.python is None:
            raise RuntimeError("not set up: python -m benchmarks.peers_setup Mooncake")
        return Found(name, MOONCAKE.python, MOONCAKE.requirement, loopback_bind())
    program = shutil.which("redis-server")
    if program is None:
        raise RuntimeError("no program redis-server (Debian has a package of that name)")
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"\d+(\.\d+)+", printed.stdout)
    return Found(name, Path(program), f"redis {version[0] if version else '?'}")


def make(name: str) -> Found:
    """Install one store if needed. Raises RuntimeError, which says why, if that fails."""
    if name == "Mooncake":
        install(MOONCAKE)
        if find_library("ibverbs") is None:
            _debian("libibverbs1")
    elif shutil.which("redis-server") is None:
        _debian("redis-server")
    return find(name)


def _debian(package: str) -> None:
    """Install a package of the distribution, with a message: only this changes the machine."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(f"install {package} (this installs it as root on Debian only)")
    print(f"apt-get install {package}", flush=True)
    run(["apt-get", "update", "--quiet"], "apt-get update")
    run(["apt-get", "install", "--quiet", "--yes", package], f"apt-get install {package}")


def loopback_bind() -> Path:
    """The library of benchmarks/native/loopback_bind.c, to preload."""
    library = cache() / "loopback_bind.so"
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as folder:
        made = compile_native("loopback_bind", Path(folder), "-shared", "-fPIC", "-ldl")
        made.replace(library)
    return library


def main() -> int:
    """Exit status: 0 if every named peer is installed."""
    parser = parser_of("benchmarks.peers_setup", __doc__, figures=False)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    names = parser.parse_args().names or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}")
    missing = 0
    for name in names:
        try:
            found = make(name)
        except RuntimeError as error:
            print(f"{name:12} missing: {error}", flush=True)
            missing += 1
        else:
            print(f"{name:12} {found.version}: {found.program}", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

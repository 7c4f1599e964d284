"""Install the stores to compare with: `python -m benchmarks.peers_setup [NAME...]`.

InfiniStore and Mooncake get an environment each in the user's cache (1.3 GB in all), keyed by their
pins. Redis and memcached are programs of the distribution, installed if this runs as root on
Debian. Prints for each what is installed, or why it is not; exit status 1 if one is missing.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peers
from benchmarks.arguments import parser_of

__all__ = ["NAMES", "Found", "compiled", "find", "make"]

NATIVE = Path(__file__).resolve().parent / "native"
ENVIRONMENTS = {"InfiniStore": peers.INFINISTORE, "Mooncake": peers.MOONCAKE}
PROGRAMS = {"Redis": "redis-server", "memcached": "memcached"}
NAMES = (*ENVIRONMENTS, *PROGRAMS)
VERBS = Path("/usr/include/infiniband/verbs.h")
VERBS_PACKAGES = ["libibverbs1", "libibverbs-dev"]


@dataclass(frozen=True)
class Found:
    """A peer that can run: its program, or its environment's Python, and libraries to preload."""

    name: str
    program: Path
    version: str
    preload: tuple[Path, ...] = ()


def find(name: str) -> Found:
    """An installed peer. Raises RuntimeError, which says why, if it is not installed."""
    if name in PROGRAMS:
        return _program(name)
    peer = ENVIRONMENTS[name]
    if peer.python is None:
        raise RuntimeError(f"not set up: python -m benchmarks.peers_setup {name}")
    preload = _shims() if name == "InfiniStore" else (compiled("loopback_bind"),)
    return Found(name, peer.python, peer.requirements[-1 if name == "Mooncake" else 1], preload)


def make(name: str) -> Found:
    """Install one peer if needed. Raises RuntimeError, which says why, if that fails."""
    if name in PROGRAMS:
        if shutil.which(PROGRAMS[name]) is None:
            _debian([PROGRAMS[name]])
    else:
        peers.install(ENVIRONMENTS[name])
        if name == "InfiniStore" and not VERBS.exists():
            _debian(VERBS_PACKAGES)
    return find(name)


def _program(name: str) -> Found:
    program = shutil.which(PROGRAMS[name])
    if program is None:
        raise RuntimeError(f"no program {PROGRAMS[name]} (Debian has a package of that name)")
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"\d+(\.\d+)+", printed.stdout)
    return Found(name, Path(program), f"{name.lower()} {version[0] if version else '?'}")


def _debian(packages: list[str]) -> None:
    """Install packages of the distribution, with a message: only this changes the machine."""
    wanted = " ".join(packages)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise RuntimeError(f"install {wanted} (this installs them as root on Debian only)")
    print(f"apt-get install {wanted}", flush=True)
    peers.run(["apt-get", "update", "--quiet"], "apt-get update")
    peers.run(["apt-get", "install", "--quiet", "--yes", *packages], f"apt-get install {wanted}")


def _shims() -> tuple[Path, ...]:
    """Libraries that InfiniStore's server needs without RDMA."""
    if not VERBS.exists():
        raise RuntimeError(f"no {VERBS.name}: install {' '.join(VERBS_PACKAGES)}")
    return tuple(compiled(name) for name in ("fake_verbs", "loopback_bind"))


def compiled(name: str) -> Path:
    """A library to preload, from benchmarks/native, compiled once for each state of its source."""
    source = NATIVE / f"{name}.c"
    key = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    library = peers.cache() / f"{name}-{key}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CC", "cc")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(fresh), str(source), "-ldl"]
        peers.run(command, f"compiling {name}.c")
        fresh.replace(library)
    return library


def main() -> int:
    """Exit status: 0 if every named peer is installed."""
    parser = parser_of("benchmarks.peers_setup", __doc__)
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

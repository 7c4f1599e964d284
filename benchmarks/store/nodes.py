"""The servers of the store benchmark, one or two processes each on loopback."""

import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.peers_setup import Found
from benchmarks.wire_rig import NATIVE, Process, cpu_s
from kvrouter.tools.demo.children import KVROUTER, free_port

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
HOST = "127.0.0.1"
MIB = 1 << 20


@dataclass(frozen=True)
class Halves:
    """The cores of the servers and those of the clients, equal for all stores.

    Otherwise the kernel puts a client and its server on one core in one round and on two in the
    next, and a call takes half as long on one.
    """

    servers: tuple[int, ...]
    clients: tuple[int, ...]

    @classmethod
    def pick(cls) -> "Halves":
        """Half of the cores for each; clients get the odd one. They share a single core."""
        usable = sorted(os.sched_getaffinity(0))
        half = math.ceil(len(usable) / 2)
        return cls(servers=tuple(usable[half:] or usable), clients=tuple(usable[:half]))

    def __str__(self) -> str:
        return f"servers on {_cores(self.servers)}, clients on {_cores(self.clients)}"


def _cores(cores: Sequence[int]) -> str:
    return f"core{'s' * (len(cores) > 1)} {', '.join(map(str, cores))}"


@dataclass(frozen=True)
class Node:
    """A server: its addresses and its processes."""

    address: dict[str, str]
    pids: tuple[int, ...] = ()

    def cpu_s(self) -> float:
        """CPU seconds of its processes, user and system."""
        return sum(map(cpu_s, self.pids))


class Servers:
    """Starts servers by name, once each, on `cores`. Peers come from `found`."""

    def __init__(
        self, folder: Path, pool_bytes: int, found: dict[str, Found], cores: Sequence[int]
    ) -> None:
        self._folder = folder
        self._pool_bytes = pool_bytes
        self._found = found
        self._cores = cores
        self._nodes: dict[str, Node] = {"": Node({})}
        self._running = ExitStack()

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def node(self, name: str) -> Node:
        """The server of this name, started with the first call. Raises RuntimeError."""
        if name not in self._nodes:
            starters: dict[str, Callable[[], Node]] = {
                "kvstore checked": partial(self._kvstore, "checked"),
                "kvstore off": partial(self._kvstore, "off"),
                "raw": self._raw,
                "Mooncake": self._mooncake,
                "Redis": self._redis,
            }
            self._nodes[name] = starters[name]()
        return self._nodes[name]

    def _start(
        self,
        name: str,
        command: list[str],
        ready: Callable[[str], bool],
        found: Found | None = None,
    ) -> tuple[int, str]:
        """Start a process; its id and its output when it is ready."""
        process = Process(name, command, self._cores, self._folder, **variables(found))
        self._running.enter_context(process)
        process.await_true(lambda: ready(process.output()))
        return process.pid, process.output()

    def _kvstore(self, digests: str) -> Node:
        path = str(self._folder / f"kvstore-{digests}.sock")
        command = [*KVROUTER, "store", "--port", "0", "--http-port", "0", "--prefault"]
        command += ["--memory", f"{self._pool_bytes // MIB}MiB", "--unix-socket", path]
        command += ["--digests", digests]
        pid, output = self._start(
            f"kvstore {digests}", command, lambda out: "kvstore ready:" in out
        )
        port = re.search(r"kv://[^ ]*:(\d+)", output)
        assert port is not None
        address = {"host": HOST, "port": port[1], "path": path}
        return Node(address | {"pool_bytes": str(self._pool_bytes)}, (pid,))

    def _raw(self) -> Node:
        library, path = self._folder / "raw_pair.so", self._folder / "raw.sock"
        compiler = os.environ.get("CXX", "c++")
        digest = [NATIVE / "raw_pair_crc.cpp", *sorted((CSRC / "digest").glob("crc32c*.cpp"))]
        built = [compiler, "-O3", "-shared", "-fPIC", "-o", str(library), "-x", "c"]
        built += [str(NATIVE / "raw_pair.c"), "-x", "c++", "-std=c++20", f"-I{CSRC}"]
        built += map(str, digest)
        try:
            subprocess.run(built, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"raw_pair.c cannot be compiled: {error}") from error
        command = [sys.executable, "-m", "benchmarks.store.contenders.raw", str(library), str(path)]
        command += [str(self._pool_bytes)]
        pid, output = self._start("raw", command, lambda out: "ready" in out)
        address = {"host": HOST, "port": output.split()[1], "path": str(path)}
        return Node(address | {"library": str(library)}, (pid,))

    def _mooncake(self) -> Node:
        found = self._found["Mooncake"]
        master, meta, metrics = (free_port() for _ in range(3))
        command = [str(found.program.with_name("mooncake_master")), "--rpc_address", HOST]
        command += ["--rpc_port", str(master), "--enable_http_metadata_server=true"]
        command += ["--http_metadata_server_host", HOST]
        command += ["--http_metadata_server_port", str(meta)]
        command += ["--metrics_host", HOST, "--metrics_port", str(metrics)]
        ready = lambda _: _listens(master) and _listens(meta)  # noqa: E731
        master_pid, _ = self._start("Mooncake master", command, ready, found)
        url, where = f"http://{HOST}:{meta}/metadata", f"{HOST}:{master}"
        command = [str(found.program), "-m", "benchmarks.store.contenders.mooncake", HOST, url]
        command += [where, str(2 * self._pool_bytes)]  # it evicts before its segment is full
        pid, _ = self._start("Mooncake", command, lambda out: "ready 0" in out, found)
        return Node({"host": HOST, "metadata": url, "master": where}, (master_pid, pid))

    def _redis(self) -> Node:
        port = free_port()
        command = [str(self._found["Redis"].program), "--bind", HOST, "--port", str(port)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._folder)]
        pid, _ = self._start("Redis", command, lambda _: _listens(port))
        return Node({"host": HOST, "port": str(port)}, (pid,))


def variables(found: Found | None) -> dict[str, str]:
    """Environment variables: a process finds this package, and a peer stays on loopback."""
    if found is None or found.preload is None:
        return {"PYTHONPATH": str(ROOT)}
    near = {"LD_PRELOAD": str(found.preload), "MC_TCP_BIND_ADDRESS": HOST}
    return {"PYTHONPATH": str(ROOT)} | near


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False

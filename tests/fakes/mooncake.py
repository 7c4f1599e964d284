"""A real Mooncake Store over TCP: a master, and storage nodes in processes of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from tests.fakes.patience import eventually
from tests.fakes.stall import stall

SEGMENT_BYTES = 64 << 20
LEASE_MS = 200
CLIENT_TTL_S = 5
"""After which the master forgets a storage node that is silent."""
LOOPBACK = "127.0.0.1"
NODE = """
import json, sys
from mooncake.store import MooncakeDistributedStore
host, master, segment_bytes = sys.argv[1:]
store = MooncakeDistributedStore()
code = store.setup(host, "P2PHANDSHAKE", int(segment_bytes), 16 << 20, "tcp", "", master)
print("code", code, flush=True)
begun = set()

def put(key, begin):
    if begin:
        begun.add(key)
        return store.batch_put_session_start([key], [6])[0]
    if key in begun:
        begun.remove(key)
        return store.batch_put_session_end([key])[0]
    return store.put(key, b"kv of " + key.encode())

for line in sys.stdin:
    keys, begin = json.loads(line)
    print("code", next(filter(None, [put(key, begin) for key in keys]), 0), flush=True)
"""


class MooncakeProcess(ABC):
    """A process of Mooncake Store. It ends with its test.

    Args:
        log: a file.
        site: the package's folder.
        host: its address for others.
    """

    def __init__(self, log: Path, site: Path, host: str = LOOPBACK) -> None:
        self.host = host
        self.process: subprocess.Popen[str] | None = None
        self._log = log
        self._site = site

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    @abstractmethod
    def start(self) -> None:
        """Start it, where it was; returns when it can be used."""

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def stall(self) -> None:
        """SIGSTOP; returns when it stands still."""
        assert self.process is not None
        stall(self.process.pid)

    def resume(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _spawn(self, command: Sequence[str], stdout: int | None = None) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [str(self._site), os.environ.get("PYTHONPATH")]))
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=stdout or log,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": path, "MC_TCP_BIND_ADDRESS": self.host},
            )
        return self.process


class MooncakeMaster(MooncakeProcess):
    """The master. A load that takes longer than `lease_ms` fails: its keys may be evicted."""

    def __init__(
        self, log: Path, site: Path, host: str = LOOPBACK, *, lease_ms: int = LEASE_MS
    ) -> None:
        super().__init__(log, site, host)
        self._lease_ms = lease_ms
        self._port, self._admin_port = free_ports(2)

    @property
    def address(self) -> str:
        return f"{self.host}:{self._port}"

    @property
    def admin_address(self) -> str:
        """Of its HTTP port."""
        return f"{self.host}:{self._admin_port}"

    @property
    def segments_url(self) -> str:
        """Where it lists the storage nodes."""
        return f"http://{self.admin_address}/get_all_segments"

    def start(self) -> None:
        """Start it, where it was; returns when it listens."""
        program = self._site / "mooncake" / "mooncake_master"
        program.chmod(0o755)
        process = self._spawn(
            [
                str(program),
                f"--rpc_address={self.host}",
                f"--rpc_port={self._port}",
                f"--metrics_host={self.host}",
                f"--metrics_port={self._admin_port}",
                f"--default_kv_lease_ttl={self._lease_ms}",
                f"--client_ttl={CLIENT_TTL_S}",
            ]
        )
        for port in (self._port, self._admin_port):
            assert await_port(port, process, self.host), self.log


class MooncakeNode(MooncakeProcess):
    """A storage node.

    python: what its command begins with, for which the package was installed.
    """

    def __init__(
        self,
        log: Path,
        site: Path,
        master: str,
        host: str = LOOPBACK,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        python: Sequence[str] = (sys.executable,),
    ) -> None:
        super().__init__(log, site, host)
        self._command = [*python, "-c", NODE, host, master, str(segment_bytes)]

    def start(self) -> None:
        """Start it; returns when it has joined."""
        self._spawn(self._command, stdout=subprocess.PIPE)
        self._await_code()

    def put(self, keys: Sequence[str], *, begin: bool = False) -> None:
        """Store a value under each key; or begin to, and another `put` ends that."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([keys, begin]) + "\n")
        self.process.stdin.flush()
        self._await_code()

    def _await_code(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        code = next((line for line in self.process.stdout if line.startswith("code")), "none")
        assert code.split() == ["code", "0"], (code, self.log)


class MooncakeStore:
    """A master and storage nodes. Enter it; it ends with its test.

    site: the package's folder. segment_bytes: the memory of each node. python: for which the
    package was installed.
    """

    def __init__(
        self,
        folder: Path,
        site: Path,
        nodes: int = 1,
        segment_bytes: int = SEGMENT_BYTES,
        python: str = sys.executable,
        *,
        lease_ms: int = LEASE_MS,
    ) -> None:
        self.master = MooncakeMaster(folder / "master.log", site, lease_ms=lease_ms)
        logs = (folder / f"node-{number}.log" for number in range(nodes))
        options: dict[str, Any] = {"segment_bytes": segment_bytes, "python": (python,)}
        self.nodes = [MooncakeNode(log, site, self.master.address, **options) for log in logs]

    @property
    def url(self) -> str:
        """As a tier."""
        return f"mooncake://{self.master.address}?local={LOOPBACK}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *about: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start all, where they were; returns when the nodes have joined."""
        for each in (self.master, *self.nodes):
            each.start()

    def kill(self) -> None:
        """SIGKILL to all. Idempotent."""
        for each in (self.master, *self.nodes):
            each.kill()

    def stall(self) -> None:
        """SIGSTOP to all."""
        for each in (self.master, *self.nodes):
            each.stall()

    def resume(self) -> None:
        """SIGCONT to all."""
        for each in (self.master, *self.nodes):
            each.resume()


def await_port(port: int, process: subprocess.Popen[Any], host: str = LOOPBACK) -> bool:
    """Wait until something listens on the port; False where the process has ended before."""

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((host, port)) == 0

    assert eventually(lambda: process.poll() is not None or listens(), 100.0, 0.01)
    return process.poll() is None


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()

"""A real Mooncake Store over TCP: a master, and storage nodes in processes of their own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

SEGMENT_BYTES = 64 << 20
LEASE_MS = 200
CLIENT_TTL_S = 5
"""After which the master forgets a storage node that is silent."""
LOOPBACK = "127.0.0.1"
NODE = f"""
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup(sys.argv[1], "P2PHANDSHAKE", {SEGMENT_BYTES}, 16 << 20, "tcp", "", sys.argv[2])
print("code", code, flush=True)
sys.stdin.read()
"""


class MooncakeProcess:
    """A process of Mooncake Store. It ends with its test.

    Args:
        log: a file.
        site: the package's folder.
        host: its address for others.
    """

    def __init__(self, log: Path, site: Path, host: str = LOOPBACK) -> None:
        self.host = host
        self._log = log
        self._site = site
        self._process: subprocess.Popen[str] | None = None

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def stall(self) -> None:
        """SIGSTOP."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def _spawn(self, command: Sequence[str], stdout: int | None = None) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [str(self._site), os.environ.get("PYTHONPATH")]))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=stdout or log,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": path, "MC_TCP_BIND_ADDRESS": self.host},
            )
        return self._process

    def _send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


class MooncakeMaster(MooncakeProcess):
    """The master."""

    def __init__(self, log: Path, site: Path, host: str = LOOPBACK) -> None:
        super().__init__(log, site, host)
        self._port, self._metrics_port = free_ports(2)

    @property
    def address(self) -> str:
        return f"{self.host}:{self._port}"

    @property
    def segments_url(self) -> str:
        """Where it lists the storage nodes."""
        return f"http://{self.host}:{self._metrics_port}/get_all_segments"

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
                f"--metrics_port={self._metrics_port}",
                f"--default_kv_lease_ttl={LEASE_MS}",
                f"--client_ttl={CLIENT_TTL_S}",
            ]
        )
        assert await_port(self._port, process, self.host), self.log


class MooncakeNode(MooncakeProcess):
    """A storage node. `within`: what its command begins with, to run it somewhere else."""

    def __init__(
        self,
        log: Path,
        site: Path,
        master: str,
        host: str = LOOPBACK,
        within: Sequence[str] = (),
    ) -> None:
        super().__init__(log, site, host)
        self._command = [*within, sys.executable, "-c", NODE, host, master]

    def start(self) -> None:
        """Start it; returns when it has joined."""
        process = self._spawn(self._command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        code = next((line for line in process.stdout if line.startswith("code")), "none")
        assert code.split() == ["code", "0"], (code, self.log)


class MooncakeStore:
    """One master and one node. `site`: the package's folder. Enter it; it ends with its test."""

    def __init__(self, folder: Path, site: Path) -> None:
        self._master = MooncakeMaster(folder / "master.log", site)
        self._node = MooncakeNode(folder / "node.log", site, self._master.address)

    @property
    def url(self) -> str:
        return f"mooncake://{self._master.address}?local={LOOPBACK}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *about: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start both, where they were; returns when the node has joined."""
        self._master.start()
        self._node.start()

    def kill(self) -> None:
        """SIGKILL to both. Idempotent."""
        self._master.kill()
        self._node.kill()

    def stall(self) -> None:
        """SIGSTOP to both."""
        self._master.stall()
        self._node.stall()

    def resume(self) -> None:
        """SIGCONT."""
        self._master.resume()
        self._node.resume()


def await_port(port: int, process: subprocess.Popen[Any], host: str = LOOPBACK) -> bool:
    """Wait until something listens on the port; False where the process has ended before."""
    while process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex((host, port)) == 0:
                return True
        time.sleep(0.01)
    return False


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

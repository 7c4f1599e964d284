"""A real Mooncake Store, over TCP on loopback: a master, and storage nodes of own processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

SEGMENT_BYTES = 64 << 20
LEASE_MS = 200
NODE = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
master, segment_bytes = sys.argv[1], int(sys.argv[2])
code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 16 << 20, "tcp", "", master)
print("code", code, flush=True)
sys.stdin.read()
"""


class MooncakeStore:
    """A master and `nodes` storage nodes. Enter it; it ends with its test.

    site: the package's folder. segment_bytes: the memory of each node.
    """

    def __init__(
        self, folder: Path, site: Path, nodes: int = 1, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._folder = folder
        self._site = site
        self._nodes = nodes
        self._segment_bytes = segment_bytes
        self._processes: list[subprocess.Popen[str]] = []
        self._port, self._metrics_port = free_ports(2)

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self._port}?local=127.0.0.1"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to import the package."""
        path = os.pathsep.join(filter(None, [str(self._site), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": path, "MC_TCP_BIND_ADDRESS": "127.0.0.1"}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *about: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start all, where they were; returns when the nodes have joined."""
        program = self._site / "mooncake" / "mooncake_master"
        program.chmod(0o755)
        options = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self._port,
            "metrics_host": "127.0.0.1",
            "metrics_port": self._metrics_port,
            "default_kv_lease_ttl": LEASE_MS,
            "client_ttl": 5,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        master = self._run(None, str(program), *flags)
        assert await_port(self._port, master), self.log
        address, size = f"127.0.0.1:{self._port}", str(self._segment_bytes)
        joining = [
            self._run(subprocess.PIPE, sys.executable, "-c", NODE, address, size)
            for _ in range(self._nodes)
        ]
        for node in joining:
            assert node.stdout is not None
            code = next((line for line in node.stdout if line.startswith("code")), "none")
            assert code.split() == ["code", "0"], (code, self.log)

    def kill(self) -> None:
        """SIGKILL to all. Idempotent."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()

    def stall(self) -> None:
        """SIGSTOP to all."""
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        for process in self._processes:
            process.send_signal(signal.SIGCONT)

    def _run(self, output: int | None, *command: str) -> subprocess.Popen[str]:
        """With its output in a pipe, or in the log."""
        with (self._folder / "mooncake.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output or log,
                stderr=log,
                text=True,
                env=self.environment,
            )
        self._processes.append(process)
        return process

    @property
    def log(self) -> str:
        return (self._folder / "mooncake.log").read_text(errors="replace")[-4000:]


def await_port(port: int, process: subprocess.Popen[Any]) -> bool:
    """Wait until something listens on the port; False where the process has ended before."""
    while process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.01)
    return False


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()

"""A real Mooncake Store, over TCP on loopback: a master, and a storage node of its own process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

SEGMENT_BYTES = 64 << 20
LEASE_MS = 200
NODE = f"""
import json, sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", {SEGMENT_BYTES}, 16 << 20, "tcp", "", sys.argv[1])
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


class MooncakeStore:
    """One master and one node. `site`: the package's folder. Enter it; it ends with its test.

    `python`: for which the package was installed.
    """

    def __init__(self, folder: Path, site: Path, python: str = sys.executable) -> None:
        self._folder = folder
        self._site = site
        self._python = python
        self._master: subprocess.Popen[bytes] | None = None
        self._node: subprocess.Popen[str] | None = None
        self._port, self._metrics_port = free_ports(2)

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self._port}?local=127.0.0.1"

    @property
    def admin_url(self) -> str:
        """Of the master's HTTP port."""
        return f"mooncake://127.0.0.1:{self._metrics_port}"

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
        """Start both, where they were; returns when the node has joined."""
        program = self._site / "mooncake" / "mooncake_master"
        program.chmod(0o755)
        with (self._folder / "master.log").open("ab") as log:
            self._master = subprocess.Popen(
                [
                    str(program),
                    "--rpc_address=127.0.0.1",
                    f"--rpc_port={self._port}",
                    "--metrics_host=127.0.0.1",
                    f"--metrics_port={self._metrics_port}",
                    f"--default_kv_lease_ttl={LEASE_MS}",
                    "--client_ttl=5",
                ],
                stdout=log,
                stderr=log,
                env=self.environment,
            )
            for port in (self._port, self._metrics_port):
                assert await_port(port, self._master), self.log
            self._node = subprocess.Popen(
                [self._python, "-c", NODE, f"127.0.0.1:{self._port}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment,
            )
        self._await_node()

    def put(self, keys: Sequence[str], *, begin: bool = False) -> None:
        """The node stores a value under each key; or begins to, and another `put` ends that."""
        assert self._node is not None
        assert self._node.stdin is not None
        self._node.stdin.write(json.dumps([keys, begin]) + "\n")
        self._node.stdin.flush()
        self._await_node()

    def _await_node(self) -> None:
        assert self._node is not None
        assert self._node.stdout is not None
        code = next((line for line in self._node.stdout if line.startswith("code")), "none")
        assert code.split() == ["code", "0"], (code, self.log)

    def kill(self) -> None:
        """SIGKILL to both. Idempotent."""
        for process in (self._master, self._node):
            if process is not None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
                pipes: list[IO[str] | IO[bytes] | None] = [process.stdin, process.stdout]
                for pipe in pipes:
                    if pipe is not None:
                        pipe.close()
        self._master = self._node = None

    def stall(self) -> None:
        """SIGSTOP to both; returns when no thread of them runs any more."""
        for process in (self._master, self._node):
            assert process is not None
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)

    def resume(self) -> None:
        """SIGCONT."""
        for process in (self._master, self._node):
            assert process is not None
            process.send_signal(signal.SIGCONT)

    @property
    def log(self) -> str:
        return (self._folder / "master.log").read_text(errors="replace")[-4000:]


def await_port(port: int, process: subprocess.Popen[bytes]) -> bool:
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

"""A real InfiniStore on this machine's RDMA device. It listens on every address: run it in a VM."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.fakes.mooncake import await_port, free_ports
from tests.fakes.stall import stall

DEVICE = "rxe0"
SERVER = "import infinistore.server; infinistore.server.main()"


class InfiniStore:
    """One server with 1 GiB, which others find at `host`. Enter it; it ends with its test."""

    def __init__(self, folder: Path, host: str) -> None:
        self._log = folder / "infinistore.log"
        self._host = host
        self._port, self._manage_port = free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"infinistore://{self._host}:{self._port}?device={DEVICE}"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *about: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, where it was; returns when it has registered its memory."""
        command = [sys.executable, "-c", SERVER, f"--dev-name={DEVICE}", "--link-type=Ethernet"]
        command += [f"--service-port={self._port}", f"--manage-port={self._manage_port}"]
        command += ["--prealloc-size=1", "--minimal-allocate-size=64"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        assert await_port(self._manage_port, self._process), self.log

    def kill(self) -> None:
        """SIGKILL: what it held is gone. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def stall(self) -> None:
        """SIGSTOP: connections stay, and nothing is answered."""
        assert self._process is not None
        stall(self._process.pid)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

"""A real InfiniStore on this machine's RDMA device. It listens on every address: run it in a VM."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.fakes.mooncake import await_port, free_ports

DEVICE = "rxe0"
SERVER = "import infinistore.server; infinistore.server.main()"


class InfiniStore:
    """One server with 1 GiB. `site`: the package's folder. Enter it; it ends with its test."""

    def __init__(self, folder: Path, site: Path) -> None:
        self._log = folder / "infinistore.log"
        self._site = site
        self._port, self._manage_port = free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"infinistore://127.0.0.1:{self._port}?device={DEVICE}"

    def __enter__(self) -> Self:
        command = [sys.executable, "-c", SERVER, "--host=127.0.0.1", f"--dev-name={DEVICE}"]
        command += [f"--service-port={self._port}", f"--manage-port={self._manage_port}"]
        command += ["--link-type=Ethernet", "--ib-port=1", "--prealloc-size=1"]
        command += ["--minimal-allocate-size=64"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(self._site)}
            )
        assert await_port(self._port, self._process), self._log.read_text(errors="replace")
        return self

    def __exit__(self, *about: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

"""Real redis-servers on free ports of this host, to be killed, stalled and started again."""

import shutil
import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tests.fakes.certificates import Authority
from tests.fakes.patience import eventually
from tests.fakes.stall import stall

START_TRIES = 5
MISSING = "there is no redis-server (apt-get install redis-server)"


def redis_server() -> str | None:
    """The program, or None where it is not installed."""
    return shutil.which("redis-server")


class RedisServer:
    """One redis-server; keeps nothing on disk. Enter it; it ends with its test.

    authority: has it speak TLS alone, with a certificate of this CA.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        host: str = "127.0.0.1",
        authority: Authority | None = None,
    ) -> None:
        self._host = host
        self._authority = authority
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        place = f"{self._host}:{self.port}/0"
        if self._authority is not None:
            return f"rediss://{place}?ssl_ca_certs={self._authority.ca_file}"
        return f"redis://{place}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, where it was if it ran before; returns when it answers."""
        for _ in range(START_TRIES):
            port = self.port or _free_port()
            if self._started(port):
                self.port = port
                return
        raise RuntimeError(f"redis-server did not start, last on port {port}")

    def kill(self) -> None:
        """SIGKILL: what it held is gone. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def stall(self) -> None:
        """SIGSTOP: connections stay, and nothing is answered."""
        assert self._process is not None
        stall(self._process.pid)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def command(self, *words: str) -> str:
        """What redis-cli says to a command."""
        command = ["redis-cli", "-h", self._host, "-p", str(self.port), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def _started(self, port: int) -> bool:
        program = redis_server()
        assert program is not None, MISSING
        process = subprocess.Popen(
            [program, *self._listen(port), "--bind", self._host, "--save", "", *self._options],
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        if _said(process.stdout, "Ready to accept connections"):
            self._process = process
            return True
        process.wait()
        process.stdout.close()
        return False

    def _listen(self, port: int) -> list[str]:
        if self._authority is None:
            return ["--port", str(port)]
        shown = self._authority.sign()
        return (
            f"--port 0 --tls-port {port} --tls-auth-clients no --tls-cert-file {shown.cert_file} "
            f"--tls-key-file {shown.key_file} --tls-ca-cert-file {self._authority.ca_file}"
        ).split()


class RedisCluster:
    """A cluster of three masters without replicas. Enter it; it ends with its test."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._stack = ExitStack()
        self.masters: list[RedisServer] = []

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{each.port}" for each in self.masters)
        return f"redis+cluster://{places}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        places = []
        for k in range(3):
            folder = self._folder / f"master-{k}"
            folder.mkdir()
            bus = str(_free_port())
            options = ("--cluster-enabled", "yes", "--cluster-port", bus, *self._options)
            server = self._stack.enter_context(RedisServer(folder, *options))
            self.masters.append(server)
            places.append(f"127.0.0.1:{server.port}@{bus}")
        command = ["redis-cli", "--cluster", "create", *places, "--cluster-yes"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert eventually(self._serves_keys, look_s=0.05)  # not yet where masters have just met

    def _serves_keys(self) -> bool:
        return all("cluster_state:ok" in each.command("CLUSTER", "INFO") for each in self.masters)

    def __exit__(self, *about: object) -> None:
        self._stack.close()


def _said(output: IO[str], words: str) -> bool:
    return any(words in line for line in output)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port

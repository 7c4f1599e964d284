"""The product's own processes beside the engines: store and router, as commands on free ports."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.vllm.engines import EngineFailed, ask, free_port

READY_DEADLINE_S = 60.0


class Service:
    """A process that listens. stop() ends it; kill() ends it as a crash would."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path, begun: int) -> None:
        self.name = name
        self.process = process
        self.log = log
        self._begun = begun
        self.address = ""
        self.url = ""
        self.http = ""

    @classmethod
    def start(cls, name: str, command: Sequence[Any], folder: Path) -> "Service":
        """Start without waiting; the log is FOLDER/NAME.log."""
        log = folder / f"{name}.log"
        with log.open("ab") as out:
            begun = out.tell()
            process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        return cls(name, process, log, begun)

    def wait_port(self, port: int, deadline_s: float = READY_DEADLINE_S) -> "Service":
        """Return once the port accepts connections. Raises EngineFailed otherwise."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                return self
            except OSError:
                time.sleep(0.05)
        raise EngineFailed(f"{self.name} does not listen:\n{self.tail()}")

    def wait_http(self, address: str, path: str, deadline_s: float = READY_DEADLINE_S) -> "Service":
        """Return once a GET answers 200. Raises EngineFailed otherwise."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until and self.process.poll() is None:
            connection = http.client.HTTPConnection(address, timeout=2.0)
            try:
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return self
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.1)
        raise EngineFailed(f"{self.name} is not ready:\n{self.tail()}")

    def wait_log(self, text: str, deadline_s: float = READY_DEADLINE_S) -> "Service":
        """Return once the log holds the text. Raises EngineFailed otherwise."""
        until = time.monotonic() + deadline_s
        while time.monotonic() < until and self.process.poll() is None:
            if text in self.said():
                return self
            time.sleep(0.05)
        raise EngineFailed(f"{self.name} did not log {text!r}:\n{self.tail()}")

    def stats(self) -> dict[str, int]:
        """A store's gauges and counters."""
        found: dict[str, int] = json.loads(ask(self.http, "GET", "/stats", None, 10.0)[1])
        return found

    def wait_stored(self, blocks: int, deadline_s: float = 60.0) -> None:
        """Return once at least so many blocks have been committed to a store."""
        until = time.monotonic() + deadline_s
        while (found := self.stats()["commits_total"]) < blocks:
            assert time.monotonic() < until, f"{found} of {blocks} blocks are stored"
            time.sleep(0.1)

    def memory_file(self) -> Path:
        """A store's pool, as a file that can be written behind its back."""
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            if str(link.readlink()).startswith("/memfd:"):
                return link
        raise EngineFailed(f"{self.name} holds no memory file")

    def said(self) -> str:
        """What it has logged; earlier processes of its name wrote before it."""
        return self.log.read_bytes()[self._begun :].decode(errors="replace")

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.said().splitlines()[-lines:])

    def kill(self) -> None:
        """SIGKILL, as a crash would end it."""
        self.process.kill()
        self.process.wait(10)

    def stop(self, deadline_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                self.kill()


def start_store(
    folder: Path,
    memory: str = "256MiB",
    port: int | None = None,
    name: str = "store",
    flags: Sequence[Any] = (),
) -> Service:
    """`kvrouter store`, ready."""
    port, http_port = port or free_port(), free_port()
    command = [
        *(sys.executable, "-m", "kvrouter", "store", "--host", "127.0.0.1"),
        *("--port", port, "--http-port", http_port, "--memory", memory, *flags),
    ]
    service = Service.start(name, command, folder)
    service.address, service.url = f"127.0.0.1:{port}", f"kv://127.0.0.1:{port}"
    service.http = f"127.0.0.1:{http_port}"
    try:
        return service.wait_http(service.http, "/healthz")
    except BaseException:
        service.stop()
        raise


def start_router(
    folder: Path,
    prefill: Sequence[str],
    decode: Sequence[str],
    store_url: str | None,
    flags: Sequence[str] = (),
) -> Service:
    """`kvrouter serve` before these engines, ready."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "kvrouter", "serve", "--host", "127.0.0.1", "--port", port),
        *(("--prefill", *prefill) if prefill else ()),
        *("--decode", *decode, "--drain-delay", "0", *flags),
        *(("--store", store_url) if store_url is not None else ()),
    ]
    return start_http("router", command, folder, port)


def start_http(name: str, command: Sequence[Any], folder: Path, port: int) -> Service:
    """A process that answers HTTP at this port, ready."""
    service = Service.start(name, command, folder)
    service.address, service.url = f"127.0.0.1:{port}", f"http://127.0.0.1:{port}"
    try:
        return service.wait_http(service.address, "/health")
    except BaseException:
        service.stop()
        raise

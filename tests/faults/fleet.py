"""Every kind of process that listens, plain and under TLS, and what each holds of the system."""

import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.certificates import Authority

from kvrouter.tools.demo.children import KVROUTER, Child, Children

LIMIT = 1024
"""Open files that each process may have: the hard limit."""
TIED = ("sh", "-c", f'ulimit -n {LIMIT}; exec "$@"', "sh", *KVROUTER)
MODEL = "sim"


@dataclass(frozen=True)
class Held:
    """What a process has of the system."""

    rss_bytes: int
    files: int


@dataclass
class Fleet:
    """Its processes, and their doors by name, as `tests.faults.strangers` takes them."""

    folder: Path
    children: Children
    url: str = ""  # where the plain router serves
    processes: dict[str, Child] = field(default_factory=dict)
    doors: dict[str, str] = field(default_factory=dict)

    def held(self) -> dict[str, Held]:
        return {name: held(child.pid) for name, child in self.processes.items()}

    def doors_of(self, process: str) -> list[str]:
        return [door for name, door in self.doors.items() if name.split()[0] == process]

    async def start(self, name: str, *flags: str) -> Child:
        child = await self.children.start(name, *flags, program=TIED)
        self.processes[name] = child
        for scheme, url in child.urls.items():
            self.doors[f"{name} {scheme}"] = f"{scheme}:{url.rpartition(':')[2]}"
        return child

    async def node(self, name: str, *flags: str) -> Child:
        """A store node with a Unix socket and events."""
        path = str(self.folder / f"{name}.sock")
        self.doors[f"{name} unix"] = f"unix:{path}"
        flags += ("--http-port", "0", "--unix-socket", path, "--memory", "64MiB")
        return await self.start(name, "store", "--port", "0", *flags, *self._events(name))

    async def engine(self, name: str) -> Child:
        flags = ("--model", MODEL, "--inter-token-latency", "20ms", "--max-num-seqs", "1000")
        return await self.start(name, "sim", "--port", "0", *flags, *self._events(name, "*"))

    async def router(self, name: str, *flags: str) -> Child:
        """A router with a control port."""
        control = free_port()
        flags += ("--control-port", str(control), "--admin")
        child = await self.start(name, "serve", "--port", "0", *flags)
        (scheme,) = child.urls
        self.doors[f"{name} control"] = f"{scheme}:{control}"
        return child

    def _events(self, name: str, host: str = "127.0.0.1") -> tuple[str, str]:
        """--kv-events-config; an engine binds only to a host of *, as vLLM."""
        config: dict[str, object] = {"enable_kv_cache_events": True}
        for what in ("endpoint", "replay_endpoint"):
            port = free_port()
            config[what] = f"tcp://{host}:{port}"
            self.doors[f"{name} {what}"] = f"zmq:{port}"
        return "--kv-events-config", json.dumps(config)


def held(pid: int) -> Held:
    status = Path(f"/proc/{pid}/status").read_text()
    rss_kib = next(int(line.split()[1]) for line in status.splitlines() if "VmRSS" in line)
    return Held(rss_kib << 10, len(os.listdir(f"/proc/{pid}/fd")))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])


@asynccontextmanager
async def fleet(folder: Path, authority: Authority) -> AsyncIterator[Fleet]:
    """Two store nodes, an engine and two routers: one of each plain, one under TLS."""
    cert, key = (signed := authority.sign()).cert_file, signed.key_file
    async with Children(folder) as children:
        made = Fleet(folder, children)
        store = await made.node("store")
        await made.node("tls-store", "--tls-cert-file", cert, "--tls-key-file", key)
        engine = await made.engine("engine")
        flags = ("--decode", engine.http)
        made.url = (await made.router("router", *flags, "--store", store.urls["kv"])).http
        await made.router("tls-router", *flags, "--ssl-certfile", cert, "--ssl-keyfile", key)
        yield made
        assert children.unexpected_deaths() == []

"""What the demo runs on: a store, simulated engines, and a router. Its folder, and free ports."""

import asyncio
import fcntl
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvrouter.tools.demo.children import Child, ChildFailed, Children
from kvrouter.tools.demo.settings import DemoSettings

FOLDERS = "kvrouter-demo-"
LOCK = "lock"
MODEL = "demo-8b"
PREFILL = ("prefill-0", "prefill-1")
"""Names of the engines; the demo kills the first one."""
DECODE = ("decode-0", "decode-1")


@dataclass
class Cluster:
    """The running processes; engines by their names."""

    store: Child
    engines: dict[str, Child]
    router: Child


async def start_cluster(children: Children, folder: Path, settings: DemoSettings) -> Cluster:
    """Start store, engines and router on free ports, one after the other. Raises ChildFailed."""
    store = await start_store(children, folder, "256MiB")
    events, names = f"tcp://127.0.0.1:{free_port()}", (*PREFILL, *DECODE)
    flags = engine_flags(settings, store.urls["kv"], events)
    started = await asyncio.gather(
        *(children.start(name, "sim", "--role", name.split("-")[0], *flags) for name in names)
    )
    engines = dict(zip(names, started, strict=True))
    prefill, decode = ([engines[name].http for name in role] for role in (PREFILL, DECODE))
    control = free_port()
    router = await children.start(
        "router",
        *("serve", "--port", str(settings.port), "--store", store.urls["kv"]),
        *("--prefill", *prefill, "--decode", *decode),
        *("--kv-events-bind", events, "--log-level", "warning", "--control-port", str(control)),
    )
    router.urls["page"] = f"http://127.0.0.1:{control}"
    return Cluster(store, engines, router)


async def start_store(children: Children, folder: Path, memory: str) -> Child:
    """A store node on free loopback ports."""
    return await children.start(
        "store",
        *("store", "--port", "0", "--http-port", "0", "--memory", memory),
        *("--unix-socket", str(folder / "store.sock")),
    )


def engine_flags(settings: DemoSettings, store: str, events: str) -> tuple[str, ...]:
    """The flags of every engine, which publishes its KV events to `events`."""
    prefill_time = f"{settings.prefill_time_per_token_us}us"
    return (
        *("--port", "0", "--model", MODEL, "--store", store),
        *("--kv-events-endpoint", events, "--prefill-time-per-token", prefill_time),
        *("--inter-token-latency", "5ms"),
    )


def free_port() -> int:
    """A loopback port on which no process listens.

    It is below the ports that Linux usually gives to outgoing connections, so none of these takes
    it meanwhile. Raises ChildFailed if none is free.
    """
    for port in random.sample(range(10_000, 32_768), 1_000):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise ChildFailed("no port between 10000 and 32767 is free on 127.0.0.1")


@contextmanager
def demo_folder() -> Iterator[Path]:
    """A new temporary folder for the time of the context. Removes those of dead demos first.

    A demo holds a lock (flock(2)) on a file in its folder. The kernel releases it when the process
    ends in any way.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*"):
        with suppress(OSError):
            _remove_if_dead(folder)
    with tempfile.TemporaryDirectory(prefix=FOLDERS) as name:
        folder = Path(name)
        with (folder / f"{LOCK}.new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            Path(lock.name).rename(folder / LOCK)  # never visible under this name without its lock
            yield folder


def _remove_if_dead(folder: Path) -> None:
    """Raises OSError if the folder has no lock, or a living demo holds it."""
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        return
    descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)

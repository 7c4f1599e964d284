"""What the demo runs on: a store, engines, and a router."""

import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvrouter.tools.demo.children import Child, ChildFailed, Children


@dataclass
class Cluster:
    """The running processes."""

    store: Child
    engines: dict[str, Child]
    router: Child


async def start_store(children: Children, folder: Path, memory: str) -> Child:
    """A store node on free loopback ports."""
    return await children.start(
        "store",
        *("store", "--port", "0", "--http-port", "0", "--memory", memory),
        *("--unix-socket", str(folder / "store.sock")),
    )


async def start_router(
    children: Children, port: int, store: Child, engines: Sequence[Sequence[Child]], events: str
) -> Child:
    """The router in front of prefill and decode engines, which publish KV events to `events`."""
    prefill, decode = ([each.http for each in role] for role in engines)
    control = free_port()
    router = await children.start(
        "router",
        *("serve", "--port", str(port), "--store", store.urls["kv"]),
        *("--prefill", *prefill, "--decode", *decode),
        *("--kv-events-bind", events, "--log-level", "warning", "--control-port", str(control)),
    )
    router.urls["page"] = f"http://127.0.0.1:{control}"
    return router


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

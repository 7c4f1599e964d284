"""What the demo runs on: a store, engines of either kind, a router; and who knows right answers."""

import random
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from kvrouter.tools.demo.children import Child, ChildFailed, Children
from kvrouter.tools.demo.workload import Reply

__all__ = ["Cluster", "Setup", "free_port", "start_router", "start_store"]


@dataclass
class Cluster:
    """What runs."""

    store: Child
    engines: dict[str, Child]
    router: Child


class Setup(Protocol):
    """A kind of engines: how they are started, asked, and held against what is right.

    `model`: the name they serve. `prefill`, `decode`: names of the engines; the first prefill
    engine is the one that is killed. `more`: what every request says beside the question.
    `request_s`: within which an answer must be whole. `loaded`: how it is known that what came from
    the store is right.
    """

    model: str
    prefill: Sequence[str]
    decode: Sequence[str]
    more: Mapping[str, Any]
    request_s: float
    loaded: str

    def opening(self) -> str:
        """What is about to be started."""
        ...

    async def start(
        self, children: Children, session: aiohttp.ClientSession, folder: Path
    ) -> Cluster:
        """Start all of it. Raises ChildFailed."""
        ...

    async def checked(
        self, session: aiohttp.ClientSession, cluster: Cluster, replies: Sequence[Reply]
    ) -> list[Reply]:
        """The replies, each with what is wrong with it."""
        ...

    def assurance(self, wrong_blocks: int) -> str:
        """What was compared, for the last line."""
        ...


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
    """The router before prefill and decode engines, which publish KV events to `events`."""
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
    """A loopback port that nobody listened on just now.

    Below those that Linux gives to connections as a rule: until it is listened on, none of them
    takes it. Raises ChildFailed where none is free.
    """
    for port in random.sample(range(10_000, 32_768), 1_000):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise ChildFailed("no port between 10000 and 32767 is free on 127.0.0.1")

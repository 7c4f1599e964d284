"""What the demo runs on: a store, engines of one kind, and a router."""

import random
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

from kvrouter.tools.demo.children import Child, ChildFailed, Children
from kvrouter.tools.demo.settings import DemoSettings
from kvrouter.tools.demo.workload import Reply


@dataclass
class Cluster:
    """The running processes."""

    store: Child
    engines: dict[str, Child]
    router: Child


class DemoEngines(ABC):
    """One kind of engines: how they start, and which answers are right.

    Attributes:
        model: the name that they serve.
        prefill, decode: names of the engines; the demo kills the first prefill engine.
        chats: whether they take chats.
        at_once: how many requests an engine computes together; the demo sends no more.
        more: members of every request, besides the question.
        request_s: how long a whole answer may take.
        loaded: how loaded KV is checked, in words.
        store_memory: of the store's node.
    """

    model: str
    prefill: Sequence[str]
    decode: Sequence[str]
    chats: bool = True
    at_once: int = 256
    more: Mapping[str, Any] = MappingProxyType({})
    request_s: float
    loaded: str
    store_memory: str

    def __init__(self, settings: DemoSettings) -> None:
        self.settings = settings

    async def start(self, children: Children, folder: Path) -> Cluster:
        """Start store, engines and router; returns when all are ready. Raises ChildFailed."""
        store = await start_store(children, folder, self.store_memory)
        events = f"tcp://127.0.0.1:{free_port()}"
        engines = await self.start_engines(children, folder, store.urls["kv"], events)
        roles = [[engines[name] for name in names] for names in (self.prefill, self.decode)]
        router = await start_router(children, self.settings.port, store, roles, events)
        return Cluster(store, engines, router)

    @abstractmethod
    def opening(self) -> str:
        """What `start` starts, in words."""

    @abstractmethod
    async def start_engines(
        self, children: Children, folder: Path, store: str, events: str
    ) -> dict[str, Child]:
        """Start the engines, by name, on a store's URL; they publish KV events to `events`."""

    @abstractmethod
    async def checked(
        self, session: aiohttp.ClientSession, cluster: Cluster, replies: Sequence[Reply]
    ) -> list[Reply]:
        """The replies, each with its problem."""

    @abstractmethod
    def assurance(self, wrong_blocks: int) -> str:
        """What was compared, for the last line."""


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

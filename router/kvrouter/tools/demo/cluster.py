"""What the demo runs on: a store, engines of one kind, and a router."""

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


@dataclass
class Cluster:
    """The running processes."""

    store: Child
    engines: dict[str, Child]
    router: Child


class DemoEngines(Protocol):
    """One kind of engines: how they start, and which answers are right.

    Attributes:
        model: the name that they serve.
        prefill, decode: names of the engines; the demo kills the first prefill engine.
        chats: whether they take chats.
        at_once: how many requests an engine computes together; the demo sends no more.
        more: members of every request, besides the question.
        request_s: how long a whole answer may take.
        loaded: how loaded KV is checked, in words.
    """

    model: str
    prefill: Sequence[str]
    decode: Sequence[str]
    chats: bool
    at_once: int
    more: Mapping[str, Any]
    request_s: float
    loaded: str

    def opening(self) -> str:
        """What `start` starts, in words."""
        ...

    async def start(
        self, children: Children, session: aiohttp.ClientSession, folder: Path
    ) -> Cluster:
        """Start store, engines and router. Raises ChildFailed."""
        ...

    async def checked(
        self, session: aiohttp.ClientSession, cluster: Cluster, replies: Sequence[Reply]
    ) -> list[Reply]:
        """The replies, each with its problem."""
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

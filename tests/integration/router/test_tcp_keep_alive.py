"""The kernel asks the peers of silent connections for signs of life, so that nobody cuts them."""

import asyncio
import socket
from pathlib import Path

import pytest
from tests.fakes.patience import until
from tests.fakes.store import StoreProcess
from tests.integration.router.conftest import Open, text
from tests.integration.router.test_ports import ports

from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.errors import StoreUnavailable
from kvrouter_store.events.publisher import EventSockets
from kvrouter_store.events.sockets import open_context, subscriber

ESTABLISHED, KEEP_ALIVE = 1, 2


def timers(port: int, *, here: bool) -> list[int]:
    """Of open connections whose end here (else: there) has that port: their timer (proc(5))."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        own, peer = (int(fields[at].split(":")[1], 16) for at in (1, 2))
        if int(fields[3], 16) == ESTABLISHED and (own if here else peer) == port:
            found.append(int(fields[5].split(":")[0], 16))
    return found


async def kept(port: int, *, here: bool) -> None:
    """Wait until the kernel keeps each of them alive; after a byte another timer runs first."""
    await until(lambda: set(timers(port, here=here)) == {KEEP_ALIVE})


async def test_clients_and_engines_of_a_router_are_kept(site: Open) -> None:
    here = await site(0, 1, control_port=0)
    engine = here.decode[0]
    engine.mode = "held"
    asked = asyncio.create_task(here.post(text()))
    await engine.next_began()
    await kept(here.port, here=True)
    await kept(engine.port, here=False)
    control = ports(here).control
    assert control is not None
    with socket.create_connection(("127.0.0.1", control.port)):
        await kept(control.port, here=True)
    engine.go.set()
    assert (await asked)[0] == 200


async def test_whom_a_store_accepts_is_kept(node: StoreProcess) -> None:
    for port in (node.port, node.http_port):
        with socket.create_connection(("127.0.0.1", port)):
            await kept(port, here=True)


async def test_clients_of_a_store_keep_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with AsyncStoreClient(f"kv://127.0.0.1:{port}", name="test"):
            await kept(port, here=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with StoreClient(f"kv://127.0.0.1:{port}", deadline_s=5) as blocking:
            asked = asyncio.create_task(asyncio.to_thread(blocking.stats))
            await kept(port, here=False)
            silent.close()
            with pytest.raises(StoreUnavailable):
                await asked


async def test_subscribers_of_events_are_kept() -> None:
    sockets, context = EventSockets("tcp://127.0.0.1:*"), open_context()
    feed = subscriber(context, b"", "")
    port = sockets.ports[0]
    feed.connect(f"tcp://127.0.0.1:{port}")
    await kept(port, here=False)
    await kept(port, here=True)
    feed.close()
    context.destroy()
    sockets.close()

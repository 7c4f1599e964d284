"""What the doctor learns of the store as a client of it, in one thread and in bounded time."""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connection.address import local_boot_id, parse_url
from kvrouter_store.connection.channel import Channel, Credentials
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.connection.tls import native_context
from kvrouter_store.errors import KVStoreError
from kvrouter_store.rdma.base import RdmaUnavailable
from kvrouter_store.rdma.initiator import Initiator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from kvrouter.app.settings import RouterSettings
    from kvrouter.tools.doctor.base import Setup
    from kvrouter_store.client.results import RegisteredManifest, SharingRefusal
    from kvrouter_store.identity.block import Manifest

NAME: Final = "doctor"
DEADLINE_S: Final = 10.0
_PART: Final = re.compile(r"/(rank\d+|landings)$")


@dataclass(slots=True)
class StoreFacts:
    """What is known of a node of the store.

    Attributes:
        error: why it cannot be used; None if it can.
        stats: the node's gauges and counters.
        manifests: the registered ones, by their hex digest.
        engines: names of the connected engines that need each manifest, by its hex digest.
        refusals: connected engines that share nothing, and why.
        transport: how KV would travel to a client on this host: shm, unix, rdma or tcp.
        here: whether it runs on this host.
        socket: the Unix socket that it names; "" for none.
        no_rdma: why RDMA is not available here; "" if it is.
    """

    url: str
    error: KVStoreError | None = None
    stats: Mapping[str, int] = field(default_factory=dict)
    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    engines: Mapping[str, frozenset[str]] = field(default_factory=dict)
    refusals: tuple[SharingRefusal, ...] = ()
    transport: str = ""
    here: bool = False
    socket: str = ""
    no_rdma: str = ""

    def stat(self, name: str) -> int:
        """One figure, 0 if the node has none of that name."""
        return self.stats.get(name, 0)

    @property
    def tiers(self) -> dict[str, bool]:
        """Whether each tier below the node answers, by its name."""
        prefix, found = "tier_up.", self.stats.items()
        return {name[len(prefix) :]: bool(v) for name, v in found if name.startswith(prefix)}

    def series(self, prefix: str) -> list[tuple[str, int]]:
        """The figures other than 0 whose names begin with `prefix`, by the rest of the name."""
        found = self.stats.items()
        return [(name[len(prefix) :], v) for name, v in found if name.startswith(prefix) and v]


async def learn_store(settings: RouterSettings, url: str) -> StoreFacts:
    """Ask a node everything. Never raises for what the node does."""
    facts = StoreFacts(url)
    try:
        await asyncio.to_thread(_ask, settings, facts)
    except KVStoreError as error:
        facts.error = error
    return facts


def _ask(settings: RouterSettings, facts: StoreFacts) -> None:
    """Raises KVStoreError if the store cannot be used."""
    address, token = parse_url(facts.url), settings.store_token.get_secret_value()
    credentials = Credentials(NAME, token, native_context(address, settings.store_tls))
    channel = Channel(address, credentials, Deadline(DEADLINE_S))
    try:
        hello = channel.hello
        facts.here = hello.boot_id != "" and hello.boot_id == local_boot_id()
        facts.socket = hello.unix_path
    finally:
        channel.discard()
    rdma = Initiator()
    try:
        rdma.open()
    except RdmaUnavailable as problem:
        facts.no_rdma = str(problem)
    tls_files = settings.store_tls
    with StoreClient(
        facts.url, name=NAME, token=token, tls=tls_files, deadline_s=DEADLINE_S, rdma=rdma
    ) as client:
        registered = client.manifests()
        facts.manifests = {each.digest.hex(): each.manifest for each in registered}
        facts.engines = connected_engines(registered)
        facts.refusals = tuple(client.refusals())
        facts.stats = client.stats()
        facts.transport = client.transport


def connected_engines(registered: Iterable[RegisteredManifest]) -> dict[str, frozenset[str]]:
    """Names of the connected engines that need each manifest, by its hex digest.

    The ranks and other connections of an engine count as one.
    """
    return _joined(
        (each.digest.hex(), frozenset(_PART.sub("", name) for name in each.engines))
        for each in registered
    )


def together(stores: Iterable[StoreFacts]) -> StoreFacts:
    """What engines have registered with any of these nodes."""
    stores = list(stores)
    return StoreFacts(
        ", ".join(each.url for each in stores),
        manifests={name: known for each in stores for name, known in each.manifests.items()},
        engines=_joined(pair for each in stores for pair in each.engines.items()),
    )


def _joined(named: Iterable[tuple[str, frozenset[str]]]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for manifest, names in named:
        found[manifest] = found.get(manifest, frozenset()) | names
    return found


@asynccontextmanager
async def open_clients(setup: Setup) -> AsyncIterator[dict[str, AsyncStoreClient]]:
    """Clients of the nodes that can be used, by URL."""
    token, tls = setup.settings.store_token.get_secret_value(), setup.settings.store_tls
    async with AsyncExitStack() as stack:
        yield {
            each.url: await stack.enter_async_context(
                AsyncStoreClient(each.url, name=NAME, token=token, tls=tls, deadline_s=DEADLINE_S)
            )
            for each in await setup.usable_stores()
        }

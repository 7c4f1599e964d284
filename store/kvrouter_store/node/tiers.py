"""A node's side of the tiers below it: a thread that answers its questions and follows its feed.

Foreign clients never touch the pool. Values travel through memory of this side, and blocks enter
and leave the pool by a client of the node.
"""

import asyncio
import logging
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import uvloop
from pydantic import ByteSize

from kvrouter_store._core import StoreServer, TierAsk
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connection.tls import ClientTls
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.chain import BlockHashes
from kvrouter_store.node.settings import MIB, StoreSettings
from kvrouter_store.node.start_checks import StartRefused, tokens_of
from kvrouter_store.tiers.base import Tier, TierRefused
from kvrouter_store.tiers.blocks import Block, BlockValues, NodeBlocks
from kvrouter_store.tiers.fetch import Fetcher
from kvrouter_store.tiers.guard import Guard
from kvrouter_store.tiers.registry import open_tier
from kvrouter_store.tiers.staging import CHUNKS, Staging
from kvrouter_store.tiers.write import Writer

MOST_CHANGES = 1 << 16
"""Changes that may wait to be written. After more, all that the node holds is told again."""
STOP_S = 10.0
OWN_CLIENT = "kvrouter tiers"
"""By this name the node knows whose reads the tiers are not asked for (TierAsks::kHostName)."""
log = logging.getLogger(__name__)


def tiers_of(settings: StoreSettings) -> list[Tier]:
    """The tiers of --tier, not started. StartRefused where one cannot be used."""
    try:
        tiers = [open_tier(url.get_secret_value()) for url in settings.tier]
    except TierRefused as error:
        raise StartRefused(str(error)) from None
    for name, times in Counter(tier.name for tier in tiers).items():
        if times > 1:
            raise StartRefused(f"--tier names {name} {times} times: give each tier once")
    return tiers


@contextmanager
def serving_tiers(
    server: StoreServer, settings: StoreSettings, tiers: Sequence[Tier], url: str, tls: ClientTls
) -> Iterator[Sequence[Guard]]:
    """Look for blocks that the started node lacks in `tiers`, until this ends.

    url, tls: where the node reaches itself.
    """
    if not tiers:
        yield ()
        return

    def connect(tenant: str) -> StoreClient:
        token = dict(tokens_of(settings)).get(tenant, "")
        if not server.unix_path:
            return StoreClient(url, transport="tcp", name=OWN_CLIENT, token=token, tls=tls)
        own = f"kv+unix://{os.path.abspath(server.unix_path)}"
        return StoreClient(own, name=OWN_CLIENT, token=token)

    side = TierSide(server, tiers, settings.tier_timeout, int(settings.tier_memory), connect)
    thread = threading.Thread(target=side.run, name="kvstore-tiers", daemon=True)
    thread.start()
    try:
        yield side.guards
    finally:
        side.stop()
        thread.join(STOP_S)
        if not thread.is_alive():
            side.close()


class TierSide:
    """Runs in one thread, with an event loop of its own. `stop` may be called in another."""

    def __init__(
        self,
        server: StoreServer,
        tiers: Sequence[Tier],
        timeout_s: float,
        memory_bytes: int,
        connect: Callable[[str], StoreClient],
    ) -> None:
        self._server = server
        self._feed = server.offer_feed(MOST_CHANGES)
        self._timeout_s = timeout_s
        self._staging = Staging(memory_bytes)
        self._node = NodeBlocks(connect)
        self.guards = [
            Guard(tier, self._staging.memory, timeout_s, changed=partial(self._tell, tier.name))
            for tier in tiers
        ]
        for guard in self.guards:
            server.tell_tier(guard.name, guard.up)
        self._fetcher = Fetcher(self.guards, self._staging, self._node)
        self._writer = Writer(self.guards, self._staging, self._node)
        self._values: dict[tuple[str, bytes], BlockValues | None] = {}
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)

    def run(self) -> None:
        """Serve until `stop`."""
        try:
            uvloop.run(self._serve())  # sends large values several times as fast as asyncio's loop
        except Exception:
            log.exception("the tiers below this node are not used any more")
            self._server.offer_tiers(0)

    def stop(self) -> None:
        """Have `run` return soon."""
        os.eventfd_write(self._stop, 1)

    def close(self) -> None:
        """Give everything back, once `run` has returned."""
        self._node.close()
        self._staging.close()
        os.close(self._stop)

    def _tell(self, tier: str, up: bool) -> None:
        self._server.tell_tier(tier, up)
        if up:  # what the node holds is told again: the tier may lack it, from when it was away
            self._server.restart_feed(self._feed)

    async def _serve(self) -> None:
        asks = self._server.offer_tiers(self._timeout_s)
        work = [self._answer_asks(asks), self._follow(), *(one.keep() for one in self.guards)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
            await _readable(self._stop)
            for task in tasks:
                task.cancel()

    async def _answer_asks(self, descriptor: int) -> None:
        """All at a time; the node bounds them, and the guard of each tier its calls."""
        running: set[asyncio.Task[None]] = set()
        while True:
            await _readable(descriptor)
            for ask in self._server.take_tier_asks():
                task = asyncio.create_task(self._answer(ask))
                running.add(task)
                task.add_done_callback(running.discard)

    async def _answer(self, ask: TierAsk) -> None:
        blocks = 0
        try:
            values = self._values_of(ask.tenant, ask.manifest)
            chain = BlockHashes(ask.hashes)
            if values is None:
                pass
            elif ask.load:
                blocks = await self._fetcher.bring(values, chain, ask.missing)
            else:
                blocks = await self._fetcher.find(values, [chain[k] for k in ask.missing])
        except Exception:
            log.exception("a question about tiers below this node has no answer")
        finally:
            self._server.answer_tier(ask.id, blocks)

    async def _follow(self) -> None:
        while True:
            await _readable(self._feed)
            changes, lost, _ = self._server.take_feed(self._feed)
            if lost:
                log.warning("tiers below are slower than puts: they get new blocks later, or never")
                self._server.restart_feed(self._feed)
            stored = defaultdict(list)
            for change in changes:
                if change.in_memory:  # writing what only the disk has would evict other blocks
                    block = Block(change.hash, change.parent)
                    stored[change.tenant, change.manifest].append(block)
            for (tenant, digest), blocks in stored.items():
                try:
                    values = self._values_of(tenant, digest)
                    if values is not None:
                        await self._writer.write(values, blocks)
                except Exception:
                    log.exception("new blocks cannot be written to tiers below this node")

    def _values_of(self, tenant: str, digest: bytes) -> BlockValues | None:
        """The blocks of a manifest; None for those that do not fit into the memory of this side.

        As many as the node has manifests are remembered.
        """
        if (tenant, digest) not in self._values:
            document = self._server.manifest(tenant, digest)
            if document is None:
                return None
            values: BlockValues | None = BlockValues(tenant, Manifest.from_doc(document))
            if values is not None and values.block_bytes > self._staging.chunk_bytes:
                log.warning(
                    "blocks of %s do not go to tiers below: one needs %s, more than a quarter "
                    "of their memory; give --tier-memory %dMiB",
                    values.manifest.spec.model,
                    ByteSize(values.block_bytes).human_readable(),
                    -(-values.block_bytes * CHUNKS // MIB),
                )
                values = None
            self._values[tenant, digest] = values
        return self._values[tenant, digest]


async def _readable(descriptor: int) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)

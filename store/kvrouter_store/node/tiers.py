"""A node's side of the tiers below it: it answers the node's questions, and follows its feed.

Foreign clients never touch the pool. Values travel through memory of this side, and blocks enter
and leave the pool by a client of the node.
"""

import asyncio
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence

from kvrouter_store._core import BlockChange, StoreServer, TierAsk
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connection.tls import ClientTls
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.chain import BlockHashes
from kvrouter_store.node.feed import MOST_CHANGES, readable
from kvrouter_store.node.settings import StoreSettings
from kvrouter_store.node.start_checks import StartRefused, tokens_of
from kvrouter_store.tiers.base import Tier, TierRefused
from kvrouter_store.tiers.blocks import Block, BlockValues, NodeBlocks
from kvrouter_store.tiers.fetch import Fetcher
from kvrouter_store.tiers.guard import Guard
from kvrouter_store.tiers.registry import open_tier
from kvrouter_store.tiers.staging import Staging
from kvrouter_store.tiers.write import Writer

log = logging.getLogger(__name__)


def tiers_of(settings: StoreSettings) -> list[Tier]:
    """The tiers of --tier, not started. StartRefused where one cannot be used."""
    try:
        return [open_tier(url.get_secret_value()) for url in settings.tier]
    except TierRefused as error:
        raise StartRefused(str(error)) from None


def tier_side(
    server: StoreServer, settings: StoreSettings, tiers: Sequence[Tier], url: str, tls: ClientTls
) -> "TierSide":
    """The side of the started node that looks for blocks in `tiers`.

    url, tls: where the node reaches itself.
    """

    # Not by shared memory: a block that is only posted is not there yet when an ask is answered.
    def connect(tenant: str) -> StoreClient:
        token = dict(tokens_of(settings)).get(tenant, "")
        if not server.unix_path:
            return StoreClient(url, transport="tcp", name="tiers", token=token, tls=tls)
        own = f"kv+unix://{os.path.abspath(server.unix_path)}"
        return StoreClient(own, transport="unix", name="tiers", token=token)

    return TierSide(server, tiers, settings.tier_timeout, int(settings.tier_memory), connect)


class TierSide:
    """Follows the feed of a node, and answers its questions. For one event loop."""

    def __init__(
        self,
        server: StoreServer,
        tiers: Sequence[Tier],
        timeout_s: float,
        memory_bytes: int,
        connect: Callable[[str], StoreClient],
    ) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._staging = Staging(memory_bytes)
        self._node = NodeBlocks(connect)
        self.guards = [Guard(tier, self._staging.memory, timeout_s) for tier in tiers]
        self._fetcher = Fetcher(self.guards, self._staging, self._node)
        self._writer = Writer(self.guards, self._staging, self._node)
        self._values: dict[tuple[str, bytes], BlockValues | None] = {}
        self._new: list[BlockChange] = []
        self._news = asyncio.Event()

    def close(self) -> None:
        """Give everything back, once `serve` has ended."""
        self._node.close()
        self._staging.close()

    def take(self, changes: Sequence[BlockChange], *, lost: bool, more: bool) -> None:
        """See `Follower`."""
        stored = [change for change in changes if change.stored]
        room = MOST_CHANGES - len(self._new)
        if lost or 0 < room < len(stored):  # not again until there is room
            log.warning("tiers below are slower than puts: they do not get some new blocks")
        self._new += stored[:room]
        self._news.set()

    async def serve(self) -> None:
        """Serve until cancelled."""
        asks = self._server.offer_tiers(self._timeout_s)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._answer_asks(asks))
            group.create_task(self._write_new())
            for guard in self.guards:
                group.create_task(guard.keep())

    async def _answer_asks(self, descriptor: int) -> None:
        """All at a time; the node bounds them, and the guard of each tier its calls."""
        running: set[asyncio.Task[None]] = set()
        while True:
            await readable(descriptor)
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

    async def _write_new(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            changes, self._new = self._new, []
            stored = defaultdict(list)
            for change in changes:
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
                    "blocks of %s do not go to tiers below: one needs %d bytes, a quarter of "
                    "--tier-memory",
                    values.manifest.spec.model,
                    values.block_bytes,
                )
                values = None
            self._values[tenant, digest] = values
        return self._values[tenant, digest]

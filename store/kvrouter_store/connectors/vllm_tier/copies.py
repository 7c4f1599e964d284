"""Blocks of another node of the store, received in the memory of the engine's own. No vLLM.

A block that does not come as it was put, or has no room, is left out: the engine computes it.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from kvrouter_store._core import BlockStatus, Segments
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.neighbours import Neighbours
from kvrouter_store.connectors.transfers import copying_threads
from kvrouter_store.connectors.vllm_tier.identity import NAME, PART
from kvrouter_store.errors import KVStoreError

log = logging.getLogger("vllm.kvstore")

PIECE_BYTES = 8 << 20  # or one block: what a thread receives at a time


@dataclass(eq=False)
class NodeCopies:
    """Safe in threads. Owns threads: close() ends them.

    links: to the own node, whose memory is mapped, by cache group. neighbours: clients of others.
    """

    links: Mapping[int, StoreLink]
    neighbours: Neighbours[StoreClient]

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(copying_threads(), "kvstore-copies")

    def fetch(self, node: str, group: int, keys: Sequence[bytes]) -> None:
        """Copy consecutive blocks, as far as `node` has them. Never raises for a node."""
        link, names = self.links[group], list(map(NAME, keys))
        most = max(1, PIECE_BYTES // link.manifest.parts[PART].block_bytes)
        try:
            with self.neighbours.client(node) as client:
                pieces = [
                    self._threads.submit(_receive, client, link, names, range(first, end))
                    for first in range(0, len(names), most)
                    for end in [min(first + most, len(names))]
                ]
                wait(pieces)
                for each in pieces:
                    each.result()
        except KVStoreError as error:
            log.warning("%s: %s", node, error)

    def close(self) -> None:
        """End the threads. Nothing may be fetched any more."""
        self._threads.shutdown()


def _receive(client: StoreClient, link: StoreLink, names: list[bytes], span: range) -> None:
    """Into slots of the own node, which bounds how many a client may have at a time."""
    part, manifest, granted = link.manifest.parts[PART], link.manifest, 1

    def read(hashes: bytes, memory: Segments, places: Sequence[int]) -> list[BlockStatus]:
        return client.get_into(manifest, PART, hashes, range(len(places)), memory, places)

    while span and granted:
        begin = max(0, span.start - 1)  # the block before is the parent
        chain = b"".join(names[begin : span.stop])
        reserved = link.reserve(PART, chain, range(span.start - begin, span.stop - begin))
        if reserved is None:
            return
        with reserved:
            granted, crcs = reserved.granted, reserved.receive(part.block_bytes, read)
            link.operate(partial(reserved.commit, crcs), list[BlockStatus]())
        statuses = reserved.statuses
        if len(crcs) < granted or BlockStatus.NO_SPACE not in statuses:
            return
        span = span[statuses.index(BlockStatus.NO_SPACE) :]

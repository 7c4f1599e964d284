"""Block hashes of prompts, remembering the latest chains.

What a prompt shares with one of them is not hashed again, so that the next turn of a session costs
its new tokens only.
"""

from __future__ import annotations

from collections import OrderedDict
from sys import getsizeof
from typing import TYPE_CHECKING, Final

from kvrouter._native import shared_bytes
from kvrouter.telemetry.caches import CacheUse
from kvrouter_store import _core
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from kvrouter.engines.engine import HashDomain

    Key = tuple[bytes, int, bytes, tuple[str, str] | None, str | None]

ID_BYTES: Final = 4
LEAST_BLOCKS: Final = 8
"""A shorter chain is hashed sooner than it is looked up."""
ENTRY_BYTES: Final = 512
"""What a remembered chain takes beside its texts and bytes: tuples, numbers, its place."""


class HashCache:
    """Hashes prompts as vLLM's `sha256_cbor` does (`kvrouter_store.identity.chain`).

    One chain is remembered per first block (and domain, adapter, salt): the latest.

    Args:
        max_bytes: bound of the memory that remembered chains take, with the salts and first blocks
            by which they are found; the chains used longest ago are forgotten.

    Attributes:
        reused_blocks: hashes that were taken from memory; only grows.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._known: OrderedDict[Key, tuple[bytes, bytes]] = OrderedDict()
        self.reused_blocks = 0

    @property
    def use(self) -> CacheUse:
        """How many chains are remembered, and the memory that they take."""
        return CacheUse(len(self._known), self._bytes, self._max_bytes)

    def hashes(
        self,
        ids: bytes,
        domain: HashDomain,
        adapter: tuple[str, str] | None = None,
        salt: str | None = None,
    ) -> bytes:
        """The chain of a prompt: 32 bytes per whole block.

        Args:
            ids: its token ids as native uint32.
            domain: block size and root.
            adapter: name and path of the LoRA adapter.
            salt: the request's `cache_salt`.
        """
        width = domain.block_tokens * ID_BYTES
        blocks = len(ids) // width
        if blocks < LEAST_BLOCKS:
            return _hash(memoryview(ids), domain, adapter, salt)
        key = (ids[:width], domain.block_tokens, domain.root, adapter, salt)
        known = self._known.get(key)
        if known is not None:
            shared = shared_bytes(ids, known[0]) // width
            self.reused_blocks += shared
            hashes = known[1][: shared * HASH_BYTES]
            if shared == blocks:
                self._known.move_to_end(key)
                return hashes
            ids_left = memoryview(ids)[shared * width :]
            hashes += _hash(ids_left, domain, adapter, salt, parent=hashes[-HASH_BYTES:])
        else:
            hashes = _hash(memoryview(ids), domain, adapter, salt)
        self._remember(key, ids, hashes)
        return hashes

    def _remember(self, key: Key, ids: bytes, hashes: bytes) -> None:
        size = _size(key, ids, hashes)
        if size > self._max_bytes // 4:
            return
        before = self._known.pop(key, None)
        if before is not None:
            self._bytes -= _size(key, *before)
        self._bytes += size
        self._known[key] = (ids, hashes)
        while self._bytes > self._max_bytes:
            oldest, chain = self._known.popitem(last=False)
            self._bytes -= _size(oldest, *chain)


def _size(key: Key, ids: bytes, hashes: bytes) -> int:
    """Bytes of memory that a remembered chain takes; its root and adapter belong to its engine."""
    first_block, _, _, _, salt = key
    return ENTRY_BYTES + sum(map(getsizeof, (first_block, salt, ids, hashes)))


def _hash(
    ids: memoryview,
    domain: HashDomain,
    adapter: tuple[str, str] | None,
    salt: str | None,
    *,
    parent: bytes | None = None,
) -> bytes:
    return _core.chain_hashes(
        ids.cast("I"),
        domain.block_tokens,
        root=domain.root,
        parent=parent,
        lora=adapter,
        cache_salt=salt,
    )

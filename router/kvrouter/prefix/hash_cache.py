"""Block hashes of prompts; the next turn of a session hashes its new tokens only.

They are kept by `ByteCache`: the least recently used go, by the memory that all of them take.
"""

from __future__ import annotations

from collections import OrderedDict
from sys import getsizeof
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from kvrouter._native import shared_bytes
from kvrouter.telemetry.series import CacheUse
from kvrouter_store import _core
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.engines.engine import HashDomain

    Key = tuple[bytes, int, bytes, tuple[str, str] | None, str | None]

ID_BYTES: Final = 4
LEAST_BLOCKS: Final = 8  # shorter chains are hashed faster than they are looked up
ENTRY_BYTES: Final = 512
"""What an entry takes besides its texts and bytes: tuples, numbers, its place."""


K = TypeVar("K")
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """Keeps the entries used last, up to `max_bytes`, but none above `max_entry_bytes`.

    `size` returns the bytes of memory that an entry takes.
    """

    def __init__(self, max_bytes: int, max_entry_bytes: int, size: Callable[[K, V], int]) -> None:
        self._max_bytes = max_bytes
        self._max_entry_bytes = max_entry_bytes
        self._size = size
        self._bytes = 0
        self._entries: OrderedDict[K, V] = OrderedDict()

    @property
    def use(self) -> CacheUse:
        """Number of entries, and their memory."""
        return CacheUse(len(self._entries), self._bytes, self._max_bytes)

    def get(self, key: K) -> V | None:
        """The entry of `key`, which counts as used now."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: K, value: V) -> None:
        """Keep an entry in place of the one before; the oldest entries make room."""
        size = self._size(key, value)
        if size > self._max_entry_bytes:
            return
        before = self._entries.pop(key, None)
        if before is not None:
            self._bytes -= self._size(key, before)
        self._entries[key] = value
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= self._size(*self._entries.popitem(last=False))


class HashCache:
    """Hashes prompts as vLLM's `sha256_cbor` does (`kvrouter_store.identity.chain`).

    It keeps the latest chain per first block, domain, adapter and salt, within `max_bytes`.
    `reused_blocks` counts the hashes taken from kept chains.
    """

    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self._chains: ByteCache[Key, tuple[bytes, bytes]]
        self._chains = ByteCache(max_bytes, max_bytes // 4, _size)
        self.reused_blocks = 0

    @property
    def use(self) -> CacheUse:
        """Number of kept chains, and their memory."""
        return self._chains.use

    def hashes(
        self,
        ids: bytes,
        domain: HashDomain,
        adapter: tuple[str, str] | None = None,
        salt: str | None = None,
    ) -> bytes:
        """The chain of a prompt: 32 bytes per whole block.

        `ids` are native uint32, `adapter` is name and path, `salt` the request's `cache_salt`.
        """
        width = domain.block_tokens * ID_BYTES
        blocks = len(ids) // width
        if blocks < LEAST_BLOCKS:
            return _hash(memoryview(ids), domain, adapter, salt)
        key = (ids[:width], domain.block_tokens, domain.root, adapter, salt)
        known = self._chains.get(key)
        if known is None:
            hashes = _hash(memoryview(ids), domain, adapter, salt)
        else:
            shared = shared_bytes(ids, known[0]) // width
            self.reused_blocks += shared
            hashes = known[1][: shared * HASH_BYTES]
            if shared == blocks:
                return hashes
            new_ids = memoryview(ids)[shared * width :]
            hashes += _hash(new_ids, domain, adapter, salt, parent=hashes[-HASH_BYTES:])
        self._chains.put(key, (ids, hashes))
        return hashes


def _size(key: Key, chain: tuple[bytes, bytes]) -> int:
    """Bytes of memory that a chain takes; its root and adapter belong to its engine."""
    first_block, _, _, _, salt = key
    return ENTRY_BYTES + sum(map(getsizeof, (first_block, salt, *chain)))


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

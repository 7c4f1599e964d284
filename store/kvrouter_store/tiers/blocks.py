"""Blocks as values: how those of one manifest lie in a chunk, and their way to and from a node.

A value is the bytes of a part behind a header that tells whose they are. The header has the size of
the part, the value's name, the block before it in its chain, and a CRC32C over all that and the
bytes. A tier is not trusted: what comes back is looked at before anyone else sees it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from threading import Lock
from typing import TYPE_CHECKING, Final, TypeVar

from kvrouter_store._core import BlockStatus, Segments, crc32c
from kvrouter_store.client.results import THERE
from kvrouter_store.errors import Unauthorized
from kvrouter_store.tiers.base import Item, Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvrouter_store.client.blocking import StoreClient
    from kvrouter_store.identity.block import Manifest

MAGIC: Final = b"kvrouter"
FORMAT: Final = 1
KEY_PREFIX: Final = f"kvrouter:{FORMAT}:"
_FIELDS: Final = struct.Struct("<8sIxxxxQ32s32sxxxx")
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = _FIELDS.size + _CRC.size
_NO_PARENT: Final = bytes(32)
ALIGN = 64
T = TypeVar("T")


def key_of(name: bytes) -> str:
    """The key under which a tier keeps the value of this name."""
    return KEY_PREFIX + name.hex()


def seal(value: memoryview, name: bytes, parent: bytes | None) -> None:
    """Write the header in front of the part's bytes, which are in the value already.

    parent: the hash of the block before; None where the block begins a chain.
    """
    size = len(value) - HEADER_BYTES
    _FIELDS.pack_into(value, 0, MAGIC, FORMAT, size, name, parent or _NO_PARENT)
    _CRC.pack_into(value, _FIELDS.size, _crc(value))


def is_intact(value: memoryview, name: bytes) -> bool:
    """Whether this is the whole value of that name, as it was sealed."""
    if len(value) < HEADER_BYTES:
        return False
    *fields, _ = _FIELDS.unpack_from(value)
    (crc,) = _CRC.unpack_from(value, _FIELDS.size)
    return fields == [MAGIC, FORMAT, len(value) - HEADER_BYTES, name] and crc == _crc(value)


def parent_in(value: memoryview) -> bytes | None:
    """The parent that `seal` was given, of an intact value."""
    parent: bytes = _FIELDS.unpack_from(value)[-1]
    return None if parent == _NO_PARENT else parent


def _crc(value: memoryview) -> int:
    return crc32c(value[HEADER_BYTES:], crc32c(value[: _FIELDS.size]))


@dataclass(frozen=True, slots=True)
class Block:
    """A block by its hash, and that of the block before it; None where it begins a chain."""

    hash: bytes
    parent: bytes | None


class BlockValues:
    """Blocks of one tenant and manifest in a chunk: one after the other, each with all its parts.

    Every part is a value (header and bytes), at a multiple of ALIGN bytes. Its name is a digest
    over tenant, cache spec, part and block hash: tenants share no value.
    """

    def __init__(self, tenant: str, manifest: Manifest) -> None:
        self.tenant = tenant
        self.manifest = manifest
        owner = sha256(tenant.encode()).digest() + manifest.spec.digest
        self._owners = [owner + part.digest for part in manifest.parts]
        self._sizes = [HEADER_BYTES + part.block_bytes for part in manifest.parts]
        self._places = [0]
        for size in self._sizes:
            self._places.append(self._places[-1] + -(-size // ALIGN) * ALIGN)
        self.block_bytes = self._places.pop()

    def names(self, block_hash: bytes) -> list[bytes]:
        """The names of a block's values, 32 bytes each."""
        return [sha256(owner + block_hash).digest() for owner in self._owners]

    def keys(self, hashes: Sequence[bytes]) -> list[str]:
        """The keys of all parts of these blocks, block by block."""
        return [key_of(name) for each in hashes for name in self.names(each)]

    def items(self, at: int, hashes: Sequence[bytes]) -> list[Item]:
        """The same with their places, if the first block is at `at`."""
        return [Item(key_of(name), place, size) for name, place, size in self._values(at, hashes)]

    def segments(self, part: int, first: int) -> Segments:
        """Where the bytes of a part are, if the first block is at the address `first`."""
        size = self.manifest.parts[part].block_bytes
        return Segments([first + self._places[part] + HEADER_BYTES], [self.block_bytes], [size])

    def seal(self, memory: Memory, at: int, blocks: Sequence[Block]) -> None:
        """Make values of the bytes of blocks that lie there."""
        for k, block in enumerate(blocks):
            for name, place, size in self._values(at + k * self.block_bytes, [block.hash]):
                seal(memory.view[place : place + size], name, block.parent)

    def intact(self, memory: Memory, at: int, hashes: Sequence[bytes]) -> list[bool]:
        """Of each value of these blocks, block by block, whether it is what it should be."""
        return [
            is_intact(memory.view[place : place + size], name)
            for name, place, size in self._values(at, hashes)
        ]

    def parent(self, memory: Memory, at: int) -> bytes | None:
        """The block before the one that lies there, intact, in its chain."""
        return parent_in(memory.view[at : at + self._sizes[0]])

    def leading(self, values: Sequence[bool]) -> int:
        """How many leading blocks have all their values, block by block."""
        run = values.index(False) if False in values else len(values)
        return run // len(self._sizes)

    def _values(self, at: int, hashes: Sequence[bytes]) -> Iterator[tuple[bytes, int, int]]:
        for k, block_hash in enumerate(hashes):
            block = at + k * self.block_bytes
            names = self.names(block_hash)
            for name, place, size in zip(names, self._places, self._sizes, strict=True):
                yield name, block + place, size


class NodeBlocks:
    """The blocks of a node, by a client of it for each tenant. Blocks; safe in threads.

    connect: makes a client of the node for the tenant of this name. Raises KVStoreError.
    """

    def __init__(self, connect: Callable[[str], StoreClient]) -> None:
        self._connect = connect
        self._clients: dict[str, StoreClient] = {}
        self._lock = Lock()

    def put(self, values: BlockValues, chain: bytes, places: Sequence[int], at: int) -> int:
        """Put the blocks at ascending places of a chain, the first of which lies at address `at`.

        Returns how many leading ones the node has now.
        """

        def action(client: StoreClient) -> int:
            there = [True] * len(places)
            for span, indices in _runs(places):
                for part in range(len(values.manifest.parts)):
                    segments = values.segments(part, at)
                    done = client.put(values.manifest, part, chain, span, segments, indices)
                    for index, status in zip(indices, done.statuses, strict=True):
                        there[index] &= status in THERE
            return there.index(False) if False in there else len(there)

        return self._with_client(values.tenant, action)

    def take(self, values: BlockValues, hashes: Sequence[bytes], at: int) -> list[bool]:
        """Copy blocks of any chains to address `at`; of each whether the node had it, intact."""

        def action(client: StoreClient) -> list[bool]:
            parts = range(len(values.manifest.parts))
            found = [_take_part(client, values, part, hashes, at) for part in parts]
            return [all(one) for one in zip(*found, strict=True)]

        return self._with_client(values.tenant, action)

    def close(self) -> None:
        """End all connections."""
        for client in self._clients.values():
            client.close()

    def _with_client(self, tenant: str, action: Callable[[StoreClient], T]) -> T:
        with self._lock:
            client = self._clients.get(tenant)
            if client is None:
                client = self._clients[tenant] = self._connect(tenant)
        try:
            return action(client)
        except Unauthorized:  # the tenant has another token now
            with self._lock:
                if self._clients.get(tenant) is client:
                    del self._clients[tenant]
            client.close()
            raise


def _take_part(
    client: StoreClient, values: BlockValues, part: int, hashes: Sequence[bytes], at: int
) -> list[bool]:
    segments, names = values.segments(part, at), b"".join(hashes)
    got: list[bool] = []
    while len(got) < len(hashes):  # a get ends at the first block that is missing
        rest = range(len(got), len(hashes))
        for status in client.get_into(values.manifest, part, names, rest, segments, rest):
            got.append(status is BlockStatus.OK)
            if status is BlockStatus.MISSING:
                break
    return got


def _runs(places: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The ascending places as runs: the places of each, and their indices."""
    for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        pairs = list(run)
        (first, place), blocks = pairs[0], len(pairs)
        yield range(place, place + blocks), range(first, first + blocks)

"""A client that does everything at random until it is killed; exits with 3 if a byte is wrong.

python -m tests.fakes.busy_client URL TRANSPORT SEED
"""

import random
import sys
from typing import Any

from tests.fakes.store import HASH_BYTES, Memory, chain_of, manifest_of

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.lease import Lease, Reservation

BLOCK_BYTES = 64 << 10
LONGEST = 12
CHAINS = 30
MOST_HELD = 3


def content(hash_: bytes) -> bytes:
    """The bytes of a block, a function of its hash."""
    return hash_ * (BLOCK_BYTES // HASH_BYTES)


class BusyClient:
    """Operations by weight; it releases leases and reservations a little later, or never.

    `chains`: more than the pool can hold. `wrong`: blocks that were not as they should be.
    """

    def __init__(self, url: str, transport: Any, seed: int, chains: int) -> None:
        self.wrong = 0
        self._chains = chains
        self._dice = random.Random(seed)
        self._client = StoreClient(url, transport=transport, deadline_s=20)
        self._manifest = manifest_of(BLOCK_BYTES)
        self._memory = Memory(LONGEST, BLOCK_BYTES)
        self._held: list[Lease | Reservation] = []
        self._weights = {"put": 5, "get": 6, "acquire": 3, "wait": 2, "match": 3, "delete": 1}
        if transport == "shm":
            self._weights["reserve"] = 2

    def once(self) -> str:
        """One operation; its name."""
        (name,) = self._dice.choices(list(self._weights), list(self._weights.values()))
        blocks = self._dice.randint(1, LONGEST)
        hashes = chain_of(blocks, str(self._dice.randrange(self._chains)))
        getattr(self, name)(hashes, blocks)
        if len(self._held) > MOST_HELD:
            oldest = self._held.pop(0)
            oldest.release() if isinstance(oldest, Lease) else oldest.abort()
        return name

    def put(self, hashes: bytes, blocks: int) -> None:
        """Put the bytes of some blocks."""
        self._fill(hashes, blocks)
        span = range(blocks)
        got = self._client.put(self._manifest, 0, hashes, span, self._memory.segments, span)
        self.wrong += got.statuses.count(BlockStatus.CORRUPT)

    def get(self, hashes: bytes, blocks: int) -> None:
        """Get from anywhere in the chain and compare."""
        span = range(self._dice.randrange(blocks), blocks)
        got = self._client.get_into(self._manifest, 0, hashes, span, self._memory.segments, span)
        for block, status in zip(span, got, strict=True):
            if status == BlockStatus.CORRUPT:
                self.wrong += 1
            elif status == BlockStatus.OK:
                self._check(self._memory[block], hashes, block)

    def acquire(self, hashes: bytes, blocks: int) -> None:
        """Lease the chain; compare its first block if the pool is mapped."""
        lease = self._client.acquire(self._manifest, hashes)
        self._held.append(lease)
        if lease.blocks and self._client.transport == "shm":
            self._check(lease.view(0), hashes, 0)

    def wait(self, hashes: bytes, blocks: int) -> None:
        """Wait a little for the chain, with a lease."""
        landing = self._client.wait(self._manifest, hashes, blocks, 0.02, lease=True)
        if landing.lease is not None:
            self._held.append(landing.lease)

    def match(self, hashes: bytes, blocks: int) -> None:
        """Ask how many blocks are there."""
        self._client.match(self._manifest, hashes)

    def delete(self, hashes: bytes, blocks: int) -> None:
        """Forget the last block."""
        self._client.delete(self._manifest, hashes[-HASH_BYTES:])

    def reserve(self, hashes: bytes, blocks: int) -> None:
        """Write into reserved slots; commit at once, or keep them for a while."""
        reservation = self._client.reserve(self._manifest, 0, hashes, range(blocks))
        statuses = reservation.statuses
        granted = [k for k, status in enumerate(statuses) if status == BlockStatus.GRANTED]
        self._fill(hashes, blocks)
        crcs = reservation.fill(self._memory.segments, granted) if granted else []
        if granted and self._dice.random() < 0.5:
            reservation.commit(crcs)
        else:
            self._held.append(reservation)

    def _fill(self, hashes: bytes, blocks: int) -> None:
        for k in range(blocks):
            self._memory[k] = content(hashes[k * HASH_BYTES : (k + 1) * HASH_BYTES])

    def _check(self, data: bytes | memoryview, hashes: bytes, block: int) -> None:
        self.wrong += data != content(hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES])


def main() -> None:
    client = BusyClient(sys.argv[1], sys.argv[2], int(sys.argv[3]), CHAINS)
    while not client.wrong:
        client.once()
    sys.exit(3)


if __name__ == "__main__":
    main()

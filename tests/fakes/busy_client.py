"""A client that does everything at random until it is killed; exits with 3 if a byte is wrong.

python -m tests.fakes.busy_client URL TRANSPORT SEED
"""

import random
import sys
from typing import Any

from tests.fakes.store import Memory, chain_of, manifest_of

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.lease import Lease, Reservation

BLOCK = 64 << 10
LONGEST = 12
CHAINS = 30
MOST_HELD = 3
MANIFEST = manifest_of(BLOCK)


class BusyClient:
    """Puts, gets, leases, reserves and deletes more than the pool can hold."""

    def __init__(self, url: str, transport: Any, seed: int) -> None:
        self._dice = random.Random(seed)
        self._client = StoreClient(url, transport=transport, deadline_s=20)
        self._held: list[Lease | Reservation] = []
        self._actions = [
            self.put,
            self.put,
            self.get,
            self.get,
            self.get,
            self.acquire,
            self.delete,
        ]
        if transport == "shm":
            self._actions.append(self.reserve)

    def once(self) -> None:
        blocks = self._dice.randint(1, LONGEST)
        hashes = chain_of(blocks, str(self._dice.randrange(CHAINS)))
        self._dice.choice(self._actions)(hashes, blocks)
        if len(self._held) > MOST_HELD:
            oldest = self._held.pop(0)
            oldest.release() if isinstance(oldest, Lease) else oldest.abort()

    def put(self, hashes: bytes, blocks: int) -> None:
        memory, span = Memory(blocks, BLOCK).holds(hashes), range(blocks)
        self._client.put(MANIFEST, 0, hashes, span, memory.segments, span)

    def get(self, hashes: bytes, blocks: int) -> None:
        memory, right = Memory(blocks, BLOCK), Memory(blocks, BLOCK).holds(hashes)
        span = range(self._dice.randrange(blocks), blocks)
        got = self._client.get_into(MANIFEST, 0, hashes, span, memory.segments, span)
        for block, status in zip(span, got, strict=True):
            if status == BlockStatus.CORRUPT:
                sys.exit(3)
            if status == BlockStatus.OK and memory[block] != right[block]:
                sys.exit(3)

    def acquire(self, hashes: bytes, blocks: int) -> None:
        self._held.append(self._client.acquire(MANIFEST, hashes))

    def reserve(self, hashes: bytes, blocks: int) -> None:
        reservation = self._client.reserve(MANIFEST, 0, hashes, range(blocks))
        granted = [
            k for k, status in enumerate(reservation.statuses) if status == BlockStatus.GRANTED
        ]
        if granted:
            reservation.fill(Memory(blocks, BLOCK).holds(hashes).segments, granted)
        self._held.append(reservation)

    def delete(self, hashes: bytes, blocks: int) -> None:
        if self._dice.random() < 0.2:
            self._client.delete(MANIFEST, hashes[-32:])


def main() -> None:
    client = BusyClient(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    while True:
        client.once()


if __name__ == "__main__":
    main()

"""One client of the soak: random operations, every byte checked, until SIGTERM or SIGKILL.

python -m benchmarks.soak_client URL TRANSPORT SEED TALLY

TALLY is a file that is replaced about once a second, with operations, errors by kind, wrong bytes.
"""

import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fakes.store import HASH_BYTES, Memory, chain_of, manifest_of

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.lease import Lease, Reservation
from kvrouter_store.errors import KVStoreError

BLOCK_BYTES = 64 << 10
LONGEST = 12
CHAINS = 200  # three times what the pool of the soak holds
MOST_HELD = 3
TELL_EVERY_S = 1.0


def content(hash_: bytes) -> bytes:
    """The bytes of a block, a function of its hash."""
    return hash_ * (BLOCK_BYTES // HASH_BYTES)


class SoakClient:
    """Operations by weight; it releases leases and reservations a little later, or never."""

    def __init__(self, url: str, transport: Any, seed: int) -> None:
        self.tally: Counter[str] = Counter()
        self.wrong = 0
        self._dice = random.Random(seed)
        self._client = StoreClient(url, transport=transport, deadline_s=20)
        self._manifest = manifest_of(BLOCK_BYTES)
        self._memory = Memory(LONGEST, BLOCK_BYTES)
        self._held: list[Lease | Reservation] = []
        self._weights = {"put": 5, "get": 6, "acquire": 3, "wait": 2, "match": 3, "delete": 1}
        if transport == "shm":
            self._weights["reserve"] = 2

    def once(self) -> None:
        """One operation; errors of the store are counted, not raised."""
        (name,) = self._dice.choices(list(self._weights), list(self._weights.values()))
        blocks = self._dice.randint(1, LONGEST)
        hashes = chain_of(blocks, str(self._dice.randrange(CHAINS)))
        try:
            getattr(self, name)(hashes, blocks)
            self.tally[name] += 1
            if len(self._held) > MOST_HELD:
                oldest = self._held.pop(0)
                oldest.release() if isinstance(oldest, Lease) else oldest.abort()
        except KVStoreError as error:
            self.tally[f"error {type(error).__name__}"] += 1

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
    """Work, and keep the tally file up to date."""
    url, transport, seed, file = sys.argv[1:]
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    client = SoakClient(url, transport, int(seed))
    told_at, told_wrong = time.monotonic(), 0
    while not over.is_set():
        client.once()
        if time.monotonic() > told_at + TELL_EVERY_S or client.wrong > told_wrong:
            told_at, told_wrong = time.monotonic(), client.wrong
            write_tally(client, Path(file))
    write_tally(client, Path(file))


def write_tally(client: SoakClient, file: Path) -> None:
    """Replace the tally atomically."""
    fresh = file.with_suffix(".new")
    fresh.write_text(json.dumps({"done": client.tally, "wrong": client.wrong}))
    fresh.replace(file)


if __name__ == "__main__":
    main()

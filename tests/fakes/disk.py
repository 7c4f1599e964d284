"""A store node with an SSD tier, for tests: what it tells, and chains whose bytes are known."""

import json
import urllib.error
import urllib.request
from pathlib import Path

from tests.fakes.store import (
    HASH_BYTES,
    Memory,
    StoreProcess,
    chain_of,
    content_of,
    manifest_of,
    put_chain,
)

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.blocking import StoreClient

BLOCK = 64 << 10
MANIFEST = manifest_of(BLOCK)
POOL, DISK = "4MiB", "64MiB"
POOL_BLOCKS = (4 << 20) // BLOCK


class DiskNode(StoreProcess):
    """A node with little memory over a disk in the folder `disk` beside its socket."""

    def __init__(self, folder: Path, *flags: str, size: str = DISK) -> None:
        disk = folder / "disk"
        disk.mkdir(exist_ok=True)
        super().__init__(folder, POOL, "--disk", str(disk), "--disk-size", size, *flags)

    def ask(self, path: str, method: str = "GET") -> tuple[int, dict[str, object]]:
        request = urllib.request.Request(self.http_url + path, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def flush(self) -> int:
        """Wait until everything put so far is durable; how many blocks are."""
        status, told = self.ask("/flush", "POST")
        assert status == 200, told
        assert isinstance(told["durable_blocks"], int)
        return told["durable_blocks"]

    def stat(self, name: str) -> int:
        value = self.ask("/stats")[1][name]
        assert isinstance(value, int)
        return value

    def fill(self, chains: int, blocks: int = 16) -> list[bytes]:
        """Put chains, each durable before the next comes; more than the memory holds, perhaps."""
        made = [chain_of(blocks, f"chain {k}") for k in range(chains)]
        with StoreClient(self.url) as client:
            for hashes in made:
                put_chain(client, MANIFEST, hashes)
                self.flush()
        return made


def read(client: StoreClient, hashes: bytes) -> int:
    """Get the chain and compare every byte; how many leading blocks came."""
    blocks = len(hashes) // HASH_BYTES
    sink, span = Memory(blocks, BLOCK), range(blocks)
    got = client.get_into(MANIFEST, 0, hashes, span, sink.segments, span)
    assert BlockStatus.CORRUPT not in got
    came = next((k for k, status in enumerate(got) if status != BlockStatus.OK), blocks)
    for k in range(came):
        assert sink[k] == content_of(hashes[k * HASH_BYTES : (k + 1) * HASH_BYTES], BLOCK)
    return came

"""kill -9 of a store node during traffic: clients fail fast, and come back when it does."""

import threading
import time
from pathlib import Path
from typing import Literal

import pytest
from tests.fakes.patience import eventually
from tests.fakes.store import Memory, StoreProcess, chain_of, manifest_of, put_chain

from kvrouter_store._core import BlockStatus
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.errors import StoreUnavailable

BLOCK = 16 << 10
MANIFEST = manifest_of(BLOCK)
DEADLINE_S = 2.0
Kind = Literal["shm", "unix", "tcp"]


class Traffic:
    """Puts and gets in a thread; counts what went well and what the longest call took."""

    def __init__(self, client: StoreClient) -> None:
        self.good = self.unavailable = 0
        self.longest_s = 0.0
        self.error: BaseException | None = None
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert self.error is None, self.error

    def _run(self) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                number += 1
                started = time.monotonic()
                try:
                    self._once(chain_of(3, str(number % 50)))
                    self.good += 1
                except StoreUnavailable:
                    self.unavailable += 1
                    self._stop.wait(0.01)
                self.longest_s = max(self.longest_s, time.monotonic() - started)
        except BaseException as error:
            self.error = error

    def _once(self, hashes: bytes) -> None:
        put_chain(self._client, MANIFEST, hashes)
        memory, right = Memory(3, BLOCK), Memory(3, BLOCK).holds(hashes)
        got = self._client.get_into(MANIFEST, 0, hashes, range(3), memory.segments, range(3))
        for k, status in enumerate(got):
            assert status != BlockStatus.CORRUPT
            assert status == BlockStatus.MISSING or memory[k] == right[k]


@pytest.mark.parametrize("kind", ["shm", "unix", "tcp"])
def test_clients_live_through_the_death_of_the_node(tmp_path: Path, kind: Kind) -> None:
    node = StoreProcess(tmp_path).start()
    with StoreClient(node.url, transport=kind, deadline_s=DEADLINE_S) as client:
        traffic = Traffic(client)
        try:
            assert eventually(lambda: traffic.good > 20)
            node.kill()
            assert eventually(lambda: traffic.unavailable > 5)
            node.start()
            good = traffic.good
            assert eventually(lambda: traffic.good > good + 20)
        finally:
            traffic.stop()
        assert traffic.longest_s < 3 * DEADLINE_S
    assert node.stop() == 0

"""Operations on a node that hangs: the first ones wait, the others fail at once."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.fakes.link import Link
from tests.fakes.patience import eventually
from tests.fakes.store import Memory, chain_of, manifest_of, put_chain

from kvrouter_store._core import StoreServer
from kvrouter_store.client import batches
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.executor import PROBE_S
from kvrouter_store.connection import deadline
from kvrouter_store.errors import DeadlineExceeded, StoreUnavailable

pytestmark = pytest.mark.slow
MANIFEST = manifest_of(4096)
BATCH, BLOCKS = 48, 20 * 48
HALF_BYTES = BLOCKS * 4096 // 2


def test_while_a_node_hangs_operations_of_many_threads_fail_at_once(server: StoreServer) -> None:
    with (
        Link(("127.0.0.1", server.port)) as link,
        StoreClient(link.url, transport="tcp", deadline_s=1) as client,
    ):
        put_chain(client, MANIFEST, chain_of(1))
        link.stall()
        with pytest.raises(DeadlineExceeded):
            client.stats()
        ends, waits = time.monotonic() + 2.0, list[float]()
        pause = threading.Event()

        def operate(_: int) -> None:
            while (began := time.monotonic()) < ends:
                with pytest.raises(StoreUnavailable):
                    client.match(MANIFEST, chain_of(1))
                waits.append(time.monotonic() - began)
                pause.wait(0.01)  # as long as an engine computes between two operations

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(operate, range(4)))
        slow = [wait_s for wait_s in waits if wait_s > PROBE_S / 2]
        assert len(waits) > 50
        assert len(slow) <= 4  # one thread probes at a time, with pauses
        assert max(waits) < 1.0
        link.resume()
        assert eventually(lambda: _answers(client))


class HalfALink(Link):
    """Stalls when so many bytes have come from the node."""

    def within_limit(self, data: bytes, upward: bool) -> tuple[bytes, bool]:
        found = super().within_limit(data, upward)
        if self.passed_down > HALF_BYTES:
            self.stall()
        return found


def test_a_node_that_hangs_in_a_large_operation_costs_the_time_of_one_batch(
    server: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "BATCH_BLOCKS", BATCH)
    chain, memory, span = chain_of(BLOCKS), Memory(BLOCKS, 4096), range(BLOCKS)
    with StoreClient(f"kv://127.0.0.1:{server.port}") as client:
        assert put_chain(client, MANIFEST, chain) == BLOCKS
    with (
        HalfALink(("127.0.0.1", server.port)) as link,
        StoreClient(link.url, transport="tcp", deadline_s=0.5) as client,
    ):
        client.register(MANIFEST)
        monkeypatch.setattr(deadline, "MIN_RATE_BYTES_S", BATCH * 4096)  # 20 s for all batches
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.get_into(MANIFEST, 0, chain, span, memory.segments, span)
        assert link.passed_down > HALF_BYTES
        assert time.monotonic() - began < 10


def _answers(client: StoreClient) -> bool:
    try:
        client.stats()
    except StoreUnavailable:
        return False
    return True

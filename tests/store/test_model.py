"""The store against a dictionary: whatever clients do in turn, both say the same."""

import tempfile
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.fakes.store import HASH_BYTES, Memory, chain_of, content_of, eventually, manifest_of

from kvstore._core import BlockStatus, StoreServer
from kvstore.client import StoreClient

if TYPE_CHECKING:
    from kvstore.lease import Lease, Reservation

BLOCK = 512
PARTS = 2
CHAIN = 6
MANIFEST = manifest_of(BLOCK, parts=PARTS)
SEEDS = ("a", "b")
CHAINS = {seed: chain_of(CHAIN, seed) for seed in SEEDS}
Key = tuple[str, int, int]  # seed, block, part

seeds = st.sampled_from(SEEDS)
part_numbers = st.integers(0, PARTS - 1)
spans = st.tuples(st.integers(0, CHAIN - 1), st.integers(1, CHAIN)).map(
    lambda t: range(t[0], min(CHAIN, t[0] + t[1]))
)


class StoreAgainstDictionary(RuleBasedStateMachine):
    """The pool is large enough that nothing is evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="kvm-")
        self.server = StoreServer(unix_path=f"{self.folder.name}/s", pool_bytes=4 << 20)
        self.server.start()
        self.model: set[Key] = set()
        self.reserved: dict[Key, int] = {}
        self.reservations: list[tuple[Reservation, list[Key], bytes]] = []
        self.leases: list[Lease] = []

    @initialize()
    def connect(self) -> None:
        url = f"kv://127.0.0.1:{self.server.port}"
        kinds: tuple[Any, ...] = ("shm", "unix", "tcp")
        self.clients = [StoreClient(url, transport=kind) for kind in kinds]

    @rule(which=st.integers(0, 2), seed=seeds, part=part_numbers, span=spans)
    def put(self, which: int, seed: str, part: int, span: range) -> None:
        hashes = CHAINS[seed]
        memory = Memory(CHAIN, BLOCK).holds(hashes)
        got = self.clients[which].put(MANIFEST, part, hashes, span, memory.segments, span)
        for block, status in zip(span, got.statuses, strict=True):
            key = (seed, block, part)
            if key in self.model:
                assert status == BlockStatus.EXISTS
            elif key in self.reserved:
                assert status == BlockStatus.BUSY
            else:
                assert status == BlockStatus.STORED
                self.model.add(key)

    @rule(which=st.integers(0, 2), seed=seeds, part=part_numbers, span=spans)
    def get(self, which: int, seed: str, part: int, span: range) -> None:
        hashes = CHAINS[seed]
        memory = Memory(CHAIN, BLOCK)
        got = self.clients[which].get_into(MANIFEST, part, hashes, span, memory.segments, span)
        run = self.run_of(seed, span)
        assert got == [BlockStatus.OK] * run + [BlockStatus.MISSING] * (len(span) - run)
        for block in span[:run]:
            hash_ = hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]
            assert memory[block] == content_of(hash_, BLOCK)

    @rule(which=st.integers(0, 2), seed=seeds)
    def match(self, which: int, seed: str) -> None:
        assert self.clients[which].match(MANIFEST, CHAINS[seed]).blocks == self.run_of(seed)

    @rule(which=st.integers(0, 2), seed=seeds)
    def wait_no_longer_than_now(self, which: int, seed: str) -> None:
        landing = self.clients[which].wait(MANIFEST, CHAINS[seed], CHAIN, deadline_s=0)
        assert landing.blocks == self.run_of(seed)
        assert landing.landed == (landing.blocks == CHAIN)

    @rule(which=st.integers(0, 2), seed=seeds)
    def acquire(self, which: int, seed: str) -> None:
        lease = self.clients[which].acquire(MANIFEST, CHAINS[seed])
        assert lease.blocks == self.run_of(seed)
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        assert lease.release() == (lease.blocks > 0)

    @rule(seed=seeds, part=part_numbers, span=spans)
    def reserve(self, seed: str, part: int, span: range) -> None:
        reservation = self.clients[0].reserve(MANIFEST, part, CHAINS[seed], span)
        granted = []
        for block, status in zip(span, reservation.statuses, strict=True):
            key = (seed, block, part)
            if status == BlockStatus.GRANTED:
                assert key not in self.model
                assert key not in self.reserved
                granted.append(key)
                self.reserved[key] = 1
            else:
                there = BlockStatus.EXISTS if key in self.model else BlockStatus.BUSY
                assert status == there
        self.reservations.append((reservation, granted, CHAINS[seed]))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), wanted=st.booleans())
    def settle(self, data: st.DataObject, wanted: bool) -> None:
        place = data.draw(st.integers(0, len(self.reservations) - 1))
        reservation, granted, hashes = self.reservations.pop(place)
        for key in granted:
            del self.reserved[key]
        if not (wanted and granted):
            reservation.abort()
            return
        memory = Memory(CHAIN, BLOCK).holds(hashes)
        crcs = reservation.fill(memory.segments, [block for _, block, _ in granted])
        assert reservation.commit(crcs) == [BlockStatus.OK] * len(granted)
        self.model.update(granted)

    @rule(which=st.integers(0, 2), seed=seeds, block=st.integers(0, CHAIN - 1))
    def delete(self, which: int, seed: str, block: int) -> None:
        hash_ = CHAINS[seed][block * HASH_BYTES : (block + 1) * HASH_BYTES]
        there = {key for key in self.model if key[:2] == (seed, block)}
        count = self.clients[which].delete(MANIFEST, hash_)
        assert count == bool(there)
        self.model -= there

    @rule(which=st.integers(0, 2))
    def the_client_leaves_and_comes_back(self, which: int) -> None:
        if which == 0:
            for key in list(self.reserved):
                del self.reserved[key]
            self.reservations.clear()
        self.clients[which].close()
        self.leases = [lease for lease in self.leases if lease.held]
        kinds: tuple[Any, ...] = ("shm", "unix", "tcp")
        url = f"kv://127.0.0.1:{self.server.port}"
        self.clients[which] = StoreClient(url, transport=kinds[which])
        assert eventually(lambda: self.server.stats()["fenced_blocks"] == 0)
        assert eventually(lambda: self.server.stats()["reserved_blocks"] == len(self.reserved))

    @invariant()
    def the_gauges_tell_the_truth(self) -> None:
        stats = self.server.stats()
        assert stats["reserved_blocks"] == len(self.reserved)
        assert stats["free_bytes"] + stats["used_bytes"] == stats["pool_bytes"]

    def run_of(self, seed: str, span: range = range(CHAIN)) -> int:
        """How many leading blocks of the span have all their parts: others are not to be had."""
        whole = [all((seed, block, part) in self.model for part in range(PARTS)) for block in span]
        return (*whole, False).index(False)

    def teardown(self) -> None:
        for client in getattr(self, "clients", []):
            client.close()
        self.server.stop()
        self.folder.cleanup()


TestStoreAgainstDictionary = StoreAgainstDictionary.TestCase
TestStoreAgainstDictionary.settings = settings(
    max_examples=15,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

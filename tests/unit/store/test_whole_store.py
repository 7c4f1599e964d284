"""The whole store against dictionaries: many clients over every transport, who die at any step.

The pool holds less than half of what they store. What is gone must be explained: room was wanted,
and it was a leaf that nobody leased or wrote. KVROUTER_MODEL_STEPS says how many steps are taken.
"""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.fakes.patience import eventually
from tests.fakes.raw import RawLink
from tests.fakes.store import Memory
from tests.fakes.whole_store import (
    BLOCK,
    CHAIN,
    CHAINS,
    KINDS,
    MANIFEST,
    PARTS,
    Doomed,
    Guest,
    Node,
    bytes_of,
    hash_of,
    memory_of,
)
from tests.fakes.whole_store_checks import tally
from tests.fakes.whole_store_halves import PutsThatStop, part_numbers, seeds, spans, versions

from kvrouter_store import _core
from kvrouter_store._core import EVICTION_POLICIES, BlockStatus, PostState
from kvrouter_store.errors import LeaseLost

STEPS = int(os.environ.get("KVROUTER_MODEL_STEPS", "500"))
STEPS_PER_EXAMPLE = 100
MOST_WAITS = 3
LONG_MS = 3_600_000
S = BlockStatus

guests = st.integers(0, len(KINDS) - 1)
mappers = st.sampled_from([k for k, kind in enumerate(KINDS) if kind == "shm"])
seldom = st.sampled_from([False, False, False, True])


class WholeStore(PutsThatStop):
    """One step is one thing that one client does, or that happens to it."""

    @initialize(eviction=st.sampled_from(EVICTION_POLICIES), lends=st.integers(0, 2))
    def open(self, eviction: str, lends: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvw-")
        self.begin(Node(self.folder.name, eviction, lends))
        self.guests = []
        for k, kind in enumerate(KINDS):
            target = ("127.0.0.1", self.node.port) if kind == "tcp" else self.node.path
            self.guests.append(Guest.arrive(kind, target, Path(self.folder.name, str(k))))
        self.doomed: Doomed | None = None
        self.killed = 0

    # What one client does.

    @rule(which=guests, seed=seeds, part=part_numbers, span=spans, version=versions)
    def put_some(self, which: int, seed: str, part: int, span: range, version: int) -> None:
        self.put(self.guests[which], (seed, part, span), version)

    def put(self, guest: Guest, what: tuple[str, int, range], version: int) -> None:
        seed, part, span = what
        if guest.unaware:
            return
        memory = memory_of(seed, part, version)
        got = guest.client.put(MANIFEST, part, CHAINS[seed], span, memory.segments, span)
        posts = guest.kind == "shm"
        for key in self.granted(seed, part, span, got.statuses, S.STORED, posts=posts):
            self.model.committed[key] = version

    @rule(which=guests, seed=seeds, blocks=st.integers(1, CHAIN), version=versions)
    def put_whole_blocks(self, which: int, seed: str, blocks: int, version: int) -> None:
        """All parts from the start, as engines do; what goes for the first is looked at first."""
        for part in range(PARTS):
            if part:
                self.the_store_is_as_the_model_says()
            self.put(self.guests[which], (seed, part, range(blocks)), version)

    @rule(which=guests, seed=seeds, part=part_numbers, span=spans)
    def get(self, which: int, seed: str, part: int, span: range) -> None:
        guest = self.guests[which]
        if guest.unaware:
            return
        memory = Memory(CHAIN, BLOCK)
        got = guest.client.get_into(MANIFEST, part, CHAINS[seed], span, memory.segments, span)
        run = self.model.run(seed, span)
        assert got == [S.OK] * run + [S.MISSING] * (len(span) - run)
        for block in span[:run]:
            key = (seed, block, part)
            assert memory[block] == bytes_of(key, self.model.committed[key])

    @rule(which=guests, seed=seeds)
    def match(self, which: int, seed: str) -> None:
        guest = self.guests[which]
        if not guest.unaware:
            assert guest.client.match(MANIFEST, CHAINS[seed]).blocks == self.run_of(seed)

    @rule(which=guests, seed=seeds)
    def acquire(self, which: int, seed: str) -> None:
        guest = self.guests[which]
        if guest.unaware:
            return
        lease = guest.client.acquire(MANIFEST, CHAINS[seed])
        assert lease.blocks == self.run_of(seed)
        # Who maps the pool and finds all that it asks for does not ask the node.
        in_place = guest.kind == "shm" and lease.blocks == CHAIN
        held = self.model.lease(guest, seed, lease.blocks, in_place=in_place)
        guest.leases.append((lease, held))

    @precondition(lambda self: any(guest.leases for guest in self.guests))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """What was leased did not change, whatever became of the block's name meanwhile."""
        guest = data.draw(st.sampled_from([guest for guest in self.guests if guest.leases]))
        lease, held = guest.leases.pop(data.draw(st.integers(0, len(guest.leases) - 1)))
        if guest.kind == "shm" and held in self.model.leases:
            for key, version in held.versions.items():
                assert bytes(lease.view(key[1], key[2])) == bytes_of(key, version)
        assert lease.release() == self.model.release(held)

    @rule(which=mappers, seed=seeds, part=part_numbers, span=spans, version=versions)
    def reserve(self, which: int, seed: str, part: int, span: range, version: int) -> None:
        guest = self.guests[which]
        if guest.unaware:
            return
        reservation = guest.client.reserve(MANIFEST, part, CHAINS[seed], span)
        keys = self.granted(seed, part, span, reservation.statuses, S.GRANTED)
        for key in keys:
            self.model.reserved[key] = guest
        if keys:
            reservation.fill(Memory(CHAIN, BLOCK).segments, [key[1] for key in keys])
        guest.reservations.append((reservation, keys, version))

    @precondition(lambda self: any(g.reservations and not g.unaware for g in self.guests))
    @rule(data=st.data(), wanted=st.booleans())
    def settle(self, data: st.DataObject, wanted: bool) -> None:
        choice = [guest for guest in self.guests if guest.reservations and not guest.unaware]
        guest = data.draw(st.sampled_from(choice))
        place = data.draw(st.integers(0, len(guest.reservations) - 1))
        reservation, keys, version = guest.reservations.pop(place)
        ours = [key for key in keys if self.model.settle(guest, key)]
        if not (wanted and keys):
            return reservation.abort()
        seed, _, part = keys[0]
        memory = memory_of(seed, part, version)
        crcs = reservation.fill(memory.segments, [key[1] for key in keys])
        assert reservation.commit(crcs) == [S.OK] * len(keys)
        self.model.committed.update(dict.fromkeys(ours, version))

    @rule(which=guests, seed=seeds, block=st.integers(0, CHAIN - 1))
    def delete(self, which: int, seed: str, block: int) -> None:
        guest = self.guests[which]
        if not guest.unaware:
            count = guest.client.delete(MANIFEST, hash_of(seed, block))
            assert count == self.model.take_all([(seed, block)])

    @rule(which=guests, really=seldom, indeed=seldom)
    def purge(self, which: int, really: bool, indeed: bool) -> None:
        guest = self.guests[which]
        if really and indeed and not guest.unaware:
            assert guest.client.purge() == self.model.take_all(self.model.blocks())

    # Those who wait.

    @precondition(lambda self: len(self.waits) < MOST_WAITS)
    @rule(seed=seeds, upto=st.integers(1, CHAIN), lease=st.booleans())
    def wait(self, seed: str, upto: int, lease: bool) -> None:
        link = RawLink(self.node.path)
        name = CHAINS[seed], upto, LONG_MS, lease
        link.send(_core.encode_wait(link.next_id(), self.node.manifest_id, *name))
        self.waits.append((link, seed, upto, lease))
        self.model.waits += 1

    @rule(seed=seeds)
    def wait_no_longer_than_now(self, seed: str) -> None:
        name = CHAINS[seed], CHAIN, 0, False
        frame = _core.encode_wait(self.node.witness.next_id(), self.node.manifest_id, *name)
        landing = self.node.witness.ask(frame).reply
        assert isinstance(landing, _core.WaitReply)
        assert landing.blocks == self.run_of(seed)
        assert landing.landed == (landing.blocks == CHAIN)

    @precondition(lambda self: self.waits)
    @rule(cancelled=st.booleans())
    def wait_no_more(self, cancelled: bool) -> None:
        link, *_ = self.waits.pop(0)
        self.model.waits -= 1
        if cancelled:
            link.send(_core.encode_cancel(link.next_id(), 2))
            assert link.receive().header.status == _core.Status.CANCELLED
            reply = link.receive().reply
            assert isinstance(reply, _core.FlagReply)
            assert reply.flag
        link.close()

    @precondition(lambda self: self.holders)
    @rule()
    def who_waited_leaves(self) -> None:
        link, held = self.holders.pop(0)
        link.close()
        self.model.release(held)

    # Deaths.

    @rule(which=guests, really=seldom)
    def cut(self, which: int, really: bool) -> None:
        """The link is cut; who maps the pool does not notice and could write on."""
        guest = self.guests[which]
        if guest.unaware or not really:
            return
        lent = guest.lent()
        guest.link.cut()
        self.model.gone(guest, fenced=guest.kind == "shm")
        if lent:
            self.model.fenced[guest] += lent
        assert eventually(lambda: not any(lease.held for lease, _ in guest.leases))
        guest.unaware = self.model.fenced[guest] > 0
        if not guest.unaware:
            guest.reservations.clear()
        tally["deaths"] += 1

    @precondition(lambda self: any(guest.unaware for guest in self.guests))
    @rule(data=st.data(), seed=seeds, part=part_numbers, span=spans, notices=st.booleans())
    def write_on(
        self, data: st.DataObject, seed: str, part: int, span: range, notices: bool
    ) -> None:
        """Nothing of what it writes can be seen; when it notices, its slots are free again."""
        guest = data.draw(st.sampled_from([guest for guest in self.guests if guest.unaware]))
        assert set(guest.post(self.node.ids, (seed, span.start, part), span)) <= {PostState.CLOSED}
        for reservation, keys, _ in guest.reservations:
            if keys:
                with contextlib.suppress(LeaseLost):
                    reservation.fill(Memory(CHAIN, BLOCK).segments, [key[1] for key in keys])
        if notices:
            guest.give_up_reservations()
            guest.come_back()
            del self.model.fenced[guest]

    @rule(which=guests, really=seldom)
    def leave_and_come_back(self, which: int, really: bool) -> None:
        guest = self.guests[which]
        if not really:
            return
        guest.come_back()
        self.model.gone(guest, fenced=False)
        self.model.fenced.pop(guest, None)

    @precondition(lambda self: self.doomed is None and self.killed == 0)
    @rule(leased=seeds, reserved=seeds, span=spans)
    def a_process_comes(self, leased: str, reserved: str, span: range) -> None:
        self.doomed = doomed = Doomed(f"kv+unix://{self.node.path}", leased, reserved, span)
        assert doomed.leased_blocks == self.run_of(leased)
        in_place = doomed.leased_blocks == CHAIN
        self.model.lease(doomed, leased, doomed.leased_blocks, in_place=in_place)
        statuses = [BlockStatus(code) for code in doomed.statuses]
        for key in self.granted(reserved, 0, span, statuses, S.GRANTED):
            self.model.reserved[key] = doomed

    @precondition(lambda self: self.doomed is not None)
    @rule()
    def it_is_killed(self) -> None:
        assert self.doomed is not None
        self.doomed.kill()
        self.model.gone(self.doomed, fenced=False)
        self.doomed, self.killed = None, 1
        tally["deaths"] += 1

    @rule(really=seldom, indeed=seldom)
    def restart(self, really: bool, indeed: bool) -> None:
        if not (really and indeed):
            return
        self.forget_links()
        if self.doomed is not None:
            self.it_is_killed()
        self.node.restart()
        self.model.restart()
        self.evictions = 0
        for guest in self.guests:
            assert eventually(lambda g=guest: not any(lease.held for lease, _ in g.leases))
            guest.give_up_reservations()
            guest.unaware = False
        tally["deaths"] += 1

    def forget_links(self) -> None:
        for link in [w[0] for w in self.waits] + [h[0] for h in self.holders]:
            link.close()
        for half in self.half_puts:
            half.link.close()
        self.waits.clear()
        self.holders.clear()
        self.half_puts.clear()

    def teardown(self) -> None:
        if not hasattr(self, "node"):
            return
        self.forget_links()
        if self.doomed is not None:
            self.doomed.kill()
        for guest in self.guests:
            guest.leave()
        held = ("reserved_blocks", "fenced_blocks", "leases", "pinned_blocks", "waits")
        assert eventually(lambda: not any(self.node.server.stats()[name] for name in held))
        self.node.stop()
        self.folder.cleanup()


@pytest.mark.timeout(0)
def test_the_store_and_dictionaries_never_differ() -> None:
    while tally["steps"] < STEPS:
        run_state_machine_as_test(
            WholeStore,
            settings=settings(
                max_examples=max(1, min(20, (STEPS - tally["steps"]) // STEPS_PER_EXAMPLE)),
                stateful_step_count=STEPS_PER_EXAMPLE,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    print(f"no difference: {', '.join(f'{count} {name}' for name, count in tally.items())}")
    assert tally["evicted"] > 0
    assert tally["deaths"] > 0
    assert STEPS < 5000 or tally["superseded"] > 0

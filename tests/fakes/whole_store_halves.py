"""PUTs whose payload stops at any byte, in the state machine of the whole store."""

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from tests.fakes.frames import LINE_BYTES, put_frame
from tests.fakes.patience import eventually
from tests.fakes.raw import RawLink
from tests.fakes.whole_store import (
    BLOCK,
    CHAIN,
    GRANULE,
    PARTS,
    SEEDS,
    SLOTS,
    HalfPut,
    Node,
    bytes_of,
    hash_of,
    hashes_of,
)
from tests.fakes.whole_store_checks import StoreAgainstModel, tally

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus

__all__ = ["PutsThatStop", "part_numbers", "seeds", "spans", "versions"]

S = BlockStatus
seeds = st.sampled_from(SEEDS)
part_numbers = st.integers(0, PARTS - 1)
versions = st.integers(0, 3)
spans = st.tuples(st.integers(0, CHAIN - 1), st.integers(1, CHAIN)).map(
    lambda t: range(t[0], min(CHAIN, t[0] + t[1]))
)
cuts = st.floats(0, 1)
intacts = st.sampled_from([True, True, False])


class PutsThatStop(StoreAgainstModel):
    """They hold the slot of one block until they go on or their connection is cut."""

    def begin(self, node: Node) -> None:
        super().begin(node)
        self.half_puts: list[HalfPut] = []

    @rule(what=st.tuples(seeds, part_numbers, spans), version=versions, cut=cuts, intact=intacts)
    def put_and_stop_in_the_middle(
        self, what: tuple[str, int, range], version: int, cut: float, intact: bool
    ) -> None:
        """A PUT whose payload ends anywhere; of one block alone where room must be made for it."""
        seed, part, span = what
        if len(self.half_puts) > 1:
            return
        lent = self.node.server.stats()["lent_bytes"] // GRANULE
        if SLOTS - self.model.used_slots() - lent < len(span):
            span = span[:1]
        link = RawLink(self.node.path)
        pieces = [bytes_of((seed, block, part), version) for block in span]
        payload = b"".join(
            piece + (_core.crc32c(piece) ^ (not intact)).to_bytes(LINE_BYTES, "little")
            for piece in pieces
        )
        parent = hash_of(seed, span.start - 1) if span.start else None
        name = self.node.manifest_id, part, hashes_of(seed, span), BLOCK
        sent = int(cut * (len(payload) - 1))
        link.send(put_frame(link.next_id(), *name, parent=parent) + payload[:sent])
        assert eventually(lambda: link.unread == 0)
        half = HalfPut(link, payload[sent:], part, seed, span, version, intact, [], None)
        self.half_puts.append(half)
        self.follow(half, sent // (BLOCK + LINE_BYTES))

    def follow(self, half: HalfPut, complete: int) -> None:
        """Tell the model of the blocks that have come in full, and of the one that is coming."""
        for block in half.span[: complete + 1]:
            key = (half.seed, block, half.part)
            if key in self.model.committed:
                status = S.EXISTS
            elif key in self.model.reserved:
                status = S.BUSY
            elif block == half.span[complete]:
                status = S.GRANTED if self.reserved_now() > len(self.model.reserved) else S.NO_SPACE
            else:
                status = S.STORED if half.intact else S.CORRUPT
            if status in (S.STORED, S.GRANTED):
                self.written.add(key)
            if status == S.STORED:
                self.model.committed[key] = half.version
            elif status == S.GRANTED:
                self.model.reserved[key] = half.link
                half.writing = key
            elif status == S.NO_SPACE:
                self.refused = key[:2]
            if status != S.GRANTED:
                half.settled.append(status)

    def reserved_now(self) -> int:
        return self.node.server.stats()["reserved_blocks"]

    @precondition(lambda self: self.half_puts)
    @rule(goes_on=st.booleans())
    def end_the_half_put(self, goes_on: bool) -> None:
        half = self.half_puts.pop(0)
        ours = half.writing is not None and self.model.settle(half.link, half.writing)
        self.slack += 1
        if not goes_on:
            half.link.close()
            tally["deaths"] += 1
            return
        half.link.send(half.rest)
        reply = half.link.receive().reply
        half.link.close()
        assert isinstance(reply, _core.StatusesReply)
        known = len(half.settled)
        assert list(reply.statuses[:known]) == [int(status) for status in half.settled]
        rest = [BlockStatus(code) for code in reply.statuses[known:]]
        span = half.span[known:]
        if half.writing is not None:
            assert rest[0] == (S.STORED if half.intact else S.CORRUPT)
            if not ours:
                rest, span = rest[1:], span[1:]
        if not half.intact:
            assert S.STORED not in rest
            rest = [S.STORED if status == S.CORRUPT else status for status in rest]
        for key in self.granted(half.seed, half.part, span, rest, S.STORED):
            if half.intact:
                self.model.committed[key] = half.version

"""What must hold after each step of the state machine of the whole store, and how that is seen."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hypothesis.stateful import RuleBasedStateMachine, invariant
from tests.fakes.model import Block, Held, Key, StoreModel
from tests.fakes.patience import eventually
from tests.fakes.whole_store import CHAIN, GRANULE, PARTS, SLOTS, Node, bytes_of

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus

__all__ = ["StoreAgainstModel", "tally"]

if TYPE_CHECKING:
    from tests.fakes.raw import RawLink

S = BlockStatus
PATIENCE_S = 5.0  # for what ends with a connection to have ended
tally = {"steps": 0, "evicted": 0, "deaths": 0, "landings": 0, "refused": 0, "superseded": 0}


class StoreAgainstModel(RuleBasedStateMachine):
    """A node, the model of what it holds, and the comparison of both."""

    def begin(self, node: Node) -> None:
        self.node = node
        self.model = StoreModel(SLOTS, PARTS)
        self.waits: list[tuple[RawLink, str, int, bool]] = []
        self.holders: list[tuple[RawLink, Held]] = []
        self.evictions = 0  # that the node has told of
        self._begin_step()

    def _begin_step(self) -> None:
        self.restored = 0  # evicted and stored again by one request
        self.slack = 1  # slots that may be free after an eviction
        self.refused: Block | None = None
        self.written: set[Key] = set()

    def run_of(self, seed: str) -> int:
        return self.model.run(seed, range(CHAIN))

    @invariant()
    def the_store_is_as_the_model_says(self) -> None:
        tally["steps"] += 1
        present = self.node.read_all()
        self.explain_evictions(present)
        self.answer_waits()
        assert present == {key: bytes_of(key, v) for key, v in self.model.committed.items()}
        wanted = self.model.gauges() | {"used_bytes": self.model.used_slots() * GRANULE}
        eventually(lambda: self.gauges(wanted) == wanted, PATIENCE_S)
        is_now = self.gauges(wanted)
        wrong = {name: (n, wanted[name]) for name, n in is_now.items() if n != wanted[name]}
        assert wrong == {}, f"(is, should be): {wrong}"
        pinned = self.node.server.stats()["pinned_blocks"]
        least, most = len(self.model.pinned_by_the_node()), len(self.model.pinned())
        assert least <= pinned <= most, f"pinned: {pinned}, should be {least} to {most}"
        if self.refused is not None:
            # Neither it nor what leads to it could go for it; all else that may go had gone.
            seed, block = self.refused
            assert self.model.evictable() <= {(seed, block), (seed, block - 1)}
            tally["refused"] += 1
        self._begin_step()

    def gauges(self, wanted: dict[str, int]) -> dict[str, int]:
        stats = self.node.server.stats()
        parts = ("free_bytes", "used_bytes", "lent_bytes")
        assert sum(stats[name] for name in parts) == stats["pool_bytes"]
        return {name: stats[name] for name in wanted}

    def answer_waits(self) -> None:
        """Who waits is answered as soon as it has landed, and not before."""
        for wait in list(self.waits):
            link, seed, upto, lease = wait
            if self.model.run(seed, range(upto)) < upto:
                continue
            answer = link.receive()
            assert answer.header.status == _core.Status.OK
            assert isinstance(answer.reply, _core.WaitReply)
            assert answer.reply.blocks == upto
            assert (answer.reply.lease_id != 0) == lease
            self.waits.remove(wait)
            self.model.waits -= 1
            tally["landings"] += 1
            if lease:
                self.holders.append((link, self.model.lease(link, seed, upto)))
            else:
                link.close()

    def explain_evictions(self, present: dict[Key, bytes]) -> None:
        """What is gone was evicted whole, was a leaf, was nobody's, and room was wanted."""
        stats = self.node.server.stats()
        evicted = stats["evictions_total.capacity"] - self.evictions
        gone = {key[:2] for key in self.model.committed if key not in present}
        assert len(gone) == evicted - self.restored
        old = (present.keys() | self.model.reserved.keys()) - self.written
        for seed, place in gone:
            assert not self.model.is_pinned((seed, place))
            # It went whole, and nothing hung on it; what is there now came after it in this step.
            assert not any(key[0] == seed and key[1] in (place, place + 1) for key in old)
        for block in gone:
            new = {key: self.model.committed[key] for key in self.model.parts_of(block)}
            self.model.forget(block)
            self.model.committed.update((key, v) for key, v in new.items() if key in present)
        if evicted:
            assert stats["free_bytes"] <= self.slack * GRANULE
        self.evictions += evicted
        tally["evicted"] += evicted

    def granted(
        self,
        seed: str,
        part: int,
        span: range,
        statuses: Sequence[BlockStatus],
        good: BlockStatus,
        *,
        posts: bool = False,
    ) -> list[Key]:
        """The blocks of a request to write that were taken; the others had a reason.

        With `posts`, what was put whole takes the place of what another has only reserved.
        """
        taken: list[Key] = []
        for block, status in zip(span, statuses, strict=True):
            key = (seed, block, part)
            if self.refused is not None:
                assert status == S.NO_SPACE
            elif status == good:
                if key in self.model.reserved:
                    assert posts
                    self.model.supersede(key)
                    tally["superseded"] += 1
                if key in self.model.committed:  # it had gone for the room of those before it
                    self.restored += self.model.forget((seed, block))
                taken.append(key)
                self.written.add(key)
            elif status == S.NO_SPACE:
                self.refused = (seed, block)
            else:
                assert status == (S.EXISTS if key in self.model.committed else S.BUSY)
                assert key in self.model.committed or key in self.model.reserved
        return taken

"""Which chunks an engine's host memory holds: against a model that looks at one chunk at a time."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrouter_store.connectors.vllm.chunk_table import ChunkTable
from kvrouter_store.connectors.vllm.room import Chunk

CHUNKS = 6
KEYS = [bytes([number]) for number in range(9)]
some = st.lists(st.sampled_from(KEYS), max_size=5, unique=True)


class Walk(RuleBasedStateMachine):
    """The model: a state of each key, how often it is held, and the order in which they go."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ChunkTable(CHUNKS)
        self.numbers: dict[bytes, int] = {}
        self.coming: set[bytes] = set()
        self.held: Counter[bytes] = Counter()
        self.order: list[bytes] = []  # of those that may be evicted

    @rule(keys=some)
    def take(self, keys: list[bytes]) -> None:
        """Those that are absent have numbers of their own; the oldest went for them, or none."""
        new = [key for key in keys if key not in self.numbers]
        victims = [key for key in self.order if key not in keys]
        short = max(0, len(new) - (CHUNKS - len(self.numbers)))
        taken = self.table.take(keys)
        if short > len(victims):
            assert taken is None
            return
        assert taken is not None
        assert (taken.keys, taken.evicted) == (new, victims[:short])
        for key in taken.evicted:
            self.order.remove(key)
            del self.numbers[key]
        self.numbers.update(zip(taken.keys, taken.numbers, strict=True))
        self.coming.update(new)

    @rule(keys=some, good=st.booleans())
    def came(self, keys: list[bytes], good: bool) -> None:
        """What was written may be evicted; what was not is absent again."""
        those = [key for key in keys if key in self.coming]
        assert self.table.came(keys, good=good) == those
        self.coming.difference_update(those)
        if good:
            self.order += those
        for key in () if good else those:
            del self.numbers[key]

    @rule(keys=some)
    def pass_on(self, keys: list[bytes]) -> None:
        """What was written is held at once."""
        those = [key for key in keys if key in self.coming]
        assert self.table.pass_on(those) == [self.numbers[key] for key in those]
        self.coming.difference_update(those)
        self.held.update(those)

    @rule(keys=some)
    def hold(self, keys: list[bytes]) -> None:
        """What is there is held once more."""
        those = [key for key in keys if key in self.numbers and key not in self.coming]
        assert self.table.hold(those) == [self.numbers[key] for key in those]
        self.held.update(those)
        self.order = [key for key in self.order if key not in those]

    @rule(keys=some)
    def let_go(self, keys: list[bytes]) -> None:
        """What nobody holds any more goes after all others."""
        those = [key for key in keys if self.held[key]]
        self.table.let_go(those)
        self.held.subtract(those)
        self.order += [key for key in those if not self.held[key]]

    @rule()
    def clear(self) -> None:
        """Nothing is there, and nothing is held."""
        self.table.clear()
        self.numbers.clear()
        self.coming.clear()
        self.held.clear()
        self.order.clear()

    @invariant()
    def agrees(self) -> None:
        """Numbers are in bounds and no two chunks share one; each chunk is in its state."""
        assert {*self.numbers.values()} <= {*range(CHUNKS)}
        assert len({*self.numbers.values()}) == len(self.numbers) == self.table.there
        assert self.table.free == CHUNKS - len(self.numbers) + len(self.order)
        assert self.table.coming == len(self.coming)
        assert self.table.absent(KEYS) == [key for key in KEYS if key not in self.numbers]
        assert [self.table.state(key) for key in KEYS] == [self._state(key) for key in KEYS]

    def _state(self, key: bytes) -> Chunk:
        if key not in self.numbers:
            return Chunk.ABSENT
        if key in self.coming:
            return Chunk.COMING
        return Chunk.HELD if self.held[key] else Chunk.IDLE


TestWalk = Walk.TestCase

"""The cache of a simulated engine: what is held, what is shared, what goes first."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrouter.tools.sim.block_cache import Allocation, BlockCache


def chain(name: str, blocks: int) -> list[bytes]:
    return [f"{name}{index}".encode() for index in range(blocks)]


def filled(cache: BlockCache, hashes: list[bytes]) -> Allocation:
    allocation = cache.allocate(hashes, len(hashes))
    assert allocation is not None
    for index, block_hash in enumerate(hashes):
        cache.name(allocation, index, block_hash)
    return allocation


def test_a_released_prefix_is_found_again() -> None:
    cache = BlockCache(8)
    cache.release(filled(cache, chain("a", 3)))
    again = cache.allocate(chain("a", 3), 5)
    assert again is not None
    assert again.cached_blocks == 3
    assert len(set(again.slots)) == 5


def test_two_requests_share_the_slots_of_one_prefix() -> None:
    cache = BlockCache(8)
    first = filled(cache, chain("a", 3))
    second = cache.allocate(chain("a", 3), 4)
    assert second is not None
    assert second.slots[:3] == first.slots
    assert cache.held_blocks == 4


def test_a_request_without_room_changes_nothing() -> None:
    cache = BlockCache(4)
    held = filled(cache, chain("a", 3))
    assert cache.allocate(chain("b", 2), 2) is None
    assert cache.held_blocks == 3
    cache.release(held)
    assert cache.allocate(chain("b", 2), 2) is not None


def test_a_prefix_that_is_about_to_be_used_does_not_count_as_room() -> None:
    cache = BlockCache(4)
    cache.release(filled(cache, chain("a", 4)))
    assert cache.allocate(chain("a", 4), 5) is None
    assert cache.matched(chain("a", 4)) == 4


def test_a_block_goes_before_its_parent_and_the_oldest_chain_first() -> None:
    cache = BlockCache(4)
    cache.release(filled(cache, chain("a", 2)))
    cache.release(filled(cache, chain("b", 2)))
    assert cache.allocate([], 1) is not None
    assert cache.take_removed() == (b"a1",)
    assert cache.allocate([], 2) is not None
    assert cache.take_removed() == (b"a0", b"b1")
    assert cache.take_removed() == ()


def test_a_twin_of_a_named_block_keeps_its_slot_and_gives_it_back() -> None:
    cache = BlockCache(4)
    first = cache.allocate([], 1)
    second = cache.allocate([], 1)
    assert first is not None
    assert second is not None
    assert cache.name(first, 0, b"x") is True
    assert cache.name(second, 0, b"x") is False
    cache.release(second)
    cache.release(first)
    assert cache.matched([b"x"]) == 1
    cache.clear()
    assert cache.take_removed() == (b"x",)
    assert cache.matched([b"x"]) == 0


class CacheMachine(RuleBasedStateMachine):
    """Slots are never lost, never shared by different blocks, and never beyond the capacity."""

    capacity = 6

    def __init__(self) -> None:
        super().__init__()
        self.cache = BlockCache(self.capacity)
        self.live: list[Allocation] = []

    @rule(name=st.sampled_from("abc"), blocks=st.integers(1, 4), extra=st.integers(0, 2))
    def admit(self, name: str, blocks: int, extra: int) -> None:
        allocation = self.cache.allocate(chain(name, blocks), blocks + extra)
        if allocation is None:
            return
        for index, block_hash in enumerate(chain(name, blocks)):
            if index >= allocation.cached_blocks:
                self.cache.name(allocation, index, block_hash)
        self.live.append(allocation)

    @rule(pick=st.integers(0, 100))
    def finish(self, pick: int) -> None:
        if self.live:
            self.cache.release(self.live.pop(pick % len(self.live)))

    @rule()
    def reset(self) -> None:
        self.cache.clear()

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        held = {slot for allocation in self.live for slot in allocation.slots}
        assert self.cache.held_blocks == len(held) <= self.capacity
        if not self.live:
            whole = self.cache.allocate([], self.capacity)
            assert whole is not None
            assert sorted(whole.slots) == list(range(self.capacity))
            self.cache.release(whole)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

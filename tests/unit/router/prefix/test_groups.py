"""Prefixes that several cache groups can load: a model of the store answers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.engines.engine import CacheGroup
from kvrouter.prefix.groups import known_loadable, loadable, wait_landed
from kvrouter_store.client.results import Match
from kvrouter_store.errors import StoreUnavailable

HASHES = [sha256(bytes([number])).digest() for number in range(12)]
CHAIN = b"".join(HASHES)


@dataclass
class FakeLease:
    store: "FakeStore"

    def release(self) -> None:
        self.store.leases.remove(self)


@dataclass
class FakeLanding:
    landed: bool
    blocks: int
    lease: FakeLease | None


@dataclass
class FakeStore:
    """Blocks that are there, by manifest; a wait ends at once. `failing`: a manifest that fails."""

    there: dict[str, set[bytes]]
    failing: str = ""
    leases: list[FakeLease] = field(default_factory=list)
    waited: list[tuple[str, int]] = field(default_factory=list)

    async def match(self, manifest: str, hashes: bytes, *, promote: bool) -> Match:
        assert promote
        return Match(self._leading(manifest, hashes))

    async def held(self, manifest: str, hashes: bytes) -> list[bool]:
        return [name in self.there[manifest] for name in _names(hashes)]

    async def wait(
        self, manifest: str, hashes: bytes, upto: int, deadline_s: float, lease: bool
    ) -> FakeLanding:
        assert len(hashes) == 32 * upto
        assert deadline_s >= 0
        if manifest == self.failing:
            raise StoreUnavailable("away")
        self.waited.append((manifest, upto))
        blocks = self._leading(manifest, hashes)
        held = FakeLease(self) if lease and blocks == upto else None
        self.leases += [held] if held is not None else []
        return FakeLanding(blocks == upto, blocks, held)

    def _leading(self, manifest: str, hashes: bytes) -> int:
        there = [name in self.there[manifest] for name in _names(hashes)]
        return there.index(False) if False in there else len(there)


def _names(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + 32] for at in range(0, len(hashes), 32)]


def ask_loadable(store: FakeStore, groups: Sequence[tuple[str, int | None]]) -> int:
    return asyncio.run(loadable(store, groups, CHAIN))  # type: ignore[arg-type]


def known(there: dict[str, set[int]], groups: Sequence[tuple[str, int | None]]) -> int:
    """The same by what is known of the blocks."""

    def run(manifest: str, first: int, end: int) -> int:
        return next((n - first for n in range(first, end) if n not in there[manifest]), end - first)

    return known_loadable(run, [CacheGroup(*group) for group in groups], len(HASHES))


async def ask_landed(store: FakeStore, *groups: tuple[str, int | None], span: range) -> Any:
    return await wait_landed(store, groups, CHAIN, span, 1.0, lease=True)  # type: ignore[arg-type]


BLOCKS = st.sets(st.integers(0, 11))


@given(full=BLOCKS, window=BLOCKS, state=BLOCKS, reach=st.integers(1, 4))
def test_a_prefix_can_be_loaded_up_to_the_last_boundary_that_all_groups_have(
    full: set[int], window: set[int], state: set[int], reach: int
) -> None:
    there = {"full": full, "window": window, "state": state}
    store = FakeStore({name: {HASHES[n] for n in blocks} for name, blocks in there.items()})
    can = [
        boundary
        for boundary in range(1, 13)
        if full >= set(range(boundary))
        and window >= set(range(max(0, boundary - reach), boundary))
        and boundary - 1 in state
    ]
    groups = [("full", None), ("window", reach), ("state", 1)]
    assert ask_loadable(store, groups) == max(can, default=0)
    assert known(there, groups) == max(can, default=0)


def test_a_model_of_windows_alone_needs_no_whole_prefix() -> None:
    store = FakeStore({"window": set(HASHES[6:9])})
    assert ask_loadable(store, [("window", 3)]) == 9
    assert ask_loadable(store, [("window", 4)]) == 0
    assert [known({"window": {6, 7, 8}}, [("window", reach)]) for reach in (3, 4)] == [9, 0]


def test_a_store_that_does_not_know_an_engine_has_nothing_for_it() -> None:
    assert ask_loadable(FakeStore({}), []) == known({}, []) == 0


async def test_a_landing_awaits_tails_where_the_blocks_end_and_leases_all() -> None:
    store = FakeStore({"full": set(HASHES), "window": set(HASHES[6:8]), "state": {HASHES[7]}})
    groups = ("full", None), ("window", 2), ("state", 1)
    landing, leases = await ask_landed(store, *groups, span=range(5, 8))
    assert (landing.landed, landing.blocks) == (True, 8)
    assert store.waited == [("full", 3), ("window", 2), ("state", 1)]
    assert len(store.leases) == 3
    leases.release()
    leases.release()
    assert store.leases == []


async def test_a_tail_that_does_not_land_gives_back_what_was_leased() -> None:
    store = FakeStore({"full": set(HASHES), "window": set(HASHES[:7])})
    landing, leases = await ask_landed(store, ("full", None), ("window", 2), span=range(8))
    assert (landing.landed, landing.blocks, store.leases, leases.held) == (False, 0, [], [])


async def test_blocks_that_landed_in_part_count_where_no_tail_is_needed() -> None:
    store = FakeStore({"full": set(HASHES[:6])})
    landing, _ = await ask_landed(store, ("full", None), span=range(4, 8))
    assert (landing.landed, landing.blocks) == (False, 6)


async def test_a_store_that_fails_in_between_gives_back_what_was_leased() -> None:
    store = FakeStore({"full": set(HASHES), "window": set()}, failing="window")
    with pytest.raises(StoreUnavailable):
        await ask_landed(store, ("full", None), ("window", 2), span=range(8))
    assert store.leases == []

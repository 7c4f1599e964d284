"""KV events of lower tiers: host memory and storage."""

from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.router.prefix.events.test_tracker import (
    BLOCK,
    HASHES,
    IDS,
    TOKENS,
    Wire,
    make_wire,
    removed,
    stored,
)

from kvrouter.engines.engine import Identity
from kvrouter.prefix.events.confidence import Reason
from kvrouter.prefix.events.mapping import MOST_EVICTED, Naming
from kvrouter.prefix.lower import LOAD_COSTS, NOTHING, Loadable, Tier
from kvrouter_store.identity.chain import root_hash

HOST, STORAGE = LOAD_COSTS[Tier.HOST], LOAD_COSTS[Tier.STORAGE]
OTHER = [71, 72, 73, 74]  # names of another hash


@pytest.fixture
def wire() -> Wire:
    return make_wire()


def offloaded(
    ids: list[int], medium: str = "CPU", group: int | None = 0
) -> Iterator[dict[str, Any]]:
    """As vLLM publishes it by default: an event for each block, which has only its name."""
    for each in ids:
        empty = {"block_size": 0, "extra_keys": None, "kv_cache_spec_kind": None}
        yield stored([each], [], medium=medium, group_idx=group, **empty)


def test_what_left_the_own_cache_can_be_loaded_from_host_memory(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS), *offloaded(IDS))
    assert (wire.matched(), wire.loadable()) == (4, NOTHING)
    wire.send(removed(IDS[1:]))
    assert (wire.matched(), wire.loadable()) == (1, Loadable(4, 3 * HOST))
    wire.send(removed(IDS[3:], medium="CPU"))
    assert wire.loadable() == Loadable(3, 2 * HOST)
    assert wire.tracker.confidence(wire.engine) is Reason.COMPLETE


@pytest.mark.parametrize(
    ("medium", "cost"),
    [
        *(("CPU", HOST), ("CPU_PINNED", HOST), ("CPU_TIER1", HOST)),
        *(("STORAGE", STORAGE), ("DISK", STORAGE), ("EXTERNAL", STORAGE)),
    ],
)
def test_a_medium_other_than_the_device_costs_a_load(wire: Wire, medium: str, cost: float) -> None:
    wire.send(stored(IDS, TOKENS), removed(IDS), *offloaded(IDS, medium))
    assert (wire.matched(), wire.loadable()) == (0, Loadable(4, 4 * cost))


def test_a_block_that_leaves_host_memory_stays_in_storage(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS), *offloaded(IDS), *offloaded(IDS, "STORAGE"), removed(IDS))
    wire.send(removed(IDS[2:], medium="CPU"))
    assert wire.loadable() == Loadable(4, 2 * HOST + 2 * STORAGE)


def test_names_of_another_hash_are_mapped_by_those_of_the_own_cache(wire: Wire) -> None:
    wire.send(stored(OTHER, TOKENS), *offloaded(OTHER), *offloaded([99]), removed(OTHER))
    assert wire.tracker.naming(wire.engine) is Naming.MAPPED
    assert (wire.matched(), wire.loadable()) == (0, Loadable(4, 4 * HOST))
    assert wire.tracker.counts["unmapped_blocks"] == 1
    wire.send(*offloaded(OTHER[3:], "STORAGE"))  # by their names in host memory
    wire.send(removed([74, 99], medium="CPU"))
    assert wire.loadable() == Loadable(4, 3 * HOST + STORAGE)


def test_names_are_known_of_what_left_the_own_cache_while_it_was_copied() -> None:
    wire = make_wire(max_names=2 * MOST_EVICTED)
    wire.send(stored(OTHER, TOKENS), removed(OTHER), *offloaded(OTHER))
    assert wire.loadable() == Loadable(4, 4 * HOST)
    wire.send(removed(OTHER[1:], medium="CPU"))
    assert wire.loadable() == Loadable(1, HOST)
    many = [*range(1000, 1000 + MOST_EVICTED)]
    wire.send(stored(many, [9] * BLOCK * len(many)), removed(many), *offloaded(OTHER[1:]))
    assert wire.loadable() == Loadable(1, HOST)
    assert len(wire.index) == 0


def test_names_kept_of_lower_tiers_are_bounded() -> None:
    wire = make_wire(max_names=4)
    wire.send(stored(OTHER, TOKENS), *offloaded(OTHER[::-1]), stored([75], TOKENS[:BLOCK]))
    wire.send(*offloaded([75]), removed(OTHER))
    assert wire.loadable() == Loadable(3, 3 * HOST)
    wire.wait(0)
    assert wire.tracker.confidence(wire.engine) is Reason.UNNAMED  # of its own cache


def test_tokens_without_their_salt_name_no_block(wire: Wire) -> None:
    """vLLM with `self_describing_kv_events` says all of a chunk but salts and images."""
    wire.send(stored([70], [0] * BLOCK))
    wire.send(stored(OTHER, TOKENS, extra_keys=[["salt"], None, None, None]))
    wire.send(stored(OTHER, TOKENS, medium="CPU", extra_keys=None))
    assert (wire.matched(), wire.loadable()) == (0, NOTHING)


def test_a_chunk_that_lists_its_blocks_is_found(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS), removed(IDS))
    wire.send(stored(IDS[:2], TOKENS[:32], medium="CPU", extra_keys=None))
    wire.send(stored(IDS[2:], TOKENS[32:], parent=IDS[1], medium="CPU", extra_keys=None))
    assert wire.loadable() == Loadable(4, 4 * HOST)
    wire.send(removed(IDS[2:], medium="CPU"))
    assert wire.loadable() == Loadable(2, 2 * HOST)


def test_blocks_of_another_size_are_no_blocks_of_prompts(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS), removed(IDS))
    wire.send(stored(IDS, TOKENS, medium="CPU", block_size=256))
    assert wire.loadable() == NOTHING
    assert wire.tracker.counts["unmapped_blocks"] == 4


def test_groups_that_name_no_kind_are_known_by_the_own_cache(wire: Wire) -> None:
    wire.send(*offloaded(IDS, group=1))  # before: any group
    wire.send(stored(IDS, TOKENS, group_idx=2), removed(IDS, group=2))
    wire.send(*offloaded(IDS, group=1))
    assert wire.loadable() == NOTHING
    wire.send(*offloaded(IDS, group=2))
    assert wire.loadable().blocks == 4
    wire.send(removed(IDS, medium="CPU", group=1))
    assert wire.loadable().blocks == 4
    assert wire.tracker.counts["other_group"] == 9


def test_a_lower_tier_does_not_make_an_uncounted_cache_counted(wire: Wire) -> None:
    wire.send(stored(IDS, TOKENS, kv_cache_spec_kind="sliding_window"), *offloaded(IDS))
    wire.send(stored(IDS, TOKENS, medium="CPU"))
    wire.wait(0)
    assert wire.tracker.confidence(wire.engine) is Reason.UNCOUNTED
    assert wire.loadable() == NOTHING


def test_windows_in_host_memory_do_not_make_a_counted_cache_uncounted(wire: Wire) -> None:
    wire.send(stored([5], [0] * BLOCK, medium="CPU", kv_cache_spec_kind="sliding_window"))
    wire.wait(0)
    assert wire.tracker.confidence(wire.engine) is Reason.COMPLETE


def test_all_tiers_are_forgotten_with_the_cache_a_lost_message_or_the_engine(wire: Wire) -> None:
    def hold() -> None:
        wire.send(stored(IDS, TOKENS), *offloaded(IDS), removed(IDS))
        assert wire.loadable().blocks == 4

    hold()
    wire.send({"type": "AllBlocksCleared"})
    assert wire.loadable() == NOTHING
    hold()
    wire.sequence += 1
    wire.send(removed([7]))
    assert wire.tracker.confidence(wire.engine) is Reason.GAP
    assert wire.loadable() == NOTHING  # it may have been removed
    wire.wait(1.0)
    assert wire.tracker.confidence(wire.engine) is Reason.LOST
    hold()
    wire.pool.leave(wire.engine)
    wire.pool.join(wire.engine, Identity(("m",), None, BLOCK))
    assert wire.tracker.lower.match(HASHES, {}) == {}


def test_names_that_came_before_their_hash_was_known_are_dropped(wire: Wire) -> None:
    wire.send(*offloaded(IDS, group=None))
    assert wire.loadable().blocks == 4
    wire.send(stored(OTHER, TOKENS))
    assert wire.tracker.naming(wire.engine) is Naming.MAPPED
    assert wire.tracker.lower.match(HASHES, {}) == {}


def test_a_new_hash_domain_makes_what_lower_tiers_hold_void(wire: Wire) -> None:
    wire.send(stored(OTHER, TOKENS), *offloaded(OTHER), removed(OTHER))
    assert wire.loadable().blocks == 4
    wire.pool.join(wire.engine, Identity(("m",), None, BLOCK, None, root_hash("other")))
    wire.send(stored([81], TOKENS[:BLOCK]))
    assert wire.loadable() == NOTHING

"""What engines can load from their lower tiers, and what that costs."""

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.prefix.test_index import ENGINES, chain

from kvrouter.engines.engine import Engine
from kvrouter.prefix.lower import LOAD_COSTS, MOST_STARTS, Loadable, LowerTiers, Tier

HOST, STORAGE = LOAD_COSTS[Tier.HOST], LOAD_COSTS[Tier.STORAGE]
FIRST, SECOND, THIRD, FOURTH = ENGINES
PROMPT = range(1, 13)


def test_a_tier_goes_on_where_the_one_above_ends() -> None:
    tiers = LowerTiers(1000)
    host, storage = (tiers.indexes[tier] for tier in (Tier.HOST, Tier.STORAGE))
    host.stored(FIRST, range(1, 9))  # copies of all
    host.stored(SECOND, range(5, 9))  # only what its own cache evicted
    host.stored(THIRD, range(6, 9))  # there is a hole
    storage.stored(SECOND, range(9, 13))
    storage.stored(FOURTH, range(1, 3))
    found = tiers.match(chain(*PROMPT), {FIRST: 4, SECOND: 4, THIRD: 4})
    assert found == {
        FIRST: Loadable(8, 4 * HOST),
        SECOND: Loadable(12, 4 * HOST + 4 * STORAGE),
        FOURTH: Loadable(2, 2 * STORAGE),
    }


def test_an_engine_whose_own_cache_holds_all_loads_nothing() -> None:
    tiers = LowerTiers(1000)
    tiers.indexes[Tier.HOST].stored(FIRST, PROMPT)
    assert tiers.match(chain(*PROMPT), {FIRST: 12}) == {}
    assert tiers.match(chain(*PROMPT), {FIRST: 11}) == {FIRST: Loadable(12, HOST)}


@given(
    own=st.dictionaries(st.sampled_from(ENGINES), st.integers(1, 12)),
    host=st.dictionaries(st.sampled_from(ENGINES), st.sets(st.sampled_from(PROMPT))),
    storage=st.dictionaries(st.sampled_from(ENGINES), st.sets(st.sampled_from(PROMPT))),
)
def test_each_engine_can_load_what_its_tiers_hold_one_after_the_other(
    own: dict[Engine, int], host: dict[Engine, set[int]], storage: dict[Engine, set[int]]
) -> None:
    tiers = LowerTiers(1000)
    for tier, held in ((Tier.HOST, host), (Tier.STORAGE, storage)):
        for engine, blocks in held.items():
            tiers.indexes[tier].stored(engine, blocks)
    found = tiers.match(chain(*PROMPT), own)
    assert len(ENGINES) <= MOST_STARTS
    for engine in ENGINES:
        reach, cost = own.get(engine, 0), 0.0
        for tier, held in ((Tier.HOST, host), (Tier.STORAGE, storage)):
            while reach + 1 in held.get(engine, ()):
                reach, cost = reach + 1, cost + LOAD_COSTS[tier]
        loads = found.get(engine, Loadable(own.get(engine, 0), 0.0))
        assert (loads.blocks, round(loads.cost, 6)) == (reach, round(cost, 6))

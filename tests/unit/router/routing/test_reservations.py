"""Where the legs of one prompt count as load, from the plan to the end of each leg."""

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.conftest import Clock, joined

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.prefix.in_flight import InFlightPrefixes
from kvrouter.routing.plan import LegReservations
from kvrouter_store.identity.chain import hash_tokens, root_hash

LEGS = (Role.PREFILL, Role.DECODE)
STEPS = st.tuples(
    st.sampled_from(["plan", "begin", "leave"]),
    st.sampled_from(LEGS),
    st.integers(0, 2),
    st.integers(0, 100),
)
HASHES = hash_tokens(list(range(160)), 16, root=root_hash(None)).data


class Setting:
    """A pool of three engines, and the places of one prompt on them."""

    def __init__(self) -> None:
        self.pool = EnginePool(Clock())
        self.expected = InFlightPrefixes(lambda: 5000)
        self.engines = [joined(self.pool, f"e:{port}", Role.BOTH) for port in (1, 2, 3)]
        self.places = LegReservations(self.pool, self.expected, HASHES)

    @property
    def loads(self) -> list[tuple[int, int]]:
        return [(engine.requests, engine.tokens) for engine in self.engines]

    @property
    def holders(self) -> set[Engine]:
        return set(self.expected.match(HASHES))


def test_a_leg_counts_from_its_plan_on_and_is_in_flight_from_its_begin_on() -> None:
    here = Setting()
    here.places.plan(Role.DECODE, here.engines[0], 70)
    assert here.loads == [(0, 70), (0, 0), (0, 0)]
    assert here.holders == {here.engines[0]}
    here.places.begin(Role.DECODE, here.engines[0], 70)
    assert here.loads == [(1, 70), (0, 0), (0, 0)]
    here.places.end(Role.DECODE)
    assert here.loads == [(0, 0), (0, 0), (0, 0)]
    assert here.holders == set()


def test_a_leg_that_goes_elsewhere_takes_its_load_along() -> None:
    here = Setting()
    here.places.plan(Role.DECODE, here.engines[0], 70)
    here.places.begin(Role.DECODE, here.engines[1], 70)
    assert here.loads == [(0, 0), (1, 70), (0, 0)]
    assert here.holders == {here.engines[1]}
    here.places.release()
    assert here.loads == [(0, 0), (0, 0), (0, 0)]


def test_a_prompt_whose_hashes_are_unknown_is_expected_nowhere() -> None:
    here = Setting()
    places = LegReservations(here.pool, here.expected, None)
    places.plan(Role.DECODE, here.engines[0], 70)
    assert here.holders == set()
    places.release()


@given(steps=st.lists(STEPS, max_size=12))
def test_each_leg_counts_at_most_once_and_nothing_is_left(
    steps: list[tuple[str, Role, int, int]],
) -> None:
    here = Setting()
    planned: dict[Role, tuple[Engine, int, bool]] = {}
    for what, leg, which, tokens in steps:
        engine, before = here.engines[which], planned.pop(leg, None)
        if what == "leave":
            here.places.end(leg)
        else:
            (here.places.begin if what == "begin" else here.places.plan)(leg, engine, tokens)
            same = before is not None and before[:2] == (engine, tokens)
            begun = what == "begin" or (same and before is not None and before[2])
            planned[leg] = (engine, tokens, begun)
        for each in here.engines:
            mine = [place for place in planned.values() if place[0] is each]
            assert each.tokens == sum(place[1] for place in mine)
            assert each.requests == sum(place[2] for place in mine)
        assert here.holders == {place[0] for place in planned.values()}
    here.places.release()
    here.places.release()
    assert here.loads == [(0, 0)] * 3
    assert len(here.expected) == 0

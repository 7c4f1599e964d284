from tests.unit.router.conftest import Clock, joined

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.membership.discovery.base import both_roles
from kvrouter.membership.fleet import Fleet


class Watched:
    """Stands for the prober: the watched engines."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []

    def watch(self, engine: Engine) -> None:
        self.engines.append(engine)

    def forget(self, engine: Engine) -> None:
        if engine in self.engines:
            self.engines.remove(engine)


def fleet(clock: Clock) -> tuple[EnginePool, Fleet, Watched]:
    pool, watched = EnginePool(clock), Watched()
    return pool, Fleet(pool, watched), watched  # type: ignore[arg-type]


def test_an_engine_that_drains_gets_no_new_legs_and_goes_with_its_last(clock: Clock) -> None:
    pool, changes, _ = fleet(clock)
    one, other = joined(pool, "a:1", Role.DECODE), joined(pool, "b:1", Role.DECODE)
    tickets = [pool.reserve(one, 5), pool.reserve(one, 5)]
    assert not changes.remove(one)
    assert list(pool.engines(Role.DECODE)) == [other]
    tickets[0].release()
    assert pool.find("a:1") is one
    tickets[1].release()
    assert pool.find("a:1") is None
    assert one.identity is None


def test_an_engine_without_legs_goes_at_once_and_is_watched_no_longer(clock: Clock) -> None:
    pool, changes, watched = fleet(clock)
    engine = changes.add("a:1", Role.PREFILL)
    assert watched.engines == [engine]
    assert changes.remove(engine)
    assert watched.engines == []
    assert pool.all() == ()


def test_an_engine_that_is_named_again_while_it_drains_stays(clock: Clock) -> None:
    pool, changes, _ = fleet(clock)
    engine = joined(pool, "a:1", Role.DECODE)
    ticket = pool.reserve(engine, 1)
    changes.remove(engine)
    assert changes.add("a:1", Role.DECODE) is engine
    ticket.release()
    assert list(pool.engines(Role.DECODE)) == [engine]


def test_an_engine_that_comes_again_after_it_went_is_a_new_one(clock: Clock) -> None:
    pool, changes, _ = fleet(clock)
    engine = joined(pool, "a:1", Role.DECODE)
    changes.remove(engine)
    again = changes.add("a:1", Role.DECODE)
    assert again is not engine
    assert list(pool.engines(Role.DECODE)) == []
    pool.join(again, Identity(("m",)))
    assert list(pool.engines(Role.DECODE)) == [again]


def test_a_new_list_adds_drains_and_changes_roles(clock: Clock) -> None:
    pool, changes, _ = fleet(clock)
    before = {"a:1": Role.PREFILL, "b:1": Role.DECODE, "c:1": Role.DECODE}
    for address, role in before.items():
        joined(pool, address, role)
    added = changes.add("x:1", Role.DECODE)
    changes.follow(before, {"a:1": Role.BOTH, "c:1": Role.DECODE, "d:1": Role.DECODE})
    roles = {e.address: e.role for e in pool.all()}
    assert roles == {
        "a:1": Role.BOTH,
        "c:1": Role.DECODE,
        "d:1": Role.DECODE,
        added.address: Role.DECODE,
    }
    assert {e.address for e in pool.engines(Role.DECODE)} == {"a:1", "c:1"}


def test_the_same_list_again_brings_back_what_was_removed_otherwise(clock: Clock) -> None:
    pool, changes, _ = fleet(clock)
    before = {"a:1": Role.DECODE}
    changes.remove(joined(pool, "a:1", Role.DECODE))
    changes.follow(before, before)
    assert pool.find("a:1") is not None


def test_the_domain_is_that_of_engines_that_stay(clock: Clock) -> None:
    pool, changes, _ = fleet(clock)
    small = joined(pool, "a:1", Role.DECODE, block_tokens=16)
    ticket = pool.reserve(small, 1)
    joined(pool, "b:1", Role.DECODE, block_tokens=32)
    changes.remove(small)
    domain = pool.domain("m")
    assert domain is not None
    assert domain.block_tokens == 32
    ticket.release()


def test_an_engine_that_gets_a_label_is_the_same_engine(clock: Clock) -> None:
    pool, changes, watched = fleet(clock)
    changes.follow({}, {"a:1": Role.DECODE})
    engine = watched.engines[0]
    changes.follow({"a:1": Role.DECODE}, {"rack1-a=a:1": Role.DECODE})
    assert (pool.all(), engine.draining) == ((engine,), False)
    assert (engine.label, engine.address, engine.url) == ("rack1-a", "a:1", "http://a:1")
    changes.follow({"rack1-a=a:1": Role.DECODE}, {"a:1": Role.DECODE})
    assert (pool.all(), engine.label) == ((engine,), "")


def test_an_engine_of_two_sources_has_both_roles_and_the_label_of_either() -> None:
    named = [("a:1", Role.PREFILL), ("rack1-a=a:1", Role.DECODE), ("a:1", Role.DECODE)]
    assert both_roles(named) == {"rack1-a=a:1": Role.BOTH}
    assert both_roles(reversed(named)) == {"rack1-a=a:1": Role.BOTH}

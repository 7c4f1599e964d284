"""What several sources name together, and what the fleet does with it."""

import asyncio
import logging

import pytest
from tests.unit.router.conftest import joined

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.membership.discovery.base import MAX_MEMBERS
from kvrouter.membership.discovery.follow import MAX_NODES, Discovery, FlagsSource, MergedSources
from kvrouter.membership.fleet import MAX_ENGINES, Fleet, FleetFull

A, B, C = "a:1", "b:1", "c:1"


class Watched:
    """Stands for the prober."""

    def watch(self, engine: Engine) -> None:
        del engine

    forget = watch


def merged() -> tuple[EnginePool, Fleet, MergedSources]:
    pool = EnginePool()
    fleet = Fleet(pool, Watched())  # type: ignore[arg-type]
    return pool, fleet, MergedSources(fleet, lambda urls: None)


def roles(pool: EnginePool) -> dict[str, Role]:
    return {e.address: e.role for e in pool.all() if not e.draining}


def test_an_engine_stays_while_any_source_names_it() -> None:
    pool, _, members = merged()
    one, other = members.add("one"), members.add("other")
    one.named({A: Role.DECODE, B: Role.DECODE})
    other.named({B: Role.DECODE, C: Role.PREFILL})
    one.named({})
    assert roles(pool) == {B: Role.DECODE, C: Role.PREFILL}
    other.named({})
    assert roles(pool) == {}


def test_one_engine_in_two_roles_takes_both_legs() -> None:
    pool, _, members = merged()
    one, other = members.add("one"), members.add("other")
    one.named({A: Role.DECODE})
    other.named({A: Role.PREFILL})
    assert roles(pool) == {A: Role.BOTH}
    one.named({})
    assert roles(pool) == {A: Role.PREFILL}


def test_nodes_of_the_store_go_to_those_who_ask_them_and_not_into_the_pool() -> None:
    pool = EnginePool()
    followed: list[list[str]] = []
    members = MergedSources(Fleet(pool, Watched()), followed.append)  # type: ignore[arg-type]
    one, other = members.add("one"), members.add("other")
    one.named({A: Role.DECODE, "kv://n:1": Role.STORE})
    other.named({"kv://n:1": Role.STORE, "kv://n:2": Role.STORE})
    other.named({"kv://n:1": Role.STORE, "kv://n:2": Role.STORE, B: Role.DECODE}, restore=True)
    one.named({A: Role.DECODE})
    other.named({})
    assert followed == [["kv://n:1"], ["kv://n:1", "kv://n:2"], []]
    assert roles(pool) == {A: Role.DECODE}


def test_a_source_that_cannot_be_read_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pool, _, members = merged()
    status = members.add("dns://x")
    assert not status.up
    status.named({A: Role.DECODE})
    assert status.up
    for _ in range(3):
        status.failed("no answer")
    assert not status.up
    assert roles(pool) == {A: Role.DECODE}
    status.named({A: Role.DECODE})
    assert status.up
    told = [r.getMessage() for r in caplog.records if "discovery" in r.getMessage()]
    assert told == [
        "discovery dns://x names 1 members",
        "discovery dns://x cannot be read, its 1 members stay: no answer",
        "discovery dns://x names 1 members",
    ]


def test_a_source_that_names_too_many_changes_nothing() -> None:
    pool, _, members = merged()
    status = members.add("file:x")
    status.named({A: Role.DECODE})
    status.named({f"a:{n}": Role.DECODE for n in range(1, MAX_MEMBERS + 2)})
    assert (status.up, roles(pool)) == (False, {A: Role.DECODE})


def many(count: int, host: str) -> dict[str, Role]:
    return {f"{host}:{port}": Role.DECODE for port in range(1, count + 1)}


def test_sources_that_name_too_many_together_get_what_fits_and_the_rest_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool, fleet, members = merged()
    one, other = members.add("one"), members.add("other")
    one.named(many(MAX_ENGINES - 1, "a"))
    other.named(many(3, "b"))
    with pytest.raises(FleetFull):
        fleet.add(C, Role.DECODE)
    assert fleet.add(A, Role.PREFILL).role is Role.PREFILL  # it is known
    assert (len(roles(pool)), fleet.refused) == (MAX_ENGINES, 3)
    told = [r.getMessage() for r in caplog.records if "not added" in r.getMessage()]
    assert len(told) == 1
    assert f"there are {MAX_ENGINES}, which is the most" in told[0]
    one.named(many(1, "a"))
    assert roles(pool) == {A: Role.PREFILL, **many(3, "b")}


def test_of_too_many_store_nodes_the_first_are_used() -> None:
    followed: list[list[str]] = []
    members = MergedSources(Fleet(EnginePool(), Watched()), followed.append)  # type: ignore[arg-type]
    one, other = members.add("one"), members.add("other")
    one.named({f"kv://n:{port}": Role.STORE for port in range(1, MAX_NODES + 1)})
    other.named({"kv://m:1": Role.STORE})
    other.named({"kv://m:1": Role.STORE, "kv://m:2": Role.STORE})
    assert [len(each) for each in followed] == [MAX_NODES]
    one.named({})
    assert followed[1:] == [["kv://m:1", "kv://m:2"]]


def test_what_an_operator_did_stays_until_the_source_changes() -> None:
    pool, fleet, members = merged()
    status = members.add("redis")
    status.named({A: Role.DECODE, B: Role.DECODE})
    fleet.add(C, Role.DECODE)
    removed = pool.find(A)
    assert removed is not None
    fleet.remove(removed)
    status.named({A: Role.DECODE})  # B has gone: nothing changes for the others
    assert roles(pool) == {C: Role.DECODE}
    status.named({})
    status.named({A: Role.DECODE})
    assert roles(pool) == {A: Role.DECODE, C: Role.DECODE}


def test_flags_read_again_bring_back_what_was_removed() -> None:
    pool, fleet, members = merged()
    flags = members.add("flags")
    flags.named({A: Role.DECODE})
    members.add("file:x").named({B: Role.DECODE})
    for address in (A, B):
        engine = pool.find(address)
        assert engine is not None
        fleet.remove(engine)
    flags.named({A: Role.DECODE}, restore=True)
    assert roles(pool) == {A: Role.DECODE}


def test_an_engine_that_no_source_names_any_more_ends_its_legs() -> None:
    pool, _, members = merged()
    status = members.add("redis")
    engine = joined(pool, A, Role.DECODE)
    status.named({A: Role.DECODE})
    ticket = pool.reserve(engine, 1)
    status.named({})
    assert engine.draining
    assert pool.all() == (engine,)
    status.named({A: Role.DECODE})  # and named again in time it stays
    ticket.release()
    assert list(pool.engines(Role.DECODE)) == [engine]


class Odd:
    """Fails once unexpectedly, then names one engine."""

    name = "odd"

    def __init__(self) -> None:
        self.runs = 0
        self.runs_again = asyncio.Event()

    async def follow(self, listener: object) -> None:
        self.runs += 1
        if self.runs == 1:
            raise RuntimeError("unforeseen")
        listener.named({A: Role.DECODE})  # type: ignore[attr-defined]
        self.runs_again.set()
        await asyncio.Event().wait()


async def test_a_source_that_fails_unexpectedly_is_followed_again_and_harms_no_other() -> None:
    pool, fleet, _ = merged()
    odd = Odd()
    discovery = Discovery(fleet, [odd, FlagsSource({B: Role.DECODE})], restart_s=0.01)
    await discovery.start()
    async with asyncio.timeout(20):
        await odd.runs_again.wait()
    assert roles(pool) == {A: Role.DECODE, B: Role.DECODE}
    rows = {
        reading.name: {tuple(s.labels.values()): s.value for s in reading.family().samples}
        for reading in discovery.readings()
    }
    assert rows == {
        "kvrouter:discovery_up": {("odd",): 1.0, ("flags",): 1.0},
        "kvrouter:discovery_engines": {("odd",): 1.0, ("flags",): 1.0},
        "kvrouter:engines_refused": {(): 0.0},
    }
    await discovery.close()
    await discovery.close()
    assert len(asyncio.all_tasks()) == 1


async def test_a_source_without_a_report_does_not_delay_the_start() -> None:
    class Mute:
        name = "mute"

        async def follow(self, listener: object) -> None:
            await asyncio.Event().wait()

    _, fleet, _ = merged()
    discovery = Discovery(fleet, [Mute()], first_report_s=0.05)
    async with asyncio.timeout(20):
        await discovery.start()
    assert not discovery.merged.statuses[0].up
    await discovery.close()


def test_an_engine_that_changes_to_https_is_named_by_its_source_all_the_same() -> None:
    pool, _, members = merged()
    source = members.add("file")
    source.named({A: Role.DECODE})
    plain = pool.find(A)
    source.named({f"https://{A}": Role.DECODE})
    secure = pool.find(A)
    assert secure is not None
    assert secure is not plain
    assert (secure.address, secure.url) == (A, f"https://{A}")
    assert roles(pool) == {A: Role.DECODE}

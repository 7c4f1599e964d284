"""The watch over engines, by a clock that the tests turn."""

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.fakes.patience import until
from tests.unit.router.conftest import Clock, joined

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families import Families
from kvrouter.engines.life import LifeLimits, Lives
from kvrouter.engines.pool import EnginePool
from kvrouter.http.client.pool import ConnectionPool
from kvrouter.http.deadlines import DeadlineTimer
from kvrouter.membership.life_watch import LifeWatch, tokens_counted
from kvrouter.membership.probe_client import ProbeClient


class Place:
    """One engine with a leg, and its watch."""

    def __init__(self, clock: Clock, address: str = "127.0.0.1:1") -> None:
        self.clock = clock
        self.pool = EnginePool(clock)
        self.engine = joined(self.pool, address, Role.BOTH)
        self.opened: dict[Engine, ConnectionPool] = {}
        self.event_s: float | None = None
        self.watch = LifeWatch(
            pool=self.pool,
            lives=Lives(clock, LifeLimits()),
            client=ProbeClient(),
            families=Families(),
            connections=self._connections,
            events_s=lambda _: self.event_s,
        )
        self.pulse = self.watch.lives.pulse(self.engine)

    def _connections(self, target: Engine) -> ConnectionPool:
        timer = DeadlineTimer(asyncio.get_running_loop(), 1)
        return self.opened.setdefault(target, ConnectionPool(target.host, target.port, timer))

    def pass_s(self, seconds: float) -> None:
        self.pulse.missed += 1
        self.clock.pass_s(seconds)
        self.watch.tick()


@pytest_asyncio.fixture
async def place(clock: Clock) -> AsyncIterator[Place]:
    here = Place(clock)
    yield here
    await here.watch.close()
    await here.watch.client.close()


async def test_kv_events_are_life_though_no_check_is_answered(place: Place) -> None:
    place.pool.reserve(place.engine, 1)
    for _ in range(10):
        place.event_s = place.clock()
        place.pass_s(5)
    assert place.engine.identity is not None
    place.pass_s(5)
    assert place.engine.identity is None


@pytest.mark.parametrize(("prefill", "seconds"), [(False, 10), (True, 20)])
async def test_a_silent_engine_leaves_and_then_its_legs_end(
    place: Place, seconds: int, *, prefill: bool
) -> None:
    ticket = place.pool.reserve(place.engine, 1, prefill=prefill)
    assert place.engine.prefills == prefill
    place.pass_s(5)
    place.pass_s(seconds - 5.5)
    assert place.engine.identity is not None
    place.pass_s(0.5)
    assert place.pool.all()[0].identity is None
    assert place.engine.left_for == "silent"
    assert not place.opened[place.engine].cut_off
    place.pass_s(1)
    assert "no sign of life" in place.opened[place.engine].cut_off
    ticket.release()
    assert place.engine.prefills == 0


async def test_an_engine_that_froze_behind_a_check_is_gone_in_time_all_the_same(
    clock: Clock,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        here = Place(clock, f"127.0.0.1:{mute.getsockname()[1]}")
        here.watch.client.timeout_s = 0.05
        here.pool.reserve(here.engine, 1)
        clock.pass_s(5.9)
        here.watch.tick()
        for looks in (1, 2):
            clock.pass_s(2)
            here.watch.tick()
            await until(lambda looks=looks: here.pulse.unread == looks)
            await asyncio.sleep(0)  # until the watch has forgotten that look: it ends just now
        assert here.engine.identity is not None
        clock.pass_s(0.1)
        here.watch.tick()
        assert here.engine.left_for == "silent"
        assert here.pulse.missed == 0
        await here.watch.close()
        await here.watch.client.close()


async def test_legs_end_on_an_engine_that_had_left_before_it_fell_silent(place: Place) -> None:
    place.pool.reserve(place.engine, 1)
    place.pool.leave(place.engine, "check")
    for _ in range(3):
        place.pass_s(5)
    assert place.engine.left_for == "check"
    assert place.opened[place.engine].cut_off


async def test_an_engine_without_legs_leaves_without_ado(place: Place) -> None:
    for _ in range(3):
        place.pass_s(5)
    assert place.engine.identity is None


async def test_all_ranks_are_cut_off_together(place: Place) -> None:
    place.engine.set_ranks((0, 1))
    place.pool.reserve(place.engine.ranks[1], 1)
    for _ in range(4):
        place.pass_s(5)
    assert all(place.opened[rank].cut_off for rank in place.engine.ranks)


def page(*lines: str) -> bytes:
    return "\n".join(("# HELP vllm:prompt_tokens_total Tokens.", *lines, "")).encode()


@pytest.mark.parametrize(
    ("lines", "tokens"),
    [
        ((), None),
        (("vllm:num_requests_running 3.0", "python_gc_objects_collected_total 7.0"), None),
        (("http_requests_total 9.0", 'vllm:generation_tokens_created{engine="0"} 1.7e+09'), None),
        (('vllm:generation_tokens_total{engine="0",model_name="m{1}"} 1.5e+06',), 1.5e6),
        (("vllm:prompt_tokens_total 5.0", "vllm:generation_tokens_total 7.0"), 12.0),
        (('sglang:realtime_tokens_total{mode="decode",tp_rank="0"} 90',), 90.0),
    ],
)
def test_counters_of_tokens_are_read_by_the_names_of_each_family(
    lines: tuple[str, ...], tokens: float | None
) -> None:
    assert tokens_counted(page(*lines), joined(EnginePool(), "127.0.0.1:1", Role.BOTH)) == tokens


@pytest.mark.parametrize("label", ["engine", "dp_rank"])
def test_each_rank_has_its_own_counters(label: str) -> None:
    server = joined(EnginePool(), "127.0.0.1:1", Role.BOTH)
    server.set_ranks((0, 1))
    lines = [f'vllm:generation_tokens_total{{{label}="{rank}"}} {rank + 5}' for rank in (0, 1)]
    assert [tokens_counted(page(*lines), rank) for rank in server.ranks] == [5, 6]
    assert tokens_counted(page(*lines), server) == 11

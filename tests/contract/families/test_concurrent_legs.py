"""Concurrent legs: SGLang's rooms and MooncakeConnector's transfers."""

import asyncio
import json
from typing import Any, cast

import pytest
from tests.contract.families.conftest import Open, ids, text
from tests.fakes.patience import until
from tests.fakes.pd import Network, PdEngine
from tests.fakes.pd_sglang import SglangEngine

from kvrouter.engines.engine import Bootstrap, Engine, Identity, Role
from kvrouter.engines.families.sglang import ROOM_BITS, Rooms, Sglang
from kvrouter.http.failure import Failure
from kvrouter.serving.legs.early import both
from kvrouter.serving.legs.failures import LegFailed
from kvrouter.serving.request.context import RequestContext, Timing


async def test_both_legs_say_the_same_but_for_the_stream(open_site: Open) -> None:
    here = await open_site("sglang")
    asked = text(
        stream=True, stream_options={"include_usage": True}, seed=3, min_tokens=2, stop="x"
    )
    await here.same(asked)
    (first,), (second,) = here.prefill[0].requests, here.decode[0].requests
    room = {key: second.pop(key) for key in ("bootstrap_host", "bootstrap_port", "bootstrap_room")}
    assert second == asked
    assert {key: first.pop(key) for key in room} == room
    assert first == {key: asked[key] for key in asked if key != "stream_options"} | {
        "stream": False
    }


async def test_no_two_attempts_meet_in_one_room(open_site: Open) -> None:
    here = await open_site("sglang", 2, 2)
    here.decode[0].mode = "500"
    await asyncio.gather(*(here.same(ids(300 + i)) for i in range(8)))
    rooms = [body["bootstrap_room"] for engine in here.prefill for body in engine.requests]
    assert len(rooms) == len(set(rooms)) > 8


@pytest.mark.parametrize("attempts", [1, 2])
async def test_as_many_pairs_are_asked_as_the_settings_say(open_site: Open, attempts: int) -> None:
    here = await open_site("sglang", 3, 3, retry_max_attempts=attempts)
    for engine in here.decode:
        engine.mode = "drop"
    assert (await here.post(ids(300)))[0] == 503
    assert sum(len(engine.requests) for engine in here.decode) == attempts


def test_rooms_do_not_repeat_and_fit_in_63_bits() -> None:
    rooms = Rooms()
    taken = [rooms.take() for _ in range(10_000)]
    assert len(set(taken)) == len(taken)
    assert all(0 < room < 2**ROOM_BITS for room in taken)
    assert len({room % 8 for room in taken}) == 8


@pytest.mark.parametrize(
    ("address", "host"),
    [("10.0.0.1:30000", "10.0.0.1"), ("[fd00::1]:30000", "[fd00::1]"), ("p-0:1", "p-0")],
)
def test_a_bootstrap_host_is_the_engines_own(address: str, host: str) -> None:
    engine = Engine(address, Role.PREFILL, "sglang")
    engine.identity = Identity(("m",), bootstrap=Bootstrap(engine.host, 8998))
    met = Sglang().new_rendezvous(engine)
    assert json.loads(met.decode["bootstrap_host"]) == host
    assert met.decode["bootstrap_port"] == b"8998"


async def test_without_prefill_engines_disaggregated_sglang_has_the_client_wait(
    open_site: Open,
) -> None:
    here = await open_site("sglang")
    await here.prefill[0].stop()
    for _ in range(2):
        status, raw = await here.post(ids())
        error = json.loads(raw)["error"]
        assert (status, error["code"]) == (503, 503)
        assert error["message"].startswith("No prefill engine ")


async def test_a_pair_is_waited_for_where_its_engines_come_again(open_site: Open) -> None:
    here = await open_site("sglang", engine_wait_s=10)
    prefill = here.prefill[0]
    await prefill.stop()
    task = asyncio.create_task(here.same(ids()))
    await until(lambda: here.app.core.engine_wait.waiting == 1)
    await prefill.start()
    await task


async def test_logprobs_of_the_prompt_are_refused_where_decode_has_not_computed_it(
    open_site: Open,
) -> None:
    here = await open_site("sglang")
    status, raw = await here.post(text(echo=True, logprobs=2))
    assert (status, json.loads(raw)["error"]["param"]) == (400, "echo")


async def test_sglang_that_is_not_disaggregated_is_asked_alone(open_site: Open) -> None:
    def whole(engines: list[PdEngine]) -> None:
        for engine in engines:
            engine.role = "both"

    here = await open_site("sglang", 0, 2, prepare=whole)
    for first in range(3):
        await here.same(ids(300 + first))


def begun(first_s: float) -> RequestContext:
    """A request whose answer has begun then, or not (0)."""
    context = RequestContext(cast("Any", None), "id", b"", Timing(0.0))
    context.timing.first_s = first_s
    return context


async def ends(error: Exception | None, after: asyncio.Event | None = None) -> None:
    if after is not None:
        await after.wait()
    if error is not None:
        raise error


async def test_a_prefill_leg_that_fails_ends_the_other_only_before_its_answer_has_begun() -> None:
    engine = Engine("p:1", Role.PREFILL)
    broken = LegFailed(engine, Failure.BROKEN, "it is gone")
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, later.set)
    await both(begun(1.0), ends(broken), ends(None, later))
    with pytest.raises(LegFailed):
        await both(begun(0.0), ends(broken), ends(None, asyncio.Event()))


async def test_a_leg_whose_other_one_fails_is_withdrawn() -> None:
    broken = LegFailed(Engine("d:1", Role.DECODE), Failure.BROKEN, "it is gone")
    withdrawn = asyncio.Event()

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            withdrawn.set()

    with pytest.raises(LegFailed):
        await both(begun(0.0), waiting(), ends(broken))
    assert withdrawn.is_set()


async def test_a_fake_knows_a_room_that_is_used_twice() -> None:
    engine = SglangEngine(Network(), "prefill")
    engine.rooms[7] = None  # type: ignore[assignment]
    with pytest.raises(Exception, match="Duplicate"):
        await engine.kv({"bootstrap_room": 7}, None)  # type: ignore[arg-type]
    assert engine.violations

"""Simulated engines that offload blocks to host memory, and a router that follows them there."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from tests.fakes.patience import until
from tests.tools.sim.conftest import LiveSim
from tests.tools.sim.test_kv_events import BOUND

from kvrouter.app.build import build
from kvrouter.app.settings import RouterSettings
from kvrouter.prefix.lower import LowerTiers, Tier
from kvrouter.tools.sim.block_cache import Event, Removed, Stored
from kvrouter.tools.sim.engine import SimEngine
from kvrouter.tools.sim.kv_bytes import Oracle
from kvrouter.tools.sim.settings import SimSettings

Start = Callable[..., LiveSim]
BLOCK, OWN_BLOCKS, SESSIONS, TURNS, FIRST_BLOCKS = 16, 32, 32, 2, 5
AT_ONCE = 2
assert SESSIONS * (FIRST_BLOCKS + TURNS - 1) == 3 * 2 * OWN_BLOCKS
"""The working set is three times what the caches of both engines hold."""


async def test_host_memory_forgets_the_ends_of_the_oldest_prompts() -> None:
    settings = SimSettings(model="tiny", block_size=16, kv_offloading_size=4 * 2**-16)
    told: list[Event] = []
    engine = SimEngine(settings, publish=told.extend)
    engine.offload([b"a1", b"a2", b"a3"])
    assert told == [Stored(None, (name,), (), medium="CPU") for name in (b"a1", b"a2", b"a3")]
    engine.offload([b"b1", b"b2"])
    assert told[3] == Removed((b"a3",), "CPU")
    assert engine.host.matched([b"a1", b"a2", b"a3"]) == 2
    engine.offload([b"b1"])
    engine.offload([b"c%d" % number for number in range(5)])  # more than there is room for
    assert len(told) == 6
    await engine.close()


def test_evicted_blocks_come_back_from_host_memory_with_the_right_bytes(live_sim: Start) -> None:
    engine = live_sim(kv_cache_size=8, kv_offloading_size=0.01, max_model_len=128)
    prompts = [list(range(start, start + 96)) for start in (1000, 2000, 3000)]
    oracle = Oracle(engine.server.settings.manifest)
    for _ in range(2):
        for prompt in prompts:
            assert engine.text(prompt) == oracle.text(prompt, 8)
    assert engine.tokens_from("external_kv_transfer") == 3 * 80
    assert engine.tokens_from("local_compute") == 3 * 96 + 3 * 16


async def turn(http: aiohttp.ClientSession, url: str, ids: list[int]) -> int:
    """Tokens of the prompt that were not computed."""
    body = {"model": "tiny", "prompt": ids, "max_tokens": 1}
    async with http.post(url, json=body) as answer:
        usage: dict[str, Any] = (await answer.json())["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def cached_share(url: str, host_blocks: Callable[[], int]) -> float:
    """Of what returning turns have in common with the turn before, how much was not computed."""
    room, draw = asyncio.Semaphore(AT_ONCE), random.Random(1)
    found: list[int] = []

    async def next_turn(http: aiohttp.ClientSession, session: int, blocks: int) -> None:
        first = 10_000 * (session + 1)
        async with room:
            found.append(await turn(http, url, list(range(first, first + blocks * BLOCK))))

    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        for blocks in range(FIRST_BLOCKS, FIRST_BLOCKS + TURNS):
            order = draw.sample(range(SESSIONS), SESSIONS)
            await asyncio.gather(*(next_turn(http, session, blocks) for session in order))
            await until(lambda known=SESSIONS * blocks: host_blocks() == known)
    common = SESSIONS * BLOCK * sum(range(FIRST_BLOCKS, FIRST_BLOCKS + TURNS - 1))
    return sum(found) / common


async def share_of(live_sim: Start) -> float:
    """The share with two engines behind a router that takes their events."""
    settings = {"kv_cache_size": OWN_BLOCKS, "kv_offloading_size": 0.01, "max_model_len": 512}
    engines = [
        await asyncio.to_thread(live_sim, kv_events_config=BOUND, **settings) for _ in range(2)
    ]
    ports = {f"127.0.0.1:{each.port}": each.server.kv_event_ports for each in engines}
    app = build(
        RouterSettings(
            decode=list(ports),
            port=0,
            kv_connector="store",
            kv_events_connect=[f"{address}={events}" for address, (events, _) in ports.items()],
            kv_events_replay=[f"{address}={replays}" for address, (_, replays) in ports.items()],
        )
    )
    assert app.core.tracker is not None
    host = app.core.tracker.lower.indexes[Tier.HOST]
    url = f"http://127.0.0.1:{await app.start()}/v1/completions"
    try:
        return await cached_share(url, lambda: len(host))
    finally:
        await app.close()


async def test_returning_turns_find_what_only_host_memory_holds(
    live_sim: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = await share_of(live_sim)
    monkeypatch.setattr(LowerTiers, "match", lambda *_: {})
    without = await share_of(live_sim)
    print(f"cached of returning turns: {share:.1%}; without lower tiers in the index {without:.1%}")
    assert share > 0.95
    assert share > without + 0.15

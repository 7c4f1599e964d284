"""A router and a simulated engine: KV events get lost, arrive twice or overtake others."""

import asyncio
from collections.abc import Callable

import aiohttp
import pytest
from tests.fakes.patience import until
from tests.tools.sim.conftest import LiveSim

from kvrouter.app.build import App, build
from kvrouter.app.settings import RouterSettings

Start = Callable[..., LiveSim]
BOUND = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:*",
    "replay_endpoint": "tcp://127.0.0.1:*",
}


async def state(app: App) -> tuple[str, int]:
    """What the router says of the engine's part of the index, and how many blocks are in it."""
    lines = app.core.metrics.page().decode().splitlines()
    (shown,) = [line for line in lines if line.startswith("kvrouter:kv_index_state{")]
    (blocks,) = [line for line in lines if line.startswith("kvrouter:kv_index_blocks ")]
    return shown.partition('state="')[2].partition('"')[0], int(float(blocks.split()[1]))


@pytest.mark.parametrize(
    "faults",
    [
        {},
        {"kv_events_lost": 40},
        {"kv_events_repeated": 60, "kv_events_late": 60},
        {"kv_events_lost": 30, "kv_events_repeated": 30, "kv_events_late": 30},
    ],
    ids=["none", "lost", "repeated and late", "all"],
)
async def test_what_is_lost_on_the_way_is_asked_for_again(
    live_sim: Start, faults: dict[str, int]
) -> None:
    engine = await asyncio.to_thread(live_sim, kv_events_config=BOUND, max_model_len=64, **faults)
    events, replays = engine.server.kv_event_ports
    address = f"127.0.0.1:{engine.port}"
    app = build(
        RouterSettings(
            decode=[address],
            port=0,
            kv_connector="store",
            kv_events_connect=[f"{address}={events}"],
            kv_events_replay=[f"{address}={replays}"],
        )
    )
    url = f"http://127.0.0.1:{await app.start()}/v1/completions"
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            for start in range(1000, 3000, 100):
                body = {"model": "tiny", "prompt": list(range(start, start + 32)), "max_tokens": 1}
                async with http.post(url, json=body) as answer:
                    assert answer.status == 200

            async def is_known() -> bool:
                confidence, blocks = await state(app)
                return confidence == "exact" and blocks >= 40

            await until(is_known, 60, look_s=0.02)
    finally:
        await app.close()

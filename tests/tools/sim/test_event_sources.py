"""A router without a flag for KV events: simulated engines tell it where they publish them."""

import asyncio
import json
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from tests.fakes.patience import until
from tests.tools.sim.conftest import LiveSim
from tests.tools.sim.test_kv_events import BOUND

from kvrouter.app.build import App, build
from kvrouter.app.settings import RouterSettings
from kvrouter.engines.engine import Engine
from kvrouter.prefix.events.confidence import Reason
from kvrouter.tools.sim.settings import SimSettings
from kvrouter_store.events.settings import KVEventsConfig
from kvrouter_store.identity.chain import HASH_BYTES, hash_tokens, root_hash

Start = Callable[..., LiveSim]
BLOCK, BLOCKS = 16, 60
PROMPTS = [[*range(100), *range(start, start + 60)] for start in range(1000, 4000, 100)]
"""With a common beginning; together more than the engine's cache holds."""


class Routed:
    """A router before one engine."""

    def __init__(self, app: App, url: str, http: aiohttp.ClientSession) -> None:
        self.app, self._url, self._http = app, url, http

    @property
    def engine(self) -> Engine:
        (engine,) = self.app.core.pool.targets()
        return engine

    @property
    def reason(self) -> Reason:
        assert self.app.core.tracker is not None
        return self.app.core.tracker.confidence(self.engine)

    async def ask(self, prompt: Sequence[int]) -> int:
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 1}
        async with self._http.post(self._url, json=body) as answer:
            return answer.status

    def knows(self, sim: LiveSim) -> bool:
        """Whether the index has exactly the blocks of each prompt that the engine holds."""
        for prompt in PROMPTS:
            chain = hash_tokens(array("I", prompt), BLOCK, root=root_hash(None)).data
            names = [chain[at : at + HASH_BYTES] for at in range(0, len(chain), HASH_BYTES)]
            held = sim.server.engine.cache.matched(names)
            if self.app.core.index.match(chain).get(self.engine, 0) != held:
                return False
        return True


@asynccontextmanager
async def routed(port: int, **settings: Any) -> AsyncIterator[Routed]:
    address = f"127.0.0.1:{port}"
    app = build(RouterSettings(decode=[address], port=0, **settings))
    url = f"http://127.0.0.1:{await app.start()}/v1/completions"
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            yield Routed(app, url, http)
    finally:
        await app.close()


def small() -> LiveSim:
    """An engine whose cache is too small for the prompts."""
    return LiveSim(
        SimSettings(
            model="tiny",
            port=0,
            seed=1,
            block_size=BLOCK,
            kv_cache_size=BLOCKS,
            kv_events_config=KVEventsConfig.model_validate(BOUND),
        )
    )


async def test_a_router_without_flags_indexes_an_engine_exactly() -> None:
    with small() as sim:
        async with routed(sim.port) as router:
            for prompt in PROMPTS:
                assert await router.ask(prompt) == 200
            await until(lambda: router.reason is Reason.COMPLETE and router.knows(sim))
            index = router.app.core.index
            held = len(index.held(router.engine)[1]) // 8
            assert 0 < held <= BLOCKS < 10 * len(PROMPTS)
        async with routed(sim.port) as late:  # it is told of the replays, too
            await until(lambda: late.reason is Reason.COMPLETE and late.knows(sim))


@pytest.mark.parametrize(
    "settings", [{"kv_events_auto": False}, {"kv_events_connect": ["1"]}], ids=["off", "by flag"]
)
async def test_flags_come_before_what_engines_tell(settings: dict[str, Any]) -> None:
    with small() as sim:
        async with routed(sim.port, **settings) as router:
            await until(lambda: router.engine.identity is not None)
            assert router.engine.event_ports is None


def test_a_simulated_engine_tells_its_sources_as_vllm_does(live_sim: Start) -> None:
    sim = live_sim(kv_events_config={**BOUND, "topic": "kv"})
    events, replays = sim.server.kv_event_ports
    status, body = sim.ask("GET", "/kv_event_sources")
    told = json.loads(body)["0"]
    assert status == 200
    assert told["endpoint"] == f"tcp://127.0.0.1:{events}"
    assert told["replay_endpoint"] == f"tcp://127.0.0.1:{replays}"
    assert told["topic"] == "kv"
    assert live_sim().ask("GET", "/kv_event_sources") == (200, b"{}")

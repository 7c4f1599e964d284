"""One router before two models with blocks of different sizes: both are routed by what is known."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest_asyncio
from tests.fakes.patience import until
from tests.fakes.store import StoreProcess
from tests.tools.sim.conftest import LiveSim

from kvrouter.app.build import App, build
from kvrouter.app.settings import RouterSettings
from kvrouter.engines.engine import Engine, Role
from kvrouter.prefix.events.mapping import Naming
from kvrouter_store.identity.chain import hash_tokens, root_hash

Start = Callable[..., LiveSim]
EVENTS = {
    "enable_kv_cache_events": True,
    "endpoint": "tcp://127.0.0.1:*",
    "replay_endpoint": "tcp://127.0.0.1:*",
}
BLOCKS = {"small": 16, "large": 64}
PROMPT = list(range(1000, 1250))
USABLE = {"small": 240, "large": 192}
"""Tokens of the prompt in whole blocks, without its last token."""


@dataclass
class Fleet:
    """A router before simulated engines, some of which are known by their model and role."""

    app: App
    url: str
    http: aiohttp.ClientSession
    sims: dict[tuple[str, str], LiveSim]

    async def ask(self, model: str, prompt: list[int] = PROMPT) -> tuple[int, int]:
        """Tokens of the prompt that the decode engine had, and that the store had beyond these."""
        counts = self.app.core.metrics.of(model)
        before = counts.hit_engine, counts.hit_store
        body = {"model": model, "prompt": prompt, "max_tokens": 2}
        async with self.http.post(f"{self.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            assert (await answer.json())["model"] == model
        return counts.hit_engine - before[0], counts.hit_store - before[1]

    def decode(self, model: str) -> Engine:
        return self.app.core.pool.engines(Role.DECODE, model)[0]

    async def until_known(self, model: str, tokens: int) -> None:
        """The router has heard that the decode engine holds so much of the prompt, and is sure."""
        hashes = hash_tokens(array("I", PROMPT), BLOCKS[model], root=root_hash(None)).data
        index, tracker, engine = self.app.core.index, self.app.core.tracker, self.decode(model)
        assert tracker is not None
        blocks = tokens // BLOCKS[model]
        await until(lambda: index.match(hashes).get(engine, 0) == blocks and tracker.trusts(engine))


Open = Callable[..., Any]


@pytest_asyncio.fixture
async def fleet(live_sim: Start, tmp_path: Path) -> AsyncIterator[Open]:
    """Opens a fleet of one prefill engine per model and `decode`: (model, block size) of each."""
    opened: list[Fleet] = []
    store = StoreProcess(tmp_path).start()

    async def sim(model: str, role: str, block_size: int) -> LiveSim:
        return await asyncio.to_thread(
            live_sim,
            model=model,
            role=role,
            block_size=block_size,
            kv_bytes_per_token=64,
            store=store.url,
            kv_events_config=EVENTS,
        )

    async def open_fleet(prefill: list[tuple[str, int]], decode: list[tuple[str, int]]) -> Fleet:
        sims = {
            role: [await sim(model, role, block) for model, block in named]
            for role, named in (("prefill", prefill), ("decode", decode))
        }
        both = [*sims["prefill"], *sims["decode"]]
        ports = {f"127.0.0.1:{each.port}": each.server.kv_event_ports for each in both}
        app = build(
            RouterSettings(
                prefill=[f"127.0.0.1:{each.port}" for each in sims["prefill"]],
                decode=[f"127.0.0.1:{each.port}" for each in sims["decode"]],
                port=0,
                store=[store.url],
                kv_events_connect=[f"{at}={events}" for at, (events, _) in ports.items()],
                kv_events_replay=[f"{at}={replays}" for at, (_, replays) in ports.items()],
            )
        )
        url = f"http://127.0.0.1:{await app.start()}"
        named = {
            (m, "prefill"): each for (m, _), each in zip(prefill, sims["prefill"], strict=True)
        }
        named |= {(m, "decode"): each for (m, _), each in zip(decode, sims["decode"], strict=True)}
        made = Fleet(app, url, aiohttp.ClientSession(), named)
        opened.append(made)
        return made

    yield open_fleet
    for each in opened:
        await each.http.close()
        await each.app.close()
    store.kill()


async def test_the_blocks_of_each_model_have_their_own_size(fleet: Open) -> None:
    both = list(BLOCKS.items())
    here: Fleet = await fleet(both, both)
    for model in BLOCKS:
        assert await here.ask(model) == (0, 0)
        await here.until_known(model, USABLE[model])
    for model in BLOCKS:
        assert await here.ask(model) == (USABLE[model], 0)
        await asyncio.to_thread(here.sims[model, "decode"].ask, "POST", "/reset_prefix_cache")
        await here.until_known(model, 0)
    for model in BLOCKS:
        assert await here.ask(model) == (0, USABLE[model])
    assert here.app.core.tracker is not None
    counts, metrics = here.app.core.tracker.counts, here.app.core.metrics
    assert (counts["foreign_names"], counts["unmapped_blocks"]) == (0, 0)
    assert dict(metrics.landings) == {"landed": 2.0}
    assert list(here.app.members.compatibility.incompatible()) == []


async def test_engines_of_one_model_with_other_blocks_than_most_are_not_taken_at_their_word(
    fleet: Open,
) -> None:
    here: Fleet = await fleet([("m", 64)], [("m", 64), ("m", 16), ("m", 16)])
    tracker, metrics = here.app.core.tracker, here.app.core.metrics
    assert tracker is not None
    odd, *usual = here.app.core.pool.engines(Role.DECODE, "m")
    async with asyncio.timeout(20):
        for first in count(1000, 300):
            await here.ask("m", list(range(first, first + 250)))
            namings = [tracker.naming(engine) for engine in (odd, *usual)]
            if namings == [Naming.FOREIGN, Naming.EXACT, Naming.EXACT]:
                break
    assert metrics.landings.keys() == {"landed"}
    assert tracker.counts["foreign_names"] == 2  # of the prefill engine too

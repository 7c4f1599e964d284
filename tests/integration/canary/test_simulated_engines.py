"""The canary before simulated engines that move and check real KV bytes through a real store.

What is right is worked out by the oracle, which knows no engine, store or router.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
from tests.fakes.canary import canary_outcomes
from tests.fakes.patience import until
from tests.tools.doctor.conftest import BLOCK_TOKENS, Rig

from kvrouter.app.build import App, build
from kvrouter.app.settings import RouterSettings
from kvrouter.tools.sim.kv_bytes import Oracle

ANSWER_TOKENS = 6
AT_A_TIME = 20
PATIENCE_S = 100.0


class Site:
    """A router with a canary, its engines and a client."""

    def __init__(self, rig: Rig, app: App, port: int, http: aiohttp.ClientSession) -> None:
        self.app = app
        self._rig = rig
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._http = http
        self._random = Random(7)
        manifest = rig.engines["decode"].server.engine.manifest
        self._oracle = Oracle(manifest)

    async def ask(self, **more: Any) -> bool:
        """Whether the answer to a new prompt of three blocks is right."""
        prompt = [self._random.randrange(3, 250) for _ in range(3 * BLOCK_TOKENS + 5)]
        body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, **more}
        async with self._http.post(self._url, data=json.dumps(body)) as answer:
            assert answer.status == 200, await answer.text()
            text = streamed(await answer.read()) if more.get("stream") else await whole(answer)
        return text == self._oracle.text(prompt, ANSWER_TOKENS)

    async def outcomes(self, judged: int) -> Counter[str]:
        """How that many samples ended, once they all have."""
        await until(lambda: sum(canary_outcomes(self.app).values()) >= judged, PATIENCE_S)
        return canary_outcomes(self.app)


@asynccontextmanager
async def site(tmp_path: Path, decode: dict[str, Any], **settings: Any) -> AsyncIterator[Site]:
    """A store, a prefill engine, a decode engine with these settings, and a router before them."""
    rig = Rig(tmp_path, decode=decode)
    try:
        rig.start()
        given = {"canary_sample_rate": 1, "canary_below_requests": 100, **settings}
        app = build(RouterSettings(**rig.router, port=0, **given))
        port = await app.start()
        try:
            async with aiohttp.ClientSession() as http:
                yield Site(rig, app, port, http)
        finally:
            await app.close()
        assert all(e.requests == 0 and e.tokens == 0 for e in app.core.pool.all())
    finally:
        rig.close()


async def whole(answer: aiohttp.ClientResponse) -> str:
    return str((await answer.json())["choices"][0]["text"])


def streamed(body: bytes) -> str:
    events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
    assert not any("token_ids" in choice for event in events for choice in event["choices"])
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def test_wrong_kv_after_a_load_is_an_alarm_for_each_wrong_answer(
    tmp_path: Path, caplog: Any
) -> None:
    """A transport that spoils every fourth load, into an engine that does not look."""
    bad = {"verify_kv": False, "kv_corruption_rate": 25}
    async with site(tmp_path, bad) as here:
        right = [await here.ask(stream=number % 2 == 0) for number in range(40)]
        outcomes = await here.outcomes(40)
    wrong = right.count(False)
    assert wrong > 0
    assert outcomes == {"equal": 40 - wrong, "diverged": wrong}
    alarms = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(alarms) == wrong
    assert "was sent" in alarms[0].getMessage()
    assert "was computed alone" in alarms[0].getMessage()


async def test_the_canary_is_quiet_for_a_thousand_right_answers(tmp_path: Path) -> None:
    async with site(tmp_path, {}) as here:
        for first in range(0, 1000, AT_A_TIME):
            streams = (here.ask(stream=number % 2 == 0) for number in range(AT_A_TIME))
            assert all(await asyncio.gather(*streams))
            await here.outcomes(first + AT_A_TIME)
        assert await here.outcomes(1000) == {"equal": 1000}


async def test_a_sample_is_drawn_at_the_rate_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 requests half, and by their wrong answers it hears of the planted fault."""
    bad = {"verify_kv": False, "kv_corruption_rate": 100}
    async with site(tmp_path, bad, canary_sample_rate=0.5) as here:
        draws = iter([0.0, 0.9] * 30)
        monkeypatch.setattr("kvrouter.canary.replay.random", lambda: next(draws))
        for _ in range(60):
            await here.ask()
        assert await here.outcomes(30) == {"diverged": 30}


async def test_streams_that_can_be_resumed_are_sampled_too(tmp_path: Path) -> None:
    bad = {"verify_kv": False, "kv_corruption_rate": 100}
    async with site(tmp_path, bad, resume_streams=True) as here:
        for _ in range(5):
            assert not await here.ask(stream=True)
        assert await here.outcomes(5) == {"diverged": 5}

"""A router before engines of one family, one such engine alone beside them, and a client."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest_asyncio
from tests.fakes.patience import until
from tests.fakes.pd import Json, Network, PdEngine, PlainEngine
from tests.fakes.pd_mooncake import MooncakeEngine
from tests.fakes.pd_mooncake_legacy import MooncakeLegacyEngine
from tests.fakes.pd_nixl import NixlEngine
from tests.fakes.pd_p2p import P2pEngine
from tests.fakes.pd_sglang import SglangEngine

from kvrouter.app.build import App, build
from kvrouter.app.settings import RouterSettings

KINDS: dict[str, type[PdEngine]] = {
    kind.family: kind
    for kind in (
        PdEngine,
        NixlEngine,
        MooncakeEngine,
        MooncakeLegacyEngine,
        P2pEngine,
        SglangEngine,
        PlainEngine,
    )
}
STEERING: Json = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "x"},
    "ec_transfer_params": {"a": 1},
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 1,
    "bootstrap_room": 7,
    "disaggregated_params": {"request_type": "context_only"},
    "disagg_prefill_dp_rank": 3,
}


@dataclass
class Site:
    """A router, its engines, and an engine that computes the same alone."""

    app: App
    port: int
    prefill: list[PdEngine]
    decode: list[PdEngine]
    alone: PdEngine
    http: aiohttp.ClientSession

    @property
    def engines(self) -> list[PdEngine]:
        return [*self.prefill, *self.decode]

    async def post(
        self,
        body: Json,
        path: str = "/v1/completions",
        port: int = 0,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        url = f"http://127.0.0.1:{port or self.port}{path}"
        async with self.http.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.read()

    async def same(self, body: Json, path: str = "/v1/completions") -> str:
        """The router's answer, which must say what the engine alone says."""
        status, raw = await self.post(body, path)
        assert status == 200, raw
        _, expected = await self.post(body, path, self.alone.port)
        assert said(raw) == said(expected)
        return said(raw)

    async def quiet(self) -> None:
        """Wait until nothing is in flight, and check that nothing was left behind or done wrong."""
        await until(lambda: not self.app.core.metrics.running)
        await until(lambda: not any(engine.live for engine in self.engines))
        await until(lambda: not any(engine.held for engine in self.engines))
        assert [engine.violations for engine in self.engines if engine.violations] == []
        pool = self.app.core.pool
        assert all(e.requests == e.tokens == 0 for e in (*pool.all(), *pool.targets()))

    async def metric(self, line: str) -> float:
        async with self.http.get(f"http://127.0.0.1:{self.port}/metrics") as answer:
            rows = (await answer.text()).splitlines()
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows if row.startswith(line))


def said(raw: bytes) -> str:
    """The text of an answer, whole or streamed."""
    if not raw.startswith(b"data:"):
        choice = json.loads(raw)["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    assert raw.endswith(b"data: [DONE]\n\n"), raw
    events = [json.loads(part[6:]) for part in raw.split(b"\n\n")[:-2]]
    assert not any("error" in event for event in events), events
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


DEFAULTS: Json = {"policy": "round_robin", "engine_wait_s": 0.0, "health_interval_s": 0.05}
MODEL_BODY: Json = {"model": "m", "prompt": "Hello", "max_tokens": 3}
Open = Callable[..., Awaitable[Site]]


@pytest_asyncio.fixture
async def open_site() -> AsyncIterator[Open]:
    """Opens sites of a family; each must be quiet at its end."""
    opened: list[Site] = []

    async def make(family: str, prefill: int = 1, decode: int = 1, **settings: Any) -> Site:
        network, kind = Network(), KINDS[family]
        roles = ["prefill"] * prefill + ["decode"] * decode
        prepare = settings.pop("prepare", lambda engines: None)
        engines = [kind(network, role) for role in roles]
        alone_kind = SglangEngine if family == "sglang" else PlainEngine
        alone = alone_kind(Network(), "both")
        prepare(engines)
        for engine in (*engines, alone):
            await engine.start()
        ports = [
            f"{e.address}={e.bootstrap_port}" for e in engines if isinstance(e, MooncakeEngine)
        ] + [f"{e.address}={e.control_port}" for e in engines if isinstance(e, P2pEngine)]
        if family == "mooncake-legacy":
            settings = {"kv_connector": "mooncake", **settings}  # told by its /version
        if family in ("mooncake", "p2p"):
            settings = {"bootstrap_port": ports[:prefill], "kv_connector": family, **settings}
        app = build(
            RouterSettings(
                prefill=[e.address for e in engines[:prefill]],
                decode=[e.address for e in engines[prefill:]],
                port=0,
                **{**DEFAULTS, **settings},
            )
        )
        port = await app.start()
        client = aiohttp.ClientSession()
        site = Site(app, port, engines[:prefill], engines[prefill:], alone, client)
        opened.append(site)
        return site

    yield make
    try:
        for site in opened:
            await site.quiet()
    finally:
        for site in opened:
            await site.http.close()
            await site.app.close()
            for engine in (*site.engines, site.alone):
                await engine.stop()


def text(**more: Any) -> Json:
    return {"model": "m", "prompt": "Once upon a time there was", "max_tokens": 6, **more}


def ids(first: int = 300, **more: Any) -> Json:
    return {"model": "m", "prompt": list(range(first, first + 40)), "max_tokens": 6, **more}


def chat(**more: Any) -> Json:
    messages = [{"role": "user", "content": "Tell me a story"}]
    return {"model": "m", "messages": messages, "max_tokens": 6, **more}

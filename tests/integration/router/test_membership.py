"""Engines that come, drain and go by each kind of discovery while requests are under way."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.discovery import KINDS, Backend, backend_of
from tests.fakes.engine import FakeEngine
from tests.fakes.patience import every, until
from tests.integration.router.conftest import Open, Site, metric, text

from kvrouter.engines.engine import Role

FOLLOWED = [kind for kind in KINDS if kind != "flags"]
PACE_S = 0.01


@asynccontextmanager
async def neighbours(count: int) -> AsyncIterator[list[FakeEngine]]:
    """That many engines at one port, each on an address of its own, as A records name them."""
    made: list[FakeEngine] = []
    try:
        for n in range(count):
            engine = FakeEngine(host=f"127.0.0.{n + 11}")
            engine.port = made[0].port if made else 0
            await engine.start()
            made.append(engine)
        yield made
    finally:
        for engine in made:
            await engine.stop()


class Traffic:
    """Requests at a steady pace until it ends; counts what became of them."""

    def __init__(self, here: Site) -> None:
        self._here = here
        self._under_way: set[asyncio.Task[None]] = set()
        self.answered = 0
        self.failed: list[object] = []

    async def __aenter__(self) -> "Traffic":
        self._pace = asyncio.create_task(every(PACE_S, self._send))
        return self

    async def __aexit__(self, *error: object) -> None:
        self._pace.cancel()
        await asyncio.gather(*self._under_way)

    def _send(self) -> None:
        task = asyncio.create_task(self._ask(stream=len(self._under_way) % 2 == 0))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _ask(self, *, stream: bool) -> None:
        status, _, body = await self._here.post(text(stream=stream))
        if status == 200 and b'"error"' not in body and b" t3" in body:
            self.answered += 1
        else:
            self.failed.append((status, body))

    async def answers(self, more: int = 5) -> None:
        """Return when so many more were answered."""
        wanted = self.answered + more
        await until(lambda: self.answered >= wanted or self.failed)


async def timed(times: dict[str, float], what: str, condition: Callable[[], Any]) -> None:
    begun = time.monotonic()
    await until(condition)
    times[what] = time.monotonic() - begun


def decoding(here: Site) -> set[str]:
    return {engine.address for engine in here.app.core.pool.engines(Role.DECODE)}


@pytest.mark.parametrize("kind", FOLLOWED)
async def test_engines_are_added_drained_and_removed_under_traffic_and_no_request_fails(
    kind: str, site: Open, tmp_path: Path
) -> None:
    async with neighbours(3) as made, backend_of(kind, tmp_path, made[0].port) as backend:
        here = await site(0, 0, discovery=[backend.setting], engine_wait_s=30, **backend.more)
        times: dict[str, float] = {}
        async with Traffic(here) as traffic:
            # Nobody is there: requests wait for whom discovery finds.
            await until(lambda: here.app.core.engine_wait.waiting)
            await name(backend, made[0])
            await traffic.answers()
            await name(backend, *made)
            await timed(times, "added", lambda: len(decoding(here)) == 3)
            await traffic.answers(10)
            # One drains: a request is held there for as long as it likes.
            made[2].mode, made[2].began = "held", asyncio.Queue()
            await made[2].next_began()
            await name(backend, *made[:2])
            await timed(times, "drains", lambda: decoding(here) == {e.address for e in made[:2]})
            made[2].mode = "ok"
            await traffic.answers(10)
            assert here.app.core.pool.find(made[2].address) is not None
            made[2].go.set()
            await until(lambda: here.app.core.pool.find(made[2].address) is None)
            # And one changes places with it.
            await name(backend, made[1], made[2])
            await timed(times, "changed", lambda: decoding(here) == {e.address for e in made[1:]})
            await traffic.answers(10)
        assert traffic.failed == []
        print(f"{kind}: {traffic.answered} requests, failed {len(traffic.failed)};", times)


async def name(backend: Backend, *engines: FakeEngine) -> None:
    await backend.name({engine.address: Role.DECODE for engine in engines})


@pytest.mark.parametrize("kind", FOLLOWED)
async def test_a_source_that_is_away_is_seen_in_the_metrics_and_by_no_request(
    kind: str, site: Open, tmp_path: Path
) -> None:
    async with neighbours(1) as made, backend_of(kind, tmp_path, made[0].port) as backend:
        await name(backend, *made)
        here = await site(0, 0, discovery=[backend.setting], **backend.more)
        source = list(here.app.members.discovery.merged.statuses)[1].name
        up = f'kvrouter:discovery_up{{source="{source}"}}'
        assert await metric(here, up) == 1
        async with Traffic(here) as traffic:
            await backend.fail()
            await until(lambda: not list(here.app.members.discovery.merged.statuses)[1].up)
            assert await metric(here, up) == 0
            assert await metric(here, f'kvrouter:discovery_engines{{source="{source}"}}') == 1
            await traffic.answers()
            await backend.mend()
            await until(lambda: list(here.app.members.discovery.merged.statuses)[1].up)
            await traffic.answers()
        assert traffic.failed == []


async def test_flags_a_file_and_the_admin_api_together(site: Open, tmp_path: Path) -> None:
    async with (
        neighbours(2) as made,
        backend_of("file", tmp_path) as file,
        backend_of("dns", tmp_path, made[0].port) as dns,
    ):
        await name(file, made[0])
        await name(dns, made[0])
        settings = {"discovery": [file.setting, dns.setting], "admin": True}
        here = await site(1, 1, **settings)
        by_flag = here.decode[0].address
        body = {"url": made[1].address, "worker_type": "decode"}
        async with here.http.post(here.url("/workers"), json=body) as answer:
            assert answer.status == 202
        await until(lambda: decoding(here) == {by_flag, made[0].address, made[1].address})
        await name(file)
        await name(dns, made[0])
        await until(lambda: not list(here.app.members.discovery.merged.statuses)[1].members)
        assert decoding(here) == {by_flag, made[0].address, made[1].address}
        await name(dns)
        await until(lambda: decoding(here) == {by_flag, made[1].address})


async def test_health_waits_until_engines_that_were_discovered_were_asked(
    site: Open, tmp_path: Path
) -> None:
    async with neighbours(1) as made, backend_of("file", tmp_path) as file:
        await name(file, *made)
        here = await site(0, 0, discovery=[file.setting])
        assert (await here.get("/health"))[0] == 200

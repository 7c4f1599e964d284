"""A router over simulated engines in a thread of its own, for clients that block."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from tests.fakes.event_loops import pytest_asyncio_loop_factories
from tests.fakes.patience import until

from kvrouter.app.build import build
from kvrouter.app.settings import RouterSettings
from kvrouter.tools.sim.serve import SimServer
from kvrouter.tools.sim.settings import SimSettings

if TYPE_CHECKING:
    from kvrouter.app.build import App

__all__ = ["Routed", "in_a_thread", "pytest_asyncio_loop_factories", "routed"]

DEADLINE_S = 30.0
CONTEXT_TOKENS = 256


class Routed:
    """Two prefill and two decode engines, and the router before them."""

    def __init__(self, **settings: Any) -> None:
        self.more = settings
        self.sims = [SimServer(self._settings()) for _ in range(4)]
        self.app: App | None = None
        self.url = ""

    def _settings(self) -> SimSettings:
        return SimSettings(model="m", port=0, max_model_len=CONTEXT_TOKENS, block_size=16)

    async def start(self) -> None:
        ports = [await sim.start() for sim in self.sims]
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self.app = build(
            RouterSettings(
                prefill=addresses[:2],
                decode=addresses[2:],
                port=0,
                policy="least_tokens",
                **self.more,
            )
        )
        self.url = f"http://127.0.0.1:{await self.app.start()}"

    async def rest(self) -> None:
        """Return when nothing is under way: who left may just not have been noticed yet."""
        app = self.app
        assert app is not None
        engines = app.core.pool.all()
        await until(
            lambda: (
                not app.core.metrics.running and not any(e.requests or e.tokens for e in engines)
            ),
            DEADLINE_S,
        )

    async def close(self) -> None:
        if self.app is not None:
            await self.app.close()
        for sim in self.sims:
            await sim.close()


@contextmanager
def in_a_thread(**settings: Any) -> Iterator[Routed]:
    """What begins, serves and ends in the thread; at a good end, nothing may be left under way."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    routed = Routed(**settings)
    try:
        asyncio.run_coroutine_threadsafe(routed.start(), loop).result(DEADLINE_S)
        yield routed
        asyncio.run_coroutine_threadsafe(routed.rest(), loop).result(2 * DEADLINE_S)
    finally:
        asyncio.run_coroutine_threadsafe(routed.close(), loop).result(DEADLINE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
        loop.close()


@pytest.fixture(scope="module")
def routed() -> Iterator[Routed]:
    with in_a_thread() as site:
        yield site

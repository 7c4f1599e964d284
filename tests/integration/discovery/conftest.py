"""What tests of sources share: a listener to wait for, and each kind of source in turn."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.discovery import KINDS, Backend, backend_of

from kvrouter.engines.engine import Role
from kvrouter.membership.discovery.base import EngineSource, Members
from kvrouter.options.addresses import unlabelled

PATIENCE_S = 20.0


class Heard:
    """A listener that a test can wait for."""

    def __init__(self) -> None:
        self.members: Members | None = None
        self.problem: str | None = None
        self.words = 0
        self.cleared = 0  # problems that were followed by a good reading
        self._word = asyncio.Event()

    def named(self, members: Members, *, restore: bool = False) -> None:
        self.cleared += self.problem is not None
        self.members, self.problem = dict(members), None
        self._said()

    def failed(self, problem: str) -> None:
        self.problem = problem
        self._said()

    @property
    def engines(self) -> Members:
        """The members without their labels."""
        return {unlabelled(address): role for address, role in (self.members or {}).items()}

    def _said(self) -> None:
        self.words += 1
        self._word.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._word.clear()
                await self._word.wait()

    async def names(self, members: Mapping[str, Role]) -> None:
        await self.until(
            lambda: (
                self.members is not None
                and members in (self.members, self.engines)
                and self.problem is None
            )
        )

    async def complains(self) -> str:
        await self.until(lambda: self.problem is not None)
        assert self.problem is not None
        return self.problem


@pytest_asyncio.fixture(params=KINDS)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    async with backend_of(request.param, tmp_path) as made:
        yield made


@asynccontextmanager
async def followed(source: EngineSource) -> AsyncIterator[Heard]:
    """Follow a source; it must leave nothing behind when it is cancelled."""
    before = asyncio.all_tasks()
    heard = Heard()
    task = asyncio.create_task(source.follow(heard))
    try:
        yield heard
    finally:
        task.cancel()
        ended = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended[0], asyncio.CancelledError)
        async with asyncio.timeout(PATIENCE_S):  # a fake in this loop ends its connections
            while not asyncio.all_tasks() <= before:
                await asyncio.sleep(0)

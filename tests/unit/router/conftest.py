"""What the tests of routing share: a clock to turn by hand, and engines that have joined."""

from dataclasses import dataclass

import pytest
from tests.fakes.event_loops import pytest_asyncio_loop_factories

from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.engines.pool import EnginePool

__all__ = ["Clock", "clock", "joined", "pytest_asyncio_loop_factories"]


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def joined(
    pool: EnginePool,
    address: str,
    role: Role,
    *,
    models: tuple[str, ...] = ("m",),
    block_tokens: int | None = 16,
    manifest: str | None = None,
    root: bytes | None = None,
) -> Engine:
    engine = pool.add(address, role)
    pool.join(engine, Identity(models, None, block_tokens, manifest, root))
    return engine

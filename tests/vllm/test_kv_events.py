"""The router's side of KV events against vLLM's own publisher, each in a process of its own."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.router.prefix.events.test_replay import Router, free_port, ports

from kvrouter.prefix.events.confidence import Reason

pytestmark = [pytest.mark.vllm]

SCRIPT = Path(__file__).parent / "inside" / "publisher.py"
START_S = 300
PATIENCE_S = 60


class Publisher:
    """vLLM's publisher."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, replay_port: int) -> None:
        self._process = process
        self.ports = ports(None, port, replay_port)

    async def tell(self, **told: Any) -> None:
        """Publish one batch, or restart."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        await self.ready()

    async def ready(self) -> None:
        assert self._process.stdout is not None
        async with asyncio.timeout(START_S):
            while (line := await self._process.stdout.readline()) != b"ok\n":
                assert line, "the publisher ended"


@asynccontextmanager
async def publishing(python: Path, kept: int) -> AsyncIterator[Publisher]:
    port, replay_port = free_port(), free_port()
    words = [str(word) for word in (python, SCRIPT, port, replay_port, kept)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    try:
        publisher = Publisher(process, port, replay_port)
        await publisher.ready()
        yield publisher
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def routing(publisher: Publisher) -> AsyncIterator[Router]:
    router = Router(publisher.ports)
    router.join()
    try:
        yield router
    finally:
        await router.close()


async def test_a_late_router_is_told_all_that_vllms_publisher_keeps(vllm_python: Path) -> None:
    async with publishing(vllm_python, 10_000) as publisher:
        for number in range(1, 2501):  # more than ZMQ queues for one who asks
            await publisher.tell(stored=[number])
        await publisher.tell(removed=[7])
        async with routing(publisher) as router:
            await router.until(lambda: router.reason is Reason.COMPLETE)
            assert [n for n in range(1, 2501) if not router.holds(n)] == [7]
            await publisher.tell(stored=[7])
            await router.until(lambda: router.holds(7))
            assert router.reason is Reason.COMPLETE


async def test_messages_that_vllm_no_longer_keeps_leave_what_is_certain(vllm_python: Path) -> None:
    async with publishing(vllm_python, 5) as publisher:
        for number in range(1, 21):
            await publisher.tell(stored=[number])
        async with routing(publisher) as router:
            await router.until(lambda: router.reason is Reason.LATE)
            assert [n for n in range(1, 21) if router.holds(n)] == [16, 17, 18, 19, 20]
            await publisher.tell(cleared=True)
            await router.until(lambda: router.reason is Reason.COMPLETE)
            assert not router.holds(20)


async def test_a_publisher_of_vllm_that_restarts_is_learnt_anew(vllm_python: Path) -> None:
    async with publishing(vllm_python, 1000) as publisher:
        await publisher.tell(stored=[1, 2])
        await publisher.tell(stored=[3])
        async with routing(publisher) as router:
            await router.until(lambda: router.reason is Reason.COMPLETE)
            assert router.holds(1, 2, 3)
            await publisher.tell(restart=True)
            await publisher.tell(stored=[9])
            await router.until(lambda: router.holds(9) and router.reason is Reason.COMPLETE)
            assert not router.holds(1)

"""Strangers at every listening port of every process: afterwards nothing of theirs is left.

KVROUTER_DOORS_SECONDS makes each attack as long. A long one is then repeated at one process after
the other, and a running stream may not feel it: all processes at once would have to share a small
machine's processors with one another, as they do on no machine that serves.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from tests.fakes.certificates import Authority
from tests.fakes.patience import every, until
from tests.faults.fleet import MODEL, Fleet, Held, fleet
from tests.faults.strangers import ATTACKS

SECONDS = float(os.environ.get("KVROUTER_DOORS_SECONDS", "2"))
LONG = SECONDS >= 30
MOST_BYTES = 64 << 20
MOST_FILES = 4
"""More than before: connections that the processes keep among themselves."""
MOST_GAP_S = 0.1
SETTLE_S = 60.0
ANSWER_S = 10.0


class Client:
    """An ordinary client of the router: one long stream, and requests beside it."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = f"{url}/v1/completions"
        self._http = http
        self.gap_s = 0.0
        self.answers: list[object] = []

    def _body(self, tokens: int, *, stream: bool) -> dict[str, object]:
        return {"model": MODEL, "prompt": "a", "max_tokens": tokens, "stream": stream}

    async def stream(self) -> None:
        """Read one stream after another until cancelled; notes the longest gap."""
        while True:
            async with self._http.post(self._url, json=self._body(1000, stream=True)) as answer:
                last = None
                async for _ in answer.content.iter_any():
                    now = time.monotonic()
                    self.gap_s = max(self.gap_s, now - (last or now))
                    last = now

    async def ask(self) -> None:
        """One request, on a connection of its own."""
        try:
            async with asyncio.timeout(ANSWER_S):
                async with self._http.post(self._url, json=self._body(2, stream=False)) as got:
                    self.answers.append(got.status)
        except (TimeoutError, aiohttp.ClientError) as error:
            self.answers.append(repr(error))


@asynccontextmanager
async def traffic(url: str) -> AsyncIterator[Client]:
    """A client at work."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        client = Client(url, http)
        works = client.stream(), every(0.02, client.ask)
        tasks = [asyncio.create_task(work) for work in works]
        try:
            yield client
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def longest_gap(url: str) -> float:
    """Of a stream that is left in peace for as long."""
    async with traffic(url) as client:
        await asyncio.sleep(min(SECONDS, 20))
    return client.gap_s


async def strangers(name: str, doors: list[str], seconds: float) -> None:
    """That attack on these doors at once."""
    program = (sys.executable, "-m", "tests.faults.strangers", name, str(seconds))
    attack = await asyncio.create_subprocess_exec(*program, *doors)
    async with asyncio.timeout(seconds + 60):
        assert await attack.wait() == 0


async def attacked(name: str, here: Fleet) -> list[str]:
    """What was wrong while that attack was on all doors at once."""
    async with traffic(here.url) as client:
        await strangers(name, list(here.doors.values()), SECONDS)
    failed = [each for each in client.answers if each != 200]
    return [f"{name}: {len(failed)} of {len(client.answers)}: {failed[:3]}"] if failed else []


async def felt(name: str, here: Fleet, quiet_s: float) -> list[str]:
    """What a stream felt while that attack was on one process after the other.

    A gap that is too long is looked for again: what else the machine does comes once.
    """
    found = []
    for process in here.processes:
        for _ in range(2):
            async with traffic(here.url) as client:
                await strangers(name, here.doors_of(process), SECONDS / len(here.processes))
            gap = f"{name} at {process}: a gap of {client.gap_s:.3f} s, {quiet_s:.3f} s without"
            print(gap)
            if client.gap_s <= quiet_s + MOST_GAP_S:
                break
        else:
            found.append(gap)
    return found


async def left(here: Fleet, before: dict[str, Held]) -> dict[str, str]:
    """What of strangers is left in which process, once nothing of them goes any more."""
    kept: dict[str, str] = {}

    def nothing() -> bool:
        kept.clear()
        for name, now in here.held().items():
            was = before[name]
            more_bytes, more_files = now.rss_bytes - was.rss_bytes, now.files - was.files
            if more_bytes > MOST_BYTES or more_files > MOST_FILES:
                kept[name] = f"{more_bytes >> 20} MiB, {more_files} descriptors"
        return not kept

    with suppress(TimeoutError):
        await until(nothing, SETTLE_S, look_s=0.2)
    return kept


@pytest.mark.timeout(SECONDS * 2 * (len(ATTACKS) + 1) + 300)
async def test_what_strangers_do_at_any_door_is_gone_with_them(tmp_path: Path) -> None:
    wrong = []
    async with fleet(tmp_path, Authority(tmp_path)) as here:
        quiet_s = await longest_gap(here.url)
        for name in ATTACKS:
            before = here.held()
            wrong += await attacked(name, here)
            if LONG:
                wrong += await felt(name, here, quiet_s)
            kept = await left(here, before)
            wrong += [f"{name}: {process} holds {what}" for process, what in kept.items()]
    assert wrong == []

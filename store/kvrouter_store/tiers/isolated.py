"""A tier in a process of its own: of those with a native client.

Such a client may hang, hold Python's lock while it connects, or end the process, which here holds
nobody's blocks. A call that is cancelled ends the process: then nothing can touch the memory.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from kvrouter_store.tiers.base import Item, Memory, TierAway, TierStatus, complete, shown

MAX_LINE_BYTES = 4 << 20
log = logging.getLogger(__name__)


class Isolated:
    """The tier of a URL, in a child that `start` begins and `stop` kills: see inside.py."""

    def __init__(self, url: str) -> None:
        self.name = shown(url)
        self._url = url
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._stopping = asyncio.Lock()

    async def start(self, memory: Memory) -> None:
        """Begin the process, and start the tier in it."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvrouter_store.tiers.inside",
            str(memory.fd),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(memory.fd,),
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # a Ctrl-C is for the node
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._readers = [
            asyncio.create_task(self._take_answers(process.stdout)),
            asyncio.create_task(self._log(process.stderr)),
        ]
        process.stdin.write(self._url.encode() + b"\n")  # other users see what arguments have
        await self._ask("start", [])

    async def holds(self, keys: Sequence[str]) -> list[bool]:
        """As the tier."""
        held: list[bool] = await self._ask("holds", keys)
        return held

    async def load(self, items: Sequence[Item]) -> list[TierStatus]:
        """As the tier."""
        return [TierStatus(status) for status in await self._ask("load", items)]

    async def store(self, items: Sequence[Item]) -> list[TierStatus]:
        """As the tier."""
        return [TierStatus(status) for status in await self._ask("store", items)]

    async def drop(self, keys: Sequence[str]) -> None:
        """As the tier."""
        await self._ask("drop", keys)

    async def stop(self) -> None:
        """Kill the process, and wait until it is gone."""
        async with self._stopping:
            process, self._process = self._process, None
            if process is None:
                return
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            # They end with the process, which may leave half an answer.
            await asyncio.gather(*self._readers, return_exceptions=True)

    async def _ask(self, operation: str, arguments: Sequence[object]) -> Any:
        process = self._process
        if process is None:
            raise TierAway("it is not started")
        assert process.stdin is not None
        number = next(self._numbers)
        self._waiting[number] = answer = asyncio.get_running_loop().create_future()
        try:
            process.stdin.write(json.dumps([number, operation, arguments]).encode() + b"\n")
            await process.stdin.drain()
            return await answer
        except asyncio.CancelledError:
            await complete(self.stop())
            raise
        except OSError:
            raise TierAway("its process has ended") from None
        finally:
            self._waiting.pop(number, None)

    async def _take_answers(self, answers: asyncio.StreamReader) -> None:
        try:
            while line := await answers.readline():
                number, result, error = json.loads(line)
                waiting = self._waiting.get(number)
                if waiting is None or waiting.done():
                    continue
                if error is None:
                    waiting.set_result(result)
                else:
                    waiting.set_exception(TierAway(error))
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(TierAway("its process has ended"))

    async def _log(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            log.debug("%s: %s", self.name, line.decode("utf-8", "replace").rstrip())

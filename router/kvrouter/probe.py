"""Health checks and introductions of engines: who is there, what it serves, which KV it needs.

One task per engine; it tells the pool, and never touches requests of clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from kvrouter.engine import Identity
from kvrouter.families.base import BadAnswer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from kvrouter.engine import Engine
    from kvrouter.families.base import Family
    from kvrouter.pool import Pool

MAX_ANSWER_BYTES: Final = 4 << 20
INTRODUCTION_S: Final = 60.0
"""Time for the request of one token: it waits its turn among the engine's other requests."""
FAILED_CHECKS: Final = 2
"""Failed health checks in a row after which an engine leaves the pool."""
_BLOCK_SIZE: Final = re.compile(rb'^vllm:cache_config_info\{[^}\n]*\bblock_size="(\d+)"', re.M)

log = logging.getLogger(__name__)


class ProbeFailed(Exception):
    """An engine does not answer a probe as it should; says how, in a sentence."""


class Prober:
    """Keeps the pool true to the engines.

    Args:
        pool: is told of joins and leaves.
        family: the dialect of an engine, by the name in `Engine.family`.
        interval_s: between two health checks of one engine.
        timeout_s: that an engine may take for one answer.
        model: the one model to serve, or None for whatever engines serve.
        learn: is awaited with the manifest of an engine before it joins, so that those who watch
            the pool can compare it.
    """

    def __init__(
        self,
        pool: Pool,
        family: Callable[[str], Family],
        *,
        interval_s: float = 2.0,
        timeout_s: float = 5.0,
        model: str | None = None,
        learn: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._pool = pool
        self._family = family
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._model = model
        self._learn = learn
        self._tasks: dict[Engine, asyncio.Task[None]] = {}
        self._problems: dict[Engine, str] = {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self, engines: Iterable[Engine]) -> None:
        """Begin to watch `engines`; returns when each was asked once, or after `timeout_s`."""
        # Nothing stays open to an engine that is removed, and each check tells whether it accepts.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        first_checks = [self.watch(engine).wait() for engine in engines]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                await asyncio.gather(*first_checks)

    def watch(self, engine: Engine) -> asyncio.Event:
        """Watch one more engine from now on; the event is set when it was asked once."""
        checked = asyncio.Event()
        watching = self._watch(engine, checked)
        self._tasks[engine] = asyncio.create_task(watching, name=f"probe {engine.address}")
        return checked

    def forget(self, engine: Engine) -> None:
        """Watch `engine` no longer."""
        self._problems.pop(engine, None)
        task = self._tasks.pop(engine, None)
        if task is not None:
            task.cancel()

    def problem(self, engine: Engine) -> str | None:
        """What was wrong with `engine` when it was asked last, in a sentence; None if nothing."""
        return self._problems.get(engine)

    async def close(self) -> None:
        """Stop watching and close connections. Idempotent."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def check(self, engine: Engine) -> str | None:
        """One health check, and the introduction where the engine is not in the pool.

        Returns:
            None, or what is wrong with it, in a sentence.
        """
        try:
            await self._get(engine, "/health")
            if engine.identity is None:
                identity = await self._introduce(engine)
                if self._learn is not None and identity.manifest is not None:
                    await self._learn(identity.manifest)
                log.info("engine %s joins as %s: %s", engine.address, engine.role, identity)
                self._pool.join(engine, identity)
        except ProbeFailed as error:
            return str(error)
        return None

    async def _watch(self, engine: Engine, checked: asyncio.Event) -> None:
        failures, told = 0, ""
        while True:
            try:
                problem = await self.check(engine)
            except Exception as error:  # one odd engine must not end its own watch
                log.exception("probe of %s", engine.address)
                problem = repr(error)
            checked.set()
            if problem is None:
                self._problems.pop(engine, None)
                failures, told = 0, ""
                await asyncio.sleep(self._interval_s)
                continue
            failures += 1
            self._problems[engine] = problem
            if (engine.identity is None or failures >= FAILED_CHECKS) and (
                self._pool.leave(engine) or problem != told
            ):
                log.warning("engine %s is not available: %s", engine.address, problem)
                told = problem
            await asyncio.sleep(self._interval_s)

    async def _introduce(self, engine: Engine) -> Identity:
        """Ask who it is: its models, its block size, and by a request of one token its manifest."""
        cards = _read_models(await self._get(engine, "/v1/models"))
        models = tuple(card.id for card in cards)
        if self._model is not None:
            if self._model not in models:
                raise ProbeFailed(f"it serves {', '.join(models)}, not --model {self._model}")
            models = (self._model,)
        family = self._family(engine.family)
        probe = family.probe_body(models[0])
        answer = await self._ask("POST", engine, "/v1/completions", probe, INTRODUCTION_S)
        try:
            told = family.read_prefill_answer(answer)
        except BadAnswer as error:
            raise ProbeFailed(str(error)) from None
        block_tokens = told.block_tokens or await self._block_size(engine)
        return Identity(
            models,
            max_model_len=cards[0].max_model_len,
            block_tokens=block_tokens or None,
            manifest=told.manifest,
            root=told.root,
            refusal=told.refusal,
            waits=told.waits,
            adapters=tuple((card.id, card.root) for card in cards if card.parent and card.root),
        )

    async def _block_size(self, engine: Engine) -> int:
        """From the engine's metrics (vllm:cache_config_info); 0 where they do not tell."""
        try:
            found = _BLOCK_SIZE.search(await self._get(engine, "/metrics"))
        except ProbeFailed:
            return 0
        return int(found.group(1)) if found else 0

    async def _get(self, engine: Engine, path: str) -> bytes:
        return await self._ask("GET", engine, path, None, self._timeout_s)

    async def _ask(
        self, method: str, engine: Engine, path: str, body: bytes | None, timeout_s: float
    ) -> bytes:
        if self._session is None:
            raise ProbeFailed("the prober is not started")
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            async with self._session.request(
                method,
                engine.url + path,
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as answer:
                content = await _read(answer)
                if answer.status != 200:
                    raise ProbeFailed(f"{path} answers {answer.status}: {_short(content)}")
                return content
        except TimeoutError:
            raise ProbeFailed(f"{path} does not answer within {timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise ProbeFailed(f"{path}: {error}") from None


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in answer.content.iter_any():
        content += chunk
        if len(content) > MAX_ANSWER_BYTES:
            raise ProbeFailed(f"{answer.url.path} answers more than {MAX_ANSWER_BYTES} bytes")
    return bytes(content)


class _Card(msgspec.Struct):
    """One model of /v1/models; an adapter has its base as `parent` and its path as `root`."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def _read_models(body: bytes) -> list[_Card]:
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except msgspec.DecodeError as error:
        raise ProbeFailed(f"/v1/models is not OpenAI's list ({error})") from None
    if not cards:
        raise ProbeFailed("/v1/models names no model")
    return cards


def _short(content: bytes) -> str:
    return " ".join(content[:200].decode("utf-8", "replace").split())

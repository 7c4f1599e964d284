"""`kvrouter register`: keeps engines' entries in Redis while they are healthy.

It runs beside an engine, sends it only health checks, and has it drained at SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec

from kvrouter.credentials.tls import Trust
from kvrouter.membership.discovery.redis import EngineEntry, EntryKeys
from kvrouter.options.addresses import SECURE
from kvrouter.redis.client import RedisClient, RedisRefused, RedisUnavailable
from kvrouter_store.log import log_to_stderr

if TYPE_CHECKING:
    from kvrouter.engines.engine import Role
    from kvrouter.membership.discovery.register_settings import RegisterSettings

RETRY_S: Final = 0.5
"""Between two attempts while the engine or Redis is down."""
_RENEWALS: Final = 3

log = logging.getLogger(__name__)


class EngineRegistration:
    """The entry of one engine; its methods raise RedisUnavailable or RedisRefused."""

    def __init__(
        self, link: RedisClient, keys: EntryKeys, address: str, role: Role, ttl_s: float
    ) -> None:
        self.address = address
        self.role = role
        self.registered = False
        self._link = link
        self._keys = keys
        self._ttl_s = ttl_s

    @property
    def url(self) -> str:
        """Of the engine, without a slash at its end."""
        return self.address if self.address.startswith(SECURE) else f"http://{self.address}"

    async def renew(self) -> None:
        """Write the entry or extend its life; publish it if it changed."""
        await self._put("up")
        if not self.registered:
            self.registered = True
            print(f"kvrouter register: {self.url} as {self.role}", flush=True)

    async def leave(self) -> None:
        """Mark the engine as leaving, until the entry expires: so all routers see it."""
        await self._put("leaving")
        self.registered = False

    async def _put(self, state: str) -> None:
        entry = EngineEntry(self.role.value, state, self._ttl_s)  # type: ignore[arg-type]
        key, value = self._keys.entry(self.address), msgspec.json.encode(entry)
        before, *_ = await self._link.batch(
            [
                ("GET", key),
                ("SADD", self._keys.engines, self.address),
                ("SET", key, value, "PX", int(self._ttl_s * 1000)),
            ]
        )
        if before != value:
            await self._link.call("PUBLISH", self._keys.news, self.address)


class Registrar:
    """Keeps the entries of all engines of `settings`."""

    def __init__(self, settings: RegisterSettings) -> None:
        self._settings = settings
        self._trust = Trust(settings.engine_ca_file)
        self._link = RedisClient(settings.redis.get_secret_value())
        keys = EntryKeys(settings.redis_prefix)
        self._registrations = [
            EngineRegistration(self._link, keys, address, role, settings.ttl_s)
            for address, role in settings.members.items()
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Renew until `stop` is set, then mark the registered engines as leaving."""
        timeout = aiohttp.ClientTimeout(total=self._settings.health_timeout_s)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as http:
            keeping = [asyncio.create_task(self._keep(r, http)) for r in self._registrations]
            try:
                await stop.wait()
            finally:
                for task in keeping:
                    task.cancel()
                await asyncio.gather(*keeping, return_exceptions=True)
        await asyncio.gather(*(self._leave(r) for r in self._registrations if r.registered))
        await self._link.close()

    async def _keep(self, registration: EngineRegistration, http: aiohttp.ClientSession) -> None:
        logged = ""
        while True:
            problem = await self._ill(http, registration.url)
            if problem is None:
                try:
                    await registration.renew()
                except (RedisUnavailable, RedisRefused) as error:
                    problem = f"Redis: {error}"
            if problem is not None and problem != logged:
                log.warning("engine %s cannot be registered: %s", registration.address, problem)
            elif problem is None and logged:
                log.info("engine %s is registered again", registration.address)
            logged = problem or ""
            renewal_s = self._settings.ttl_s / _RENEWALS
            await asyncio.sleep(renewal_s if problem is None else min(renewal_s, RETRY_S))

    async def _leave(self, registration: EngineRegistration) -> None:
        try:
            await registration.leave()
            log.info("engine %s is to drain", registration.address)
        except (RedisUnavailable, RedisRefused) as error:
            log.warning(
                "engine %s stays registered for %g s: %s",
                registration.address,
                self._settings.ttl_s,
                error,
            )

    async def _ill(self, http: aiohttp.ClientSession, url: str) -> str | None:
        """What is wrong with an engine, in a sentence; None: nothing. A 404 is well."""
        tls = self._trust.context if url.startswith(SECURE) else True
        try:
            async with http.get(f"{url}/health", allow_redirects=False, ssl=tls) as answer:
                return None if answer.status in (200, 404) else f"/health answers {answer.status}"
        except TimeoutError:
            return "/health does not answer in time"
        except aiohttp.ClientError as error:
            return f"/health: {error}"


def run(settings: RegisterSettings) -> int:
    """Keep engines registered until SIGINT or SIGTERM; the exit code."""
    log_to_stderr(settings.log_level)
    asyncio.run(_main(settings))
    return 0


async def _main(settings: RegisterSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with suppress(asyncio.CancelledError):
        await Registrar(settings).run(stop)

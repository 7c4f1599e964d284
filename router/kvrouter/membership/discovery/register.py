"""`kvrouter register`: keeps engines' entries in Redis while they are healthy.

It runs beside an engine, sends it only health checks, and has it drained at SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import suppress
from typing import Annotated, Final, Literal

import msgspec
from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from kvrouter.credentials.settings import EngineTrustSettings
from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families.pages import ProbeFailed
from kvrouter.membership.discovery.base import Members, both_roles
from kvrouter.membership.discovery.redis import MAX_TTL_S, EngineEntry, EntryKeys
from kvrouter.membership.probe_client import ProbeClient, connection_problem
from kvrouter.options.addresses import SECURE, bare_address
from kvrouter.options.settings import Settings
from kvrouter.options.types import Addresses, LogLevel, StoreUrls, unique_stores
from kvrouter.redis.client import RedisClient, RedisFailed
from kvrouter.redis.settings import RedisSettings
from kvrouter_store.log import log_to_stderr

RETRY_S: Final = 0.5  # between two attempts while the engine or Redis is down
_RENEWALS: Final = 3
log = logging.getLogger(__name__)


class RegisterSettings(RedisSettings, EngineTrustSettings, Settings):
    """Settings of `kvrouter register`."""

    model_config = SettingsConfigDict(env_prefix="KVROUTER_")

    prefill: Addresses = Field(
        default_factory=list,
        description="Engines for prefill legs, as URL or HOST:PORT by which routers reach them. "
        "An engine that --decode names too takes both legs.",
        json_schema_extra={"section": "Engines"},
    )
    decode: Addresses = Field(
        default_factory=list,
        description="Engines for decode legs, as URL or HOST:PORT.",
    )
    store: Annotated[StoreUrls, AfterValidator(unique_stores)] = Field(
        default_factory=list,
        description="Nodes of the KV store, as kv://HOST:PORT or kvs://HOST:PORT.",
    )
    ttl_s: float = Field(
        default=15.0,
        ge=0.5,
        le=MAX_TTL_S,
        description="How long an entry lives without renewal. While the engine's /health "
        "answers, or the node takes connections, the command renews the entry three times as "
        "often.",
        json_schema_extra={"flags": ["--ttl"]},
    )
    health_timeout_s: float = Field(
        default=5.0, gt=0, description="Longest time for the answer to a health check."
    )
    log_level: LogLevel = Field(
        default="info", description="Lowest severity that the command logs."
    )

    @model_validator(mode="after")
    def _something_to_do(self) -> RegisterSettings:
        if not self.redis.get_secret_value():
            raise ValueError("no Redis to register in: give --redis redis://HOST:PORT/DB")
        if not self.members:
            raise ValueError("nothing to register: give --decode URL, --prefill or --store")
        return self

    @property
    def members(self) -> Members:
        """The engines and store nodes, with their roles."""
        roles = {Role.PREFILL: self.prefill, Role.DECODE: self.decode, Role.STORE: self.store}
        return both_roles((address, role) for role, named in roles.items() for address in named)


class EngineRegistration:
    """The entry of one engine; its methods raise RedisFailed."""

    def __init__(
        self, link: RedisClient, keys: EntryKeys, address: str, role: Role, ttl_s: float
    ) -> None:
        place = address.partition("://")[2] if role is Role.STORE else bare_address(address)
        self.engine = Engine(place, role, tls=SECURE in address)
        self.registered = False
        self._address = address
        self._link = link
        self._keys = keys
        self._ttl_s = ttl_s

    async def renew(self) -> None:
        """Write the entry or extend its life; publish it if it changed."""
        await self._put("up")
        if not self.registered:
            self.registered = True
            shown = self._address if self.engine.role is Role.STORE else self.engine.url
            print(f"kvrouter register: {shown} as {self.engine.role}", flush=True)

    async def leave(self) -> None:
        """Mark the engine as leaving, until the entry expires: so all routers see it."""
        await self._put("leaving")
        self.registered = False

    async def _put(self, state: Literal["up", "leaving"]) -> None:
        entry = EngineEntry(self.engine.role, state, self._ttl_s)
        key, value = self._keys.entry(self._address), msgspec.json.encode(entry)
        before, *_ = await self._link.batch(
            [
                ("GET", key),
                ("SADD", self._keys.engines, self._address),
                ("SET", key, value, "PX", int(self._ttl_s * 1000)),
            ]
        )
        if before != value:
            await self._link.call("PUBLISH", self._keys.news, self._address)


class Registrar:
    """Keeps the entries of all engines of `settings`."""

    def __init__(self, settings: RegisterSettings) -> None:
        self._settings = settings
        trust = settings.engine_trust()
        self._probe = ProbeClient(trust=trust, timeout_s=settings.health_timeout_s)
        self._link = RedisClient(settings.redis.get_secret_value())
        keys = EntryKeys(settings.redis_prefix)
        self._registrations = [
            EngineRegistration(self._link, keys, address, role, settings.ttl_s)
            for address, role in settings.members.items()
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Renew until `stop` is set, then mark the registered engines as leaving."""
        async with self._probe:
            keeping = [asyncio.create_task(self._keep(each)) for each in self._registrations]
            try:
                await stop.wait()
            finally:
                for task in keeping:
                    task.cancel()
                await asyncio.gather(*keeping, return_exceptions=True)
        await asyncio.gather(*(self._leave(r) for r in self._registrations if r.registered))
        await self._link.close()

    async def _keep(self, registration: EngineRegistration) -> None:
        address, logged = registration.engine.address, ""
        renewal_s = self._settings.ttl_s / _RENEWALS
        while True:
            problem = await self._renew(registration)
            if problem and problem != logged:
                log.warning("%s cannot be registered: %s", address, problem)
            elif not problem and logged:
                log.info("%s is registered again", address)
            logged = problem
            await asyncio.sleep(min(renewal_s, RETRY_S) if problem else renewal_s)

    async def _renew(self, registration: EngineRegistration) -> str:
        """Renew the entry of an engine that is well; returns what is wrong, or ""."""
        engine, timeout_s = registration.engine, self._settings.health_timeout_s
        try:
            if engine.role is not Role.STORE:
                await self._probe.body(engine, "/health", None)
            elif problem := await connection_problem(engine.host, engine.port, timeout_s):
                return f"it takes no connection: {problem}"
        except ProbeFailed as error:
            if error.status != 404:  # an engine may have no such page
                return str(error)
        try:
            await registration.renew()
        except RedisFailed as error:
            return f"Redis: {error}"
        return ""

    async def _leave(self, registration: EngineRegistration) -> None:
        address, ttl_s = registration.engine.address, self._settings.ttl_s
        try:
            await registration.leave()
            log.info("%s is to leave", address)
        except RedisFailed as error:
            log.warning("%s stays registered for %g s: %s", address, ttl_s, error)


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

"""What stands behind each kind of source: something real that a test changes and breaks."""

import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest
from tests.fakes.dns_server import DnsServer
from tests.fakes.kubernetes import KubernetesServer
from tests.fakes.pods import pod, write_kubeconfig
from tests.fakes.redis import MISSING, RedisServer, redis_server

from kvrouter.engines.engine import Role
from kvrouter.membership.discovery import make_source
from kvrouter.membership.discovery.base import EngineSource, Listener, SourceContext
from kvrouter.membership.discovery.file import FileSource
from kvrouter.membership.discovery.follow import FlagsSource
from kvrouter.membership.discovery.kubernetes import KubernetesSource, Times
from kvrouter.membership.discovery.redis import EntryKeys
from kvrouter.membership.discovery.register import EngineRegistration
from kvrouter.redis.client import RedisClient

LOOK_S = 0.02
TTL_S = 30.0
KINDS: tuple[str, ...] = ("flags", "file", "dns", "srv", "redis", "k8s")
QUICK = Times(answer_s=1.0, watch_s=2.0, grace_s=1.0, first_pause_s=0.02, longest_pause_s=0.1)


class Backend(Protocol):
    """The same few things for every kind.

    Attributes:
        roles: that one of its sources can name.
        setting: the value of `--discovery`; "" where there is none.
        more: other settings that the router needs for it.
    """

    @property
    def roles(self) -> tuple[Role, ...]: ...
    @property
    def setting(self) -> str: ...
    @property
    def more(self) -> dict[str, str]: ...

    def source(self) -> EngineSource: ...
    async def name(self, members: Mapping[str, Role]) -> None: ...
    async def fail(self) -> None: ...
    async def mend(self) -> None: ...


class FlagsBackend:
    roles = (Role.PREFILL, Role.DECODE)
    setting = ""
    more: dict[str, str] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self._source = FlagsSource({})

    def source(self) -> EngineSource:
        return self._source

    async def name(self, members: Mapping[str, Role]) -> None:
        self._source.set(members)

    async def fail(self) -> None:
        raise NotImplementedError

    mend = fail


class FileBackend:
    roles = (Role.PREFILL, Role.DECODE)
    more: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        self.path = folder / "engines.yaml"
        self.setting = str(self.path)
        self._text = "decode: []\n"

    def source(self) -> EngineSource:
        return FileSource(self.setting, look_s=LOOK_S)

    async def name(self, members: Mapping[str, Role]) -> None:
        lists = {
            role.value: [a for a, r in members.items() if r.serves(role)] for role in self.roles
        }
        lists["store"] = [a for a, r in members.items() if r is Role.STORE]
        self._text = json.dumps(lists)
        await self.mend()

    async def fail(self) -> None:
        self.path.unlink(missing_ok=True)

    async def mend(self) -> None:
        fresh = self.path.with_suffix(".new")
        fresh.write_text(self._text)
        os.replace(fresh, self.path)


class DnsBackend:
    """Names of one role; every engine has the same port for A records."""

    roles = (Role.DECODE,)
    more: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, server: DnsServer, scheme: str, port: int) -> None:
        self._server = server
        self._scheme = scheme
        place = f"decode.test.:{port}" if scheme == "dns" else "_engine._tcp.decode.test."
        options = f"role=decode&resolver={server.resolver}&interval={LOOK_S}"
        self.setting = f"{scheme}://{place}?{options}"

    def source(self) -> EngineSource:
        return make_source(self.setting)

    async def name(self, members: Mapping[str, Role]) -> None:
        if self._scheme == "dns":
            self._server.set("decode.test.", "A", *(a.rpartition(":")[0] for a in members))
            return
        records = []
        for address in members:
            host, _, port = address.rpartition(":")
            target = f"host-{host.replace('.', '-')}.test."
            self._server.set(target, "A", host)
            records.append(f"0 0 {port} {target}")
        self._server.set("_engine._tcp.decode.test.", "SRV", *records)

    async def fail(self) -> None:
        self._server.mood = "fails"

    async def mend(self) -> None:
        self._server.mood = "answers"


class RedisBackend:
    """A real redis-server that holds nothing on disk; who is wanted registers in it."""

    roles = (Role.PREFILL, Role.DECODE)
    setting = "redis"

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.more = {"redis": server.url}
        self._there: dict[str, Role] = {}
        self._wanted: dict[str, Role] = {}
        self._up = True

    def source(self) -> EngineSource:
        return _ClosingSource(self.server.url)

    async def name(self, members: Mapping[str, Role]) -> None:
        self._wanted = dict(members)
        if not self._up:
            return
        link, names = RedisClient(self.server.url), EntryKeys("kvrouter")
        for address, role in (self._there | self._wanted).items():
            one = EngineRegistration(link, names, address, role, TTL_S)
            await (one.renew() if address in self._wanted else one.leave())
        await link.close()
        self._there = dict(members)

    async def fail(self) -> None:
        self.server.kill()
        self._up = False

    async def mend(self) -> None:
        self.server.start()
        self._up = True
        await self.name(self._wanted)


class KubernetesBackend:
    """Pods of an API server that a kubeconfig names, as KUBECONFIG does for a whole process."""

    roles = (Role.PREFILL, Role.DECODE)
    setting = "k8s://test?selector=app=engine"
    more: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, server: KubernetesServer) -> None:
        self.server = server

    def source(self) -> EngineSource:
        return KubernetesSource(self.setting, SourceContext(), times=QUICK)

    async def name(self, members: Mapping[str, Role]) -> None:
        places = {a.removeprefix("kv://"): role for a, role in members.items()}
        wanted = {f"engine-{a.replace(':', '-')}": (a, role) for a, role in places.items()}
        for gone in set(self.server.names("pods")) - wanted.keys():
            self.server.delete("pods", gone)
        for name, (address, role) in wanted.items():
            host, _, port = address.rpartition(":")
            kind = "kv" if role is Role.STORE else "http"
            self.server.put("pods", name, **pod(host, int(port), role=role.value, port_name=kind))

    async def fail(self) -> None:
        self.server.mood = "fails"
        self.server.end_watches()

    async def mend(self) -> None:
        self.server.mood = "answers"


@asynccontextmanager
async def kubernetes_server(folder: Path) -> AsyncIterator[KubernetesServer]:
    """An API server that this process finds as kubectl does, by KUBECONFIG."""
    server = KubernetesServer()
    await server.start()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KUBECONFIG", str(write_kubeconfig(folder, server.url)))
        try:
            yield server
        finally:
            await server.stop()


class _ClosingSource:
    """A source whose link ends with it, as the router's ends with the router."""

    name = "redis"

    def __init__(self, url: str) -> None:
        self._url = url

    async def follow(self, listener: Listener) -> None:
        link = RedisClient(self._url)
        try:
            await make_source("redis", SourceContext(link)).follow(listener)
        finally:
            await link.close()


@asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    server = DnsServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def backend_of(kind: str, folder: Path, port: int = 8000) -> AsyncIterator[Backend]:
    """The backend of a kind, which names nobody yet; ends what it started.

    Args:
        kind: one of KINDS.
        folder: for its files.
        port: of all engines, where addresses alone are named.
    """
    made: Backend
    if kind in ("flags", "file"):
        made = FlagsBackend() if kind == "flags" else FileBackend(folder)
        await made.name({})
        yield made
        return
    if kind == "redis":
        if redis_server() is None:
            pytest.skip(MISSING)
        with RedisServer(folder) as redis:
            yield RedisBackend(redis)
        return
    if kind == "k8s":
        async with kubernetes_server(folder) as cluster:
            yield KubernetesBackend(cluster)
        return
    async with dns_server() as server:
        made = DnsBackend(server, kind, port)
        await made.name({})
        yield made

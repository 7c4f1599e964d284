"""Follows a collection of Kubernetes: lists it, watches it, and lists it again after a failure."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvrouter.engines.engine import Role
from kvrouter.membership.discovery.base import MAX_MEMBERS, both_roles
from kvrouter.membership.kubernetes.api import ApiFailed, Session
from kvrouter.membership.kubernetes.engines import of_pod, of_slice, read_url
from kvrouter.membership.kubernetes.environment import ServerFinder
from kvrouter.membership.kubernetes.mirror import Expired, Mirror, Unreadable
from kvrouter.membership.kubernetes.objects import EndpointSlice, Pod
from kvrouter.options.addresses import bare_address
from kvrouter_store.connection.reconnect import BackOff

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrouter.membership.discovery.base import Listener, SourceContext
    from kvrouter.membership.kubernetes.api import ApiServer

    AnyMirror = Mirror[Pod] | Mirror[EndpointSlice]

MOST_TOLD: Final = 32  # odd objects in the log at a time
NEWS_S: Final = 0.02
"""Between two looks at a watch: each report costs the more, the more engines there are."""
PAGE: Final = 100  # objects in one page of a list; each has some 10 KB

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: of one answer, of a watch until the server ends it, and until it counts as dead.

    A watch that only the client still believes in is noticed after `watch_s` and `grace_s`; pauses
    double from the first to the longest, and each is shortened at random by up to a half.
    """

    answer_s: float = 10.0
    watch_s: float = 60.0
    grace_s: float = 5.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 8.0


@dataclass(eq=False, repr=False)
class KubernetesSource:
    """Names the engines of Pods, or of a Service; see `engines`.

    A server that fails, hangs or refuses changes nothing. ValueError: the URL is wrong.
    """

    text: str  # the URL
    # Takes the bootstrap ports that annotations tell, and which engines run on a store node's host.
    context: SourceContext
    # The server and fresh credentials, for each watch anew; raises ApiFailed.
    find: Callable[[str | None], Awaitable[ApiServer]] = field(default_factory=ServerFinder)
    times: Times = Times()

    def __post_init__(self) -> None:
        self._wanted = read_url(self.text)
        self.name = self._wanted.name
        self._bootstrap_ports: dict[str, int] = {}
        self._nodes: dict[str, str] = {}
        self._stores: dict[str, str] = {}  # of hosts with engines: also one that left
        self.context.bootstrap_ports.maps.append(self._bootstrap_ports)
        self.context.nodes.maps.append(self._nodes)
        self._told: dict[str, str] = {}  # of odd objects, as they were logged

    async def follow(self, listener: Listener) -> None:
        """See `EngineSource`. Reports events at once, and lost ones when the watch ends."""
        times, mirror = self.times, self._mirror()
        pause = BackOff(times.first_pause_s, times.longest_pause_s)
        loop = asyncio.get_running_loop()
        while True:
            read, begun, ended = mirror.read, loop.time(), False
            try:
                await self._list_and_watch(mirror, listener)
                ended = True
            except Expired:
                mirror.version = ""
            except (ApiFailed, Unreadable) as error:
                mirror.version = ""
                listener.failed(str(error))
                if isinstance(error, Unreadable):
                    read = mirror.read  # its events count as no answer
            if mirror.read > read or loop.time() - begun > times.longest_pause_s:
                pause.succeeded()
                if ended:
                    continue
            pause.failed(loop.time())
            await asyncio.sleep(pause.remaining_s(loop.time()) * random.uniform(0.5, 1.0))

    async def _list_and_watch(self, mirror: AnyMirror, listener: Listener) -> None:
        """List if that is due, then watch until the server ends it.

        Expired, ApiFailed, Unreadable: see there.
        """
        times, wanted = self.times, self._wanted
        async with Session(await self.find(wanted.context), times.answer_s) as session:
            group = "/apis/discovery.k8s.io/v1" if wanted.slices else "/api/v1"
            kind = "endpointslices" if wanted.slices else "pods"
            namespace = wanted.namespace or session.server.namespace
            path = f"{group}/namespaces/{namespace}/{kind}"
            if not mirror.version:
                before = mirror.engines()
                await self._list(session, path, mirror)
                # Without news the source is well only when it can be watched too.
                if mirror.engines() != before:
                    self._report(mirror, listener)
            watch_s = int(times.watch_s * random.uniform(0.75, 1.25)) or 1
            query = {
                "labelSelector": wanted.selector,
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": mirror.version,
                "timeoutSeconds": str(watch_s),
            }
            mirror.begin_watch()
            async with session.watch(path, query, watch_s + times.grace_s) as chunks:
                self._report(mirror, listener)
                async for chunk in chunks:
                    changed = True  # also before an error in the same chunk
                    try:
                        changed = mirror.feed(chunk)
                    finally:
                        if changed:
                            self._report(mirror, listener)
                    await asyncio.sleep(NEWS_S)  # what comes meanwhile is one chunk

    async def _list(self, session: Session, path: str, mirror: AnyMirror) -> None:
        query = {"labelSelector": self._wanted.selector, "limit": str(PAGE)}
        mirror.begin_list()
        while more := mirror.page(await session.page(path, query)):
            query["continue"] = more

    def _report(self, mirror: AnyMirror, listener: Listener) -> None:
        found = mirror.engines()
        ports = {bare_address(f.address): f.bootstrap_port for f in found if f.bootstrap_port}
        self._bootstrap_ports.clear()
        self._bootstrap_ports.update(ports)
        stores = {f.host: f.address for f in found if f.role is Role.STORE and f.host}
        engines = {f.host for f in found if f.role is not Role.STORE}
        kept = {host: url for host, url in self._stores.items() if host in engines}
        self._stores = kept | stores
        self._nodes.clear()
        self._nodes.update(
            (bare_address(f.address), self._stores[f.host])
            for f in found
            if f.role is not Role.STORE and f.host in self._stores
        )
        listener.named(both_roles((each.address, each.role) for each in found))
        told = {name: said for name, said in self._told.items() if name in mirror.odd}
        for name, sentence in mirror.odd.items():
            if told.get(name) != sentence and (name in told or len(told) < MOST_TOLD):
                told[name] = sentence
                log.warning("discovery %s: %s is left out: %s", self.name, name, sentence)
        self._told = told

    def _mirror(self) -> AnyMirror:
        wanted = self._wanted
        if wanted.slices:
            return Mirror(EndpointSlice, lambda each: of_slice(each, wanted), MAX_MEMBERS)
        return Mirror(Pod, lambda each: of_pod(each, wanted), MAX_MEMBERS)

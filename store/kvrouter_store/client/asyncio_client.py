"""The asyncio client of the store, for the router: control operations only, it moves no KV.

One pipelined connection (the node's Unix socket if it runs on this host, else TCP), kept up in the
background. Operations fail at once while there is none. One event loop, not safe in threads.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from copy import copy
from typing import Concatenate, NamedTuple, ParamSpec, Self, TypeVar

from kvrouter_store import _core
from kvrouter_store._core import (
    AcquireReply,
    CountReply,
    ManifestsReply,
    MatchReply,
    RegisterReply,
    StatsReply,
    StatusesReply,
    WaitReply,
)
from kvrouter_store.client.asyncio_link import AsyncLink
from kvrouter_store.client.batches import check_upto, hashes_of, questions
from kvrouter_store.client.manifest_ids import encode_register
from kvrouter_store.client.results import Match, RegisteredManifest, next_page, there, understood
from kvrouter_store.connection.address import Address, nearer_path, parse_url
from kvrouter_store.connection.asyncio_tls import asyncio_context, tls_reason
from kvrouter_store.connection.channel import Registration
from kvrouter_store.connection.keep_alive import keep_alive
from kvrouter_store.connection.reconnect import BackOff
from kvrouter_store.connection.tls import ClientTls, sentence
from kvrouter_store.connection.tokens import check_token
from kvrouter_store.errors import (
    KVStoreError,
    StoreClosed,
    StoreRefused,
    StoreUnavailable,
    Untrusted,
)
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.chain import HASH_BYTES
from kvrouter_store.system_errors import reason_of

log = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")
MAX_WAIT_S = _core.MAX_DEADLINE_MS / 1000


class AsyncLease:
    """The first `blocks` blocks are not evicted until `release`, or until the connection breaks."""

    __slots__ = ("_link", "blocks", "lease_id")

    def __init__(self, link: AsyncLink, lease_id: int, blocks: int) -> None:
        self.lease_id = lease_id
        self.blocks = blocks
        self._link: AsyncLink | None = link if lease_id else None

    def release(self) -> None:
        """Give the lease back within moments, without waiting for the node. Idempotent."""
        link, self._link = self._link, None
        if link is not None:
            link.release_soon(self.lease_id)


class AsyncLanding(NamedTuple):
    """The outcome of a wait. `landed` is False after a time-out; `blocks` are matched now."""

    landed: bool
    blocks: int
    lease: AsyncLease | None = None


class AsyncStoreClient:
    """A client of one store node. `async with` starts it and ends it.

    Operations raise StoreUnavailable (at once while there is no connection, else within
    `deadline_s`; Untrusted while TLS fails), StoreRefused where the node refuses (Unauthorized
    while it wants another `token`), StoreClosed after `close`. A cancelled operation leaves nothing
    behind at the node. A `token`, or `tls` (files of a client of kvs://), that cannot be used is a
    ValueError.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "",
        token: str = "",
        tls: ClientTls = ClientTls(),  # noqa: B008 (immutable)
        deadline_s: float = 2.0,
    ) -> None:
        self.url = url
        self.on_change: Callable[[str], None] | None = None
        """Called with "" for each connection, and with the reason each time that there is none."""
        self.deadline_s = deadline_s
        self._address = parse_url(url)
        self._tls = asyncio_context(self._address, tls)
        self._name = name
        self._token = check_token(token)
        self._refusal: StoreRefused | Untrusted | None = None
        self._link: AsyncLink | None = None
        self._remembered: dict[bytes, tuple[Manifest, str, str]] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._tried = asyncio.Event()  # an attempt has ended since there was a connection
        self._closed = False

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._link is not None and self._link.standing

    @property
    def epoch(self) -> int:
        """The life of the node that the connection leads to; 0 without one."""
        return self._link.epoch if self._link is not None and self._link.standing else 0

    def start(self) -> None:
        """Connect in the background, and again whenever the connection breaks."""
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="kvstore")

    async def wait_connected(self, deadline_s: float) -> bool:
        """Wait for a connection; False if there is none after `deadline_s` seconds."""
        return await self._connected_by(self._up, deadline_s)

    async def reached(self) -> bool:
        """Whether there is a connection; waits at most for the first attempt to get one."""
        return await self._connected_by(self._tried, self.deadline_s)

    async def close(self) -> None:
        """End the connection and what it holds. Idempotent."""
        self._closed = True
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
        if self._link is not None:
            self._link.close()
            self._link = None

    async def __aenter__(self) -> Self:
        self.start()
        await self.wait_connected(self.deadline_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def register(
        self, manifest: Manifest, engine: str = "", refusal: str = ""
    ) -> Registration:
        """Register a manifest, now and with every new connection."""
        self._remembered[manifest.digest] = (manifest, engine, refusal)
        return await self._announce(self._standing(), manifest, engine, refusal)

    async def manifests(self) -> list[RegisteredManifest]:
        """What is registered with the node, and by which living engines."""
        found: list[RegisteredManifest] = []
        after: int | None = 0
        while after is not None:
            page = await self._ask(ManifestsReply, _core.encode_manifests, after)
            for info in page.manifests:
                found += understood([info])
                await asyncio.sleep(0)  # a document takes milliseconds
            after = next_page(page, after)
        return found

    async def match(self, manifest: Manifest, hashes: bytes, *, promote: bool = False) -> Match:
        """How many leading blocks the node has in full, and where.

        With `promote` the node brings what is on its disk alone into memory, for a reader to come.
        """
        link, manifest_id = await self._known(manifest)
        found: Match | None = None
        for some in questions(hashes):
            names = manifest_id, some, promote
            reply = await link.ask(MatchReply, self.deadline_s, _core.encode_match, *names)
            found = found.then(Match.of(reply)) if found is not None else Match.of(reply)
            if reply.blocks * HASH_BYTES < len(some):
                break
        return found or Match(0)

    async def held(self, manifest: Manifest, hashes: bytes) -> list[bool]:
        """Of each block, in any order, whether the node has it in full, in memory or on its disk.

        A node of 0.1.0 does not know the request: StoreRefused, and the connection ends.
        """
        link, manifest_id = await self._known(manifest)
        found: list[bool] = []
        for some in questions(hashes):
            names = manifest_id, some
            reply = await link.ask(StatusesReply, self.deadline_s, _core.encode_held, *names)
            found += there(reply)
        return found

    async def acquire(
        self, manifest: Manifest, hashes: bytes, part: int | None = None
    ) -> AsyncLease:
        """A lease on the leading blocks that the node has: of one part, or of all.

        It is on the first `MAX_HASHES` at most.
        """
        link, manifest_id = await self._known(manifest)
        names = manifest_id, part, hashes[: _core.MAX_HASHES * HASH_BYTES]
        reply = await link.ask(AcquireReply, self.deadline_s, _core.encode_acquire, *names)
        return AsyncLease(link, reply.lease_id, reply.blocks)

    async def wait(
        self, manifest: Manifest, hashes: bytes, upto: int, deadline_s: float, lease: bool = False
    ) -> AsyncLanding:
        """Wait until the first `upto` blocks are there in full, at most `deadline_s` seconds.

        With `lease`, a landing takes a lease on them in the same step. ValueError: `upto` exceeds
        the chain or `MAX_HASHES`.
        """
        check_upto(hashes, upto)
        link, manifest_id = await self._known(manifest)
        wait_s = max(0.0, min(deadline_s, MAX_WAIT_S))
        asked = hashes_of(hashes, range(upto))
        wanted = manifest_id, asked, upto, round(wait_s * 1000), lease
        reply = await link.ask(WaitReply, wait_s + self.deadline_s, _core.encode_wait, *wanted)
        held = AsyncLease(link, reply.lease_id, upto) if reply.landed and lease else None
        return AsyncLanding(reply.landed, reply.blocks, held)

    async def delete(self, manifest: Manifest, hashes: bytes) -> int:
        """Forget blocks (all their parts); how many the node had."""
        link, manifest_id = await self._known(manifest)
        deleted = 0
        for some in questions(hashes):
            names = manifest_id, some
            reply = await link.ask(CountReply, self.deadline_s, _core.encode_delete, *names)
            deleted += reply.count
        return deleted

    async def purge(self) -> int:
        """Forget all blocks; how many there were."""
        return (await self._ask(CountReply, _core.encode_purge)).count

    async def stats(self) -> dict[str, int]:
        """The node's gauges, and its counters (names in _total)."""
        return (await self._ask(StatsReply, _core.encode_stats)).values

    async def _connected_by(self, event: asyncio.Event, deadline_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await event.wait()
        return self.connected

    def _standing(self) -> AsyncLink:
        link = self._link
        if link is not None and link.standing:
            return link
        if self._closed:
            raise StoreClosed("the store client is closed")
        if self._refusal is not None:
            raise copy(self._refusal)  # each raise adds a traceback to it
        raise StoreUnavailable(f"there is no connection to the store at {self.url}")

    async def _ask(
        self,
        kind: type[R],
        encode: Callable[Concatenate[int, P], bytes],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> R:
        return await self._standing().ask(kind, self.deadline_s, encode, *arguments, **options)

    async def _known(self, manifest: Manifest) -> tuple[AsyncLink, int]:
        """The connection, and the id that the node behind it gave to the manifest."""
        link = self._standing()
        known = link.ids.get(manifest.digest)
        if known is None:
            known = (await self._announce(link, manifest)).manifest_id
        return link, known

    async def _announce(
        self, link: AsyncLink, manifest: Manifest, engine: str = "", refusal: str = ""
    ) -> Registration:
        names = manifest, engine, refusal
        reply = await link.ask(RegisterReply, self.deadline_s, encode_register, *names)
        if not refusal:
            link.ids[manifest.digest] = reply.manifest_id
        return Registration(link.epoch, reply.manifest_id, reply.spec_id, tuple(reply.part_ids))

    async def _keep(self) -> None:
        """Keep a connection up, with pauses after failures."""
        loop = asyncio.get_running_loop()
        backoff = BackOff()
        while True:
            try:
                async with asyncio.timeout(self.deadline_s):
                    link = await self._connect()
            except (OSError, TimeoutError, KVStoreError) as error:
                self._note(error)
                self._tell(self._why(error))
                self._tried.set()
                backoff.failed(loop.time())
                await asyncio.sleep(backoff.remaining_s(loop.time()))
                continue
            backoff.succeeded()
            self._refusal = None
            self._link = link
            self._up.set()
            self._tried.set()
            self._tell("")
            try:
                self._tell(await link.lost)
            finally:
                self._up.clear()
                self._tried.clear()
                link.close()

    def _note(self, error: BaseException) -> None:
        """Remember, and log once, a refusal (a token, a certificate): retries do not help."""
        refusal = error if isinstance(error, StoreRefused | Untrusted) else None
        if refusal is not None and self._refusal is None and self.on_change is None:
            log.warning("%s: %s", self.url, refusal)
        self._refusal = refusal

    def _why(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError):
            return f"it did not answer within {self.deadline_s:g} s"
        return reason_of(error) if isinstance(error, OSError) else str(error)

    def _tell(self, reason: str) -> None:
        if self.on_change is not None:
            self.on_change(reason)

    async def _connect(self) -> AsyncLink:
        link = await self._open(self._address)
        try:
            hello = await link.shake_hands(self._name, self._token, self.deadline_s)
            path = nearer_path(hello.unix_path, hello.boot_id) if self._address.host else ""
            nearer = await self._open_socket(path, hello.epoch) if path else None
            if nearer is not None:
                link.close()
                link = nearer
            for manifest, engine, refusal in list(self._remembered.values()):
                await self._announce(link, manifest, engine, refusal)
        except BaseException:
            link.close()
            raise
        return link

    async def _open_socket(self, path: str, epoch: int) -> AsyncLink | None:
        """The Unix socket, if it leads to the node of this epoch (not so in every container)."""
        with contextlib.ExitStack() as undo, contextlib.suppress(OSError, KVStoreError):
            link = await self._open(Address(path=path))
            undo.callback(link.close)
            hello = await link.shake_hands(self._name, self._token, self.deadline_s)
            if hello.epoch == epoch:
                undo.pop_all()
                return link
        return None

    async def _open(self, address: Address) -> AsyncLink:
        loop = asyncio.get_running_loop()
        if address.path:
            made = await loop.create_unix_connection(lambda: AsyncLink(loop), address.path)
            return made[1]
        try:
            made = await loop.create_connection(
                lambda: AsyncLink(loop), address.host, address.port, ssl=self._tls
            )
        except ssl.SSLError as error:
            raise Untrusted(sentence(tls_reason(error), address)) from error
        keep_alive(made[0].get_extra_info("socket"))
        return made[1]

"""`kvrouter store`: one store node and its HTTP side, until SIGTERM or SIGINT."""

import asyncio
import errno
import logging
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from pydantic import ByteSize

from kvrouter_store._core import StoreServer, TlsContext
from kvrouter_store.descriptors import connections, lack, raise_limit
from kvrouter_store.free_memory import limit_bytes, reader
from kvrouter_store.log import log_to_stderr
from kvrouter_store.node.block_events import publishing_events
from kvrouter_store.node.http_api import HttpApi, Respond
from kvrouter_store.node.own_client import OwnClient, own_address
from kvrouter_store.node.placement import Advice, advice, placement_notes, plan
from kvrouter_store.node.rdma_host import serving_rdma
from kvrouter_store.node.settings import GONE_POLICY, POLICIES, SECONDS_POLICY, StoreSettings
from kvrouter_store.node.signals import Signals, drain, reload_on_hangup
from kvrouter_store.node.start_checks import (
    StartRefused,
    TenantToken,
    check_disk,
    https_of,
    plain_wire_warning,
    quotas_of,
    tls_of,
    tokens_of,
)
from kvrouter_store.node.tiers import serving_tiers, tiers_of
from kvrouter_store.rdma.device import open_device
from kvrouter_store.rdma.initiator import Opens
from kvrouter_store.system_errors import reason_of

log = logging.getLogger("kvstore")
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
HTTP_GRACE_S = 3.0
LEAST_FLUSH_S = 0.5
MOST_CLIENTS = 1024
FILES_OF_A_CLIENT = 2
"""Its socket and, if it maps the pool, the pipe that tells of its end."""


def disk_refusal(settings: StoreSettings, error: OSError) -> StartRefused | None:
    """Why the disk could not be opened, with the remedy; None for an error of something else."""
    if not settings.disk or error.filename != settings.disk:
        return None
    where, size = f"--disk {settings.disk}", settings.disk_size.human_readable()
    full = f"has no room for {size}: give a smaller --disk-size, or make room"
    sentences = {
        errno.EBUSY: "is used by another node: give each node a folder of its own",
        errno.ENOSPC: full,
        errno.EDQUOT: full,
        errno.EFBIG: f"may have no file of {size}: give a smaller --disk-size, or raise ulimit -f",
        errno.EMEDIUMTYPE: "has a file kvstore.data that is not of this version of the store: move "
        "it away, or give another folder",
    }
    sentence = sentences.get(error.errno or 0, f"cannot be used: {error.strerror}; see --disk-io")
    return StartRefused(f"{where} {sentence}")


@contextmanager
def logging_disk_notices(server: StoreServer) -> Iterator[None]:
    """Log what happens to the disk, when it happens. Needs the running loop."""

    def take() -> None:
        for bad, sentence in server.take_notices():
            log.log(logging.WARNING if bad else logging.INFO, "%s", sentence)

    descriptor = server.notice_fd
    if descriptor < 0:
        yield
        return
    take()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, take)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        take()


async def flush_disk(server: StoreServer, timeout_s: float) -> None:
    """Write what is in memory alone to the disk, within `timeout_s`; the log says how it ended."""
    why, durable, _ = await asyncio.to_thread(server.flush_disk, timeout_s)
    if why:
        log.warning("not everything is on the disk: %s; %d blocks are", why, durable)
    else:
        log.info("%d blocks are durable on the disk", durable)


class HttpServer(Protocol):
    """Serves HTTP; without TLS where there is no context."""

    async def serve(self, door: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Accept connections on a bound socket, and own it."""

    async def close(self, grace_s: float) -> None:
        """Stop; answers get `grace_s` to end."""


def run(
    settings: StoreSettings, http: Callable[[Respond], HttpServer], opens: Opens = open_device
) -> int:
    """Serve until a signal ends that. Returns the exit code: 0, or 2 where it could not start.

    http: makes the server of the HTTP side.
    opens: opens the devices for RDMA.
    """
    log_to_stderr(settings.log_level, settings.log_format)
    try:
        asyncio.run(_serve(settings, http, opens))
    except StartRefused as error:
        sys.stderr.write(f"kvrouter store: {error}\n")
        return 2
    except (OSError, MemoryError) as error:
        of_disk = disk_refusal(settings, error) if isinstance(error, OSError) else None
        sys.stderr.write(f"kvrouter store: {of_disk or _remedy(settings, error)}\n")
        return 2
    return 0


async def _serve(
    settings: StoreSettings, http: Callable[[Respond], HttpServer], opens: Opens
) -> None:
    tenants = tokens_of(settings)
    tls, https = tls_of(settings), https_of(settings)
    tiers = tiers_of(settings)
    signals = Signals()
    with ExitStack() as stack:
        listener = _listen(settings.host, settings.http_port)
        stack.callback(listener.close)
        server, remarks = _start_store(settings, tenants, tls)
        stack.callback(server.stop)
        no_rdma = stack.enter_context(serving_rdma(server, settings, tenants, opens))
        host = _host_in_url(settings.host)
        url = f"{'kvs' if tls else 'kv'}://{host}:{server.port}"
        http_port = listener.getsockname()[1]
        near = url.replace(settings.host, ANY_ADDRESS.get(settings.host, settings.host))
        own_url, own_tls = own_address(settings, near, server.unix_path)
        client = OwnClient(own_url, own_tls)
        below = stack.enter_context(serving_tiers(server, settings, tiers, own_url, own_tls))
        api = HttpApi(server, client, tenants=bool(tenants), tiers=below)
        http_server = http(api.answer)
        stack.enter_context(logging_disk_notices(server))
        stack.enter_context(publishing_events(server, settings, tenants))
        reload_on_hangup(settings, server, https)  # before the line that invites signals
        await http_server.serve(listener, https)
        print(
            f"kvstore ready: {url} {'https' if tls else 'http'}://{host}:{http_port} "
            f"unix:{server.unix_path or 'none'} "
            f"pool:{ByteSize(server.stats()['pool_bytes']).human_readable()}",
            flush=True,
        )
        _log(remarks)
        if no_rdma:
            log.info("blocks do not travel over RDMA: %s", no_rdma)
        try:
            await _left(server, settings, signals)
        finally:
            await http_server.close(0.0 if signals.at_once.is_set() else HTTP_GRACE_S)


async def _left(server: StoreServer, settings: StoreSettings, signals: Signals) -> None:
    """Wait for a signal, and let the node drain. HTTP is served meanwhile: /healthz says so."""
    await signals.leave.wait()
    end = time.monotonic() + settings.drain_timeout
    await drain(server, settings.drain_timeout, signals.at_once)
    if settings.disk and not signals.at_once.is_set():
        # Blocks are written while clients end; little is left for the last flush.
        await flush_disk(server, max(end - time.monotonic(), LEAST_FLUSH_S))


def _start_store(
    settings: StoreSettings, tenants: list[TenantToken], tls: TlsContext | None
) -> tuple[StoreServer, list[Advice]]:
    """A node, and what to say once it is ready."""
    quotas = quotas_of(settings, tenants)
    check_disk(settings)
    raised = raise_limit()
    path = _own_unix_path(settings)
    read, pages, prefault = reader(), settings.huge_pages, settings.prefault
    placing = plan(read, int(settings.memory), pages, settings.numa, prefault=prefault)
    if placing.refusal:
        raise StartRefused(placing.refusal)
    _check_memory(settings, None if placing.explicit else limit_bytes(read))
    server = StoreServer(
        host=settings.host,
        port=settings.port,
        unix_path=str(path) if path else None,
        pool_bytes=int(settings.memory),
        granule_bytes=int(settings.granule),
        prefault=settings.prefault,
        eviction=_policy(settings),
        unix_mode=int(settings.unix_socket_mode, 8),
        tenants=tenants,
        quotas=quotas,
        tls=tls,
        placement=placing.placement,
        disk=settings.disk or None,
        disk_bytes=int(settings.disk_size),
        disk_io=settings.disk_io,
        disk_read_timeout_s=settings.disk_read_timeout,
        reserve_bytes=int(settings.reserve_limit) or None,
        reserve_timeout_s=settings.reserve_timeout,
        digests=settings.digests == "checked",
        max_connections=connections(MOST_CLIENTS, FILES_OF_A_CLIENT),
    )
    if few := lack(MOST_CLIENTS, FILES_OF_A_CLIENT):
        log.warning("%s", few)
    if danger := plain_wire_warning(settings):
        log.warning("%s", danger)
    # Read before the pool takes its memory, and warnings first: the kernel may end the process.
    lacks = advice(read, int(settings.memory), set_aside=placing.explicit)
    _log(one for one in lacks if one.level >= logging.WARNING)
    server.start()
    log.info("%s", raised)
    notes = [*placement_notes(placing, server.placed)]
    _log(one for one in notes if one.level >= logging.WARNING)
    return server, [one for one in (*lacks, *notes) if one.level < logging.WARNING]


def _policy(settings: StoreSettings) -> str:
    policy = settings.eviction
    if policy == GONE_POLICY:
        policy = POLICIES[0]
        log.warning("--eviction %s is deprecated: this node uses %s", GONE_POLICY, policy)
    if settings.eviction_objective == "tokens":
        return policy
    if settings.disk or settings.tier:
        log.warning(
            "--eviction-objective seconds is for nodes without --disk and --tier: what those have "
            "is loaded, not computed, and the time of that is saved by tokens"
        )
    return SECONDS_POLICY


def _check_memory(settings: StoreSettings, limit: int | None) -> None:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pool = f"a pool of {settings.memory.human_readable()} does not fit into"
    if settings.memory > memory_bytes:
        raise MemoryError(f"{pool} {ByteSize(memory_bytes).human_readable()}")
    if limit is not None and settings.memory > limit:
        raise StartRefused(
            f"{pool} the {ByteSize(limit).human_readable()} of memory to which this container "
            "(cgroup) is limited: give a smaller --memory, or the container more (docker run "
            "--memory, resources.limits.memory, MemoryMax=)"
        )


def _own_unix_path(settings: StoreSettings) -> Path | None:
    path = settings.unix_path()
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid not in {0, os.getuid()}:
            raise PermissionError(f"{path.parent} belongs to another user")
    return path


def _log(advice: Iterable[Advice]) -> None:
    for one in advice:
        log.log(one.level, "%s", one.sentence)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, dualstack_ipv6=both)


def _host_in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _remedy(settings: StoreSettings, error: Exception) -> str:
    where = f"{settings.host} ports {settings.port} and {settings.http_port}"
    why = reason_of(error) if isinstance(error, OSError) else error
    return (
        f"cannot serve on {where}: {why}; choose a free --port, --http-port or --unix-socket, "
        "or a --memory that this machine has"
    )

"""`kvrouter store`: one store node and its HTTP side, until SIGTERM or SIGINT."""

import asyncio
import contextlib
import functools
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from hypercorn.asyncio import serve as serve_http
from pydantic import ByteSize
from quart import Quart

from kvrouter_store._core import EVICTION_POLICIES, StoreServer, TlsContext
from kvrouter_store.log import log_to_stderr
from kvrouter_store.node.disk_notices import check_disk, flush, refusal, telling
from kvrouter_store.node.drain import Signals, drain
from kvrouter_store.node.host_advice import Advice, advice, read_files
from kvrouter_store.node.http_api import create_app
from kvrouter_store.node.http_auth import TenantsNode, bearer, require_token
from kvrouter_store.node.placement import plan, reader, told
from kvrouter_store.node.rdma_serving import serving_rdma
from kvrouter_store.node.renewal import HttpConfig, on_hangup
from kvrouter_store.node.selftest import SelfTest
from kvrouter_store.node.settings import GONE_POLICY, StoreSettings
from kvrouter_store.node.start_checks import StartRefused, TenantToken, quotas_of, tokens_of
from kvrouter_store.node.tls import advice_on_the_wire, own_client, tls_of
from kvrouter_store.rdma.device import open_device
from kvrouter_store.rdma.initiator import Opens
from kvrouter_store.system_errors import reason_of

__all__ = ["run"]

log = logging.getLogger("kvstore")
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
HTTP_GRACE_S = 3.0
LEAST_FLUSH_S = 0.5


def run(settings: StoreSettings, opens: Opens = open_device) -> int:
    """Serve until told to stop. Returns the exit code: 0, or 2 where it could not start.

    opens: opens the devices for RDMA.
    """
    log_to_stderr(settings.log_level)
    try:
        tenants = tokens_of(settings)
        rdma = functools.partial(serving_rdma, settings=settings, tenants=tenants, opens=opens)
        quotas, tls = quotas_of(settings, tenants), tls_of(settings)
        asyncio.run(_serve(settings, tenants, quotas, tls, rdma))
    except StartRefused as error:
        print(f"kvrouter store: {error}", file=sys.stderr)
        return 2
    except (OSError, MemoryError) as error:
        of_disk = refusal(settings, error) if isinstance(error, OSError) else None
        print(f"kvrouter store: {of_disk or _remedy(settings, error)}", file=sys.stderr)
        return 2
    return 0


async def _serve(
    settings: StoreSettings,
    tenants: list[TenantToken],
    quotas: dict[str, int],
    tls: TlsContext | None,
    rdma: Callable[[StoreServer], AbstractContextManager[None]],
) -> None:
    signals = Signals()
    door = _listen(settings.host, settings.http_port)
    try:
        server = _start_store(settings, tenants, quotas, tls)
    except BaseException:
        door.close()
        raise
    with ExitStack() as stack:
        stack.callback(server.stop)
        stack.enter_context(rdma(server))
        host = _host_in_url(settings.host)
        url = f"{'kvs' if tls else 'kv'}://{host}:{server.port}"
        http_port = door.getsockname()[1]
        own_url = url.replace(settings.host, ANY_ADDRESS.get(settings.host, settings.host))
        node = TenantsNode(server) if tenants else server
        visited, own_tls = own_client(settings, own_url, server.unix_path)
        app = create_app(node, SelfTest(visited, bearer if tenants else str, own_tls))
        require_token(app, server.admits)
        config = _http_config(settings, door.detach())
        stack.enter_context(telling(server))
        on_hangup(settings, server, config)  # before somebody is told that it can be asked
        print(
            f"kvstore ready: {url} {'https' if tls else 'http'}://{host}:{http_port} "
            f"unix:{server.unix_path or 'none'} "
            f"pool:{ByteSize(server.stats()['pool_bytes']).human_readable()}",
            flush=True,
        )
        await _serve_until_left(app, config, server, settings, signals)


def _http_config(settings: StoreSettings, door: int) -> HttpConfig:
    config = HttpConfig()
    config.bind = [f"fd://{door}"]
    config.certfile = settings.tls_cert_file or None
    config.keyfile = settings.tls_key_file or None
    config.create_ssl_context()  # of the same files as the node's, whatever becomes of them
    config.graceful_timeout = HTTP_GRACE_S
    config.errorlog = logging.getLogger("kvrouter_store.node.http_api")
    return config


async def _serve_until_left(
    app: Quart, config: HttpConfig, server: StoreServer, settings: StoreSettings, signals: Signals
) -> None:
    """Serve HTTP, also while the node drains: it says so in /healthz."""

    async def left() -> None:
        await signals.leave.wait()
        end = time.monotonic() + settings.drain_timeout
        await drain(server, settings.drain_timeout, signals.at_once)
        if settings.disk and not signals.at_once.is_set():
            # What stands in memory is written while clients end; little is left for the last.
            await flush(server, max(end - time.monotonic(), LEAST_FLUSH_S))

    http = asyncio.ensure_future(serve_http(app, config, shutdown_trigger=left))
    at_once = asyncio.ensure_future(signals.at_once.wait())
    await asyncio.wait({http, at_once}, return_when=asyncio.FIRST_COMPLETED)
    at_once.cancel()
    if http.done():
        return http.result()
    config.graceful_timeout = 0
    http.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await http


def _start_store(
    settings: StoreSettings,
    tenants: list[TenantToken],
    quotas: dict[str, int],
    tls: TlsContext | None,
) -> StoreServer:
    check_disk(settings)
    path = _own_unix_path(settings)
    _check_memory(settings)
    placing = plan(
        reader(),
        int(settings.memory),
        settings.huge_pages,
        settings.numa,
        prefault=settings.prefault,
    )
    if placing.refusal:
        raise StartRefused(placing.refusal)
    server = StoreServer(
        host=settings.host,
        port=settings.port,
        unix_path=str(path) if path else None,
        pool_bytes=int(settings.memory),
        granule_bytes=int(settings.granule),
        prefault=settings.prefault,
        eviction=_policy(settings),
        unix_mode=int(settings.unix_socket_mode),
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
    )
    if danger := advice_on_the_wire(settings):
        log.warning("%s", danger)
    # Read before the pool takes its part; what may end the process is said before it does.
    lacks = advice(read_files(), int(settings.memory), set_aside=placing.explicit)
    _tell(one for one in lacks if one.level >= logging.WARNING)
    server.start()
    _tell(one for one in lacks if one.level < logging.WARNING)
    _tell(told(placing, server.placed))
    return server


def _policy(settings: StoreSettings) -> str:
    if settings.eviction != GONE_POLICY:
        return settings.eviction
    instead = EVICTION_POLICIES[0]
    log.warning("--eviction %s is deprecated: this node uses %s", GONE_POLICY, instead)
    return instead


def _check_memory(settings: StoreSettings) -> None:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if settings.memory > memory_bytes:
        has = ByteSize(memory_bytes).human_readable()
        raise MemoryError(f"a pool of {settings.memory.human_readable()} does not fit into {has}")


def _own_unix_path(settings: StoreSettings) -> Path | None:
    path = settings.unix_path()
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid not in {0, os.getuid()}:
            raise PermissionError(f"{path.parent} belongs to another user")
    return path


def _tell(lacks: Iterable[Advice]) -> None:
    for one in lacks:
        log.log(one.level, "%s", one.sentence)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.socket(family, socket.SOCK_STREAM)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((host, port))
        door.listen()
    except BaseException:
        door.close()
        raise
    return door


def _host_in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _remedy(settings: StoreSettings, error: Exception) -> str:
    where = f"{settings.host} ports {settings.port} and {settings.http_port}"
    why = reason_of(error) if isinstance(error, OSError) else error
    return (
        f"cannot serve on {where}: {why}; choose a free --port, --http-port or --unix-socket, "
        "or a --memory that this machine has"
    )

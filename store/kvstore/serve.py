"""`kvrouter store`: one store node and its HTTP side, until SIGTERM or SIGINT."""

import asyncio
import logging
import os
import signal
import socket
import sys

from hypercorn.asyncio import serve as serve_http
from hypercorn.config import Config
from pydantic import ByteSize

from kvstore._core import StoreServer
from kvstore.config import StoreSettings
from kvstore.http import create_app
from kvstore.visit import Visit

__all__ = ["run"]

log = logging.getLogger("kvstore")
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
DRAIN_S = 3.0


def run(settings: StoreSettings) -> int:
    """Serve until told to stop. Returns the exit code: 0, or 2 where it could not start."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        asyncio.run(_serve(settings))
    except (OSError, MemoryError) as error:
        print(f"kvrouter store: {_remedy(settings, error)}", file=sys.stderr)
        return 2
    return 0


async def _serve(settings: StoreSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    door = _listen(settings.host, settings.http_port)
    try:
        server = _start_store(settings)
    except BaseException:
        door.close()
        raise
    try:
        url = f"kv://{_host_in_url(settings.host)}:{server.port}"
        http_port = door.getsockname()[1]
        own_url = url.replace(settings.host, ANY_ADDRESS.get(settings.host, settings.host))
        app = create_app(server, Visit(own_url))
        print(
            f"kvstore ready: {url} http://{_host_in_url(settings.host)}:{http_port} "
            f"unix:{server.unix_path or 'none'} pool:{settings.memory.human_readable()}",
            flush=True,
        )
        config = Config()
        config.bind = [f"fd://{door.detach()}"]
        config.graceful_timeout = DRAIN_S
        config.errorlog = logging.getLogger("kvstore.http")
        await serve_http(app, config, shutdown_trigger=stop.wait)
        log.info("stopping")
    finally:
        server.stop()


def _start_store(settings: StoreSettings) -> StoreServer:
    path = settings.unix_path()
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid not in {0, os.getuid()}:
            raise PermissionError(f"{path.parent} belongs to another user")
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if settings.memory > memory_bytes:
        has = ByteSize(memory_bytes).human_readable()
        raise MemoryError(f"a pool of {settings.memory.human_readable()} does not fit into {has}")
    server = StoreServer(
        host=settings.host,
        port=settings.port,
        unix_path=str(path) if path else None,
        pool_bytes=int(settings.memory),
        granule_bytes=int(settings.granule),
        prefault=settings.prefault,
        eviction=settings.eviction,
    )
    server.start()
    return server


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
    return (
        f"cannot serve on {where}: {error}; choose a free --port, --http-port or --unix-socket, "
        "or a --memory that this machine has"
    )

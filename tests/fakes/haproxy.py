"""A real HAProxy on a free port of this host, with the configuration that deploy/ recommends."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.fakes.balancer import balancer, placed
from tests.fakes.patience import until

from kvrouter.tools.demo.children import free_port

MISSING = "there is no haproxy (apt-get install haproxy)"
CONFIGURATION = Path(__file__).resolve().parents[2] / "deploy" / "haproxy.cfg"
SOCKET = "haproxy.sock"
"""Where HAProxy tells its state; for tests alone."""


def haproxy_program() -> str | None:
    """The program, or None where it is not installed; Debian has it where only root looks."""
    return shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin")


@asynccontextmanager
async def haproxy(folder: Path, routers: Sequence[int]) -> AsyncIterator[str]:
    """The URL of an HAProxy before two routers on these ports; it ends with its context."""
    program = haproxy_program()
    assert program is not None, MISSING
    port = free_port()
    command = (program, "-db", "-f", configured(folder, routers, port))
    async with balancer(folder / "haproxy.log", port, *command) as url:
        yield url


async def until_haproxy_sees_all(folder: Path) -> None:
    """Return when health checks have found every router ready."""

    async def sees_all() -> bool:
        reader, writer = await asyncio.open_unix_connection(folder / SOCKET)
        writer.write(b"show stat kvrouter 4 -1 typed\n")
        told = (await reader.read()).decode()
        writer.close()
        states = [line for line in told.splitlines() if ".status." in line]
        return len(states) == 2 and all(line.endswith(":UP") for line in states)

    await until(sees_all, look_s=0.1)


def configured(folder: Path, routers: Sequence[int], port: int) -> Path:
    """The file for HAProxy, with these routers in place of those that deploy/ names."""
    places = {f"router-{k}:8000": f"127.0.0.1:{router}" for k, router in enumerate(routers)}
    places["bind :8080"] = f"bind 127.0.0.1:{port}"
    places["global\n"] = f"global\n    stats socket {folder / SOCKET} mode 600\n"
    path = folder / "haproxy.cfg"
    path.write_text(placed(CONFIGURATION, places))
    return path

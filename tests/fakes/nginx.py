"""A real NGINX on a free port of this host, with the configuration that deploy/ recommends."""

import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.fakes.balancer import balancer, placed

from kvrouter.tools.demo.children import free_port

MISSING = "there is no nginx (apt-get install nginx)"
CONFIGURATION = Path(__file__).resolve().parents[2] / "deploy" / "nginx.conf"
AROUND = """
{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/kvrouter.conf;
}}
"""


def nginx_program() -> str | None:
    """The program, or None where it is not installed; Debian has it where only root looks."""
    path = f"{os.environ.get('PATH', '')}{os.pathsep}/usr/sbin"
    return shutil.which("nginx", path=path)


@asynccontextmanager
async def nginx(folder: Path, routers: Sequence[int]) -> AsyncIterator[str]:
    """The URL of an NGINX before two routers on these ports; it ends with its context."""
    program = nginx_program()
    assert program is not None, MISSING
    port = free_port()
    file = configured(folder, routers, port)
    command = (program, "-p", folder, "-e", "stderr", "-c", file)
    async with balancer(folder / "nginx.log", port, *command) as url:
        yield url


def configured(folder: Path, routers: Sequence[int], port: int) -> Path:
    """The file for NGINX, with these routers in place of those that deploy/ names."""
    places = {f"router-{k}:8000": f"127.0.0.1:{router}" for k, router in enumerate(routers)}
    text = placed(CONFIGURATION, {**places, "listen 80;": f"listen 127.0.0.1:{port};"})
    (folder / "kvrouter.conf").write_text(text)
    user = "user root;" if os.geteuid() == 0 else ""
    whole = folder / "nginx.conf"
    whole.write_text(AROUND.format(folder=folder, user=user))
    return whole

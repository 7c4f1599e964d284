"""The router's ports: HTTPS, and a port of its own for administration and metrics."""

import asyncio
import json
import os
import signal
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from pydantic import SecretStr
from tests.fakes.certificates import Authority
from tests.fakes.engine import engines
from tests.fakes.patience import until
from tests.integration.router.conftest import Open, Site, text

from kvrouter.access.ports import Ports
from kvrouter.access.setup import Access
from kvrouter.app.reload import follow
from kvrouter.app.settings import RouterSettings
from kvrouter.control.status import document
from kvrouter.credentials.caller_keys import file_line, new_key
from kvrouter.credentials.tls import client_context
from kvrouter.tools.demo.children import Children

MOVED = ("/metrics", "/workers")
HEALTH = ("/health", "/ready", "/ping", "/live", "/version")


@pytest.fixture
def certificates(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest_asyncio.fixture
async def http(certificates: Authority) -> AsyncIterator[aiohttp.ClientSession]:
    """A client that trusts the certificates and keeps no connection."""
    context = client_context(certificates.ca_file)
    connector = aiohttp.TCPConnector(ssl=context, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


def ports(here: Site) -> Ports:
    return here.app.ports


def control(here: Site, path: str) -> str:
    server = ports(here).control
    assert server is not None
    return f"{ports(here).scheme}://127.0.0.1:{server.port}{path}"


async def status_of(http: aiohttp.ClientSession, url: str, **headers: str) -> int:
    async with http.get(url, headers=headers) as answer:
        await answer.read()
        return answer.status


async def test_administration_and_metrics_are_on_the_control_port_alone(site: Open) -> None:
    here = await site(control_port=0, admin=True)
    for path in (*MOVED, *HEALTH):
        assert await status_of(here.http, control(here, path)) == 200
    for path in MOVED:
        assert (await here.get(path))[0] == 404
    for path in HEALTH:
        assert (await here.get(path))[0] == 200
    assert (await here.post(text()))[0] == 200
    for path in ("/v1/models", "/openapi.json", "/v1/completions"):
        assert await status_of(here.http, control(here, path)) == 404
    published = json.loads((await here.get("/openapi.json"))[1])["paths"]
    assert published == json.loads(json.dumps(document("1", apart=True)["paths"]))
    assert not set(MOVED) & set(published)


async def test_the_control_port_asks_for_no_key_and_workers_for_their_token(site: Open) -> None:
    here = await site(control_port=0, admin=True, api_key=["k"], admin_token=SecretStr("t"))
    assert await status_of(here.http, control(here, "/metrics")) == 200
    assert await status_of(here.http, control(here, "/workers")) == 401
    assert await status_of(here.http, control(here, "/workers"), authorization="Bearer k") == 401
    assert await status_of(here.http, control(here, "/workers"), authorization="Bearer t") == 200
    for path in MOVED:
        assert await status_of(here.http, here.url(path), authorization="Bearer t") == 404


def test_a_token_is_needed_where_others_reach_the_port_of_workers() -> None:
    wide: Any = {"decode": ["d:1"], "admin": True, "host": "0.0.0.0"}
    with pytest.raises(ValueError, match="--admin-token"):
        RouterSettings(**wide)
    assert RouterSettings(**wide, control_port=0).admin
    with pytest.raises(ValueError, match=r"every client that reaches 0\.0\.0\.0"):
        RouterSettings(**wide, control_port=0, control_host="0.0.0.0")


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"ssl_keyfile": "x"}, "need --ssl-certfile"),
        ({"ssl_ca_certs": "x"}, "need --ssl-certfile"),
        ({"ssl_certfile": "/absent"}, "/absent: No such file"),
    ],
)
def test_tls_that_cannot_be_had_is_told_at_the_start(files: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        RouterSettings(decode=["d:1"], **files)


def shown(certificates: Authority) -> dict[str, str]:
    certificate, key = certificates.sign()
    return {"ssl_certfile": certificate, "ssl_keyfile": key}


async def test_both_ports_speak_https_and_nothing_else(
    site: Open, certificates: Authority, http: aiohttp.ClientSession
) -> None:
    here = await site(control_port=0, **shown(certificates))
    url = f"https://127.0.0.1:{here.port}"
    assert await status_of(http, f"{url}/health") == 200
    assert await status_of(http, control(here, "/metrics")) == 200
    async with http.post(f"{url}/v1/completions", json=text(stream=True)) as answer:
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
    with pytest.raises(aiohttp.ClientError):
        await here.get("/health")
    with pytest.raises(aiohttp.ClientError):
        await status_of(http, control(here, "/metrics").replace("https", "http"))


def serial(port: int, certificates: Authority) -> str:
    """Of the certificate that a port shows now; blocks."""
    import socket

    context = client_context(certificates.ca_file)
    with (
        socket.create_connection(("127.0.0.1", port), 20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
    ):
        found = secure.getpeercert()
        assert found is not None
        return str(found["serialNumber"])


async def test_certificates_are_changed_without_dropping_a_stream(
    site: Open, certificates: Authority, http: aiohttp.ClientSession
) -> None:
    files = shown(certificates)
    here = await site(control_port=0, **files)
    server = ports(here).control
    assert server is not None
    both = (here.port, server.port)
    before = [await asyncio.to_thread(serial, port, certificates) for port in both]
    here.decode[0].mode = "held"
    url = f"https://127.0.0.1:{here.port}/v1/completions"
    asking = asyncio.create_task(http.post(url, json=text(stream=True)))
    await here.decode[0].next_began()
    for name, path in shown(certificates).items():
        Path(path).replace(files[name])
    follow(here.app, here.app.settings)
    await ports(here).renewed()
    after = [await asyncio.to_thread(serial, port, certificates) for port in both]
    assert not set(before) & set(after)
    here.decode[0].go.set()
    answer = await asking
    assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_certificates_that_cannot_be_used_change_nothing(
    site: Open,
    certificates: Authority,
    http: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = shown(certificates)
    here = await site(**files)
    Path(files["ssl_certfile"]).write_text("half of a certif")
    follow(here.app, here.app.settings)
    await ports(here).renewed()
    assert await status_of(http, f"https://127.0.0.1:{here.port}/health") == 200
    assert "the router keeps its certificates" in caplog.text
    plain = here.app.settings.model_copy(update={"ssl_certfile": "", "ssl_keyfile": ""})
    follow(here.app, plain)
    assert "restart the router" in caplog.text
    assert await status_of(http, f"https://127.0.0.1:{here.port}/health") == 200


async def test_a_process_reads_keys_and_certificates_again_on_sighup(
    tmp_path: Path, certificates: Authority, http: aiohttp.ClientSession
) -> None:
    files = shown(certificates)
    keys, key, other = tmp_path / "keys.yaml", new_key(), new_key()
    keys.write_text(file_line("a", key))
    config = tmp_path / "router.yaml"
    async with engines(1) as [engine], Children(tmp_path) as children:
        settings = {"decode": [engine.address], "port": 0, "api_key_file": str(keys), **files}
        config.write_text(json.dumps(settings))
        router = await children.start("router", "serve", "--config", str(config))
        [url] = router.urls.values()
        assert url.startswith("https://")
        port = int(url.rpartition(":")[2])
        first = await asyncio.to_thread(serial, port, certificates)

        async def asked(bearer: str) -> int:
            headers = {"authorization": f"Bearer {bearer}"}
            async with http.post(f"{url}/v1/completions", json=text(), headers=headers) as answer:
                await answer.read()
                return answer.status

        assert (await asked(key), await asked(other)) == (200, 401)
        keys.write_text(file_line("b", other))
        for name, path in shown(certificates).items():
            Path(path).replace(files[name])
        os.kill(router.pid, signal.SIGHUP)

        async def keys_are_new() -> bool:
            return await asked(other) == 200

        async def certificate_is_new() -> bool:
            return await asyncio.to_thread(serial, port, certificates) != first

        async with asyncio.timeout(30):
            await until(keys_are_new, look_s=0.05)
            await until(certificate_is_new, look_s=0.05)
        assert await asked(key) == 401
        router.process.terminate()
        assert await router.process.wait() == 0
        said = children.logged(router)
        assert '"key":"b"' in said
        assert key not in said
        assert other not in said


def test_keys_in_the_clear_are_warned_of_where_other_hosts_see_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    access = Access(RouterSettings(decode=["d:1"], api_key=[SecretStr("k")]))
    access.advise("127.0.0.1", plain=True)
    access.advise("0.0.0.0", plain=False)
    Access(RouterSettings(decode=["d:1"])).advise("0.0.0.0", plain=True)
    assert caplog.text == ""
    access.advise("0.0.0.0", plain=True)
    assert "API keys travel to 0.0.0.0 in the clear" in caplog.text


def test_the_clients_context_trusts_this_machines_authorities_by_default() -> None:
    assert client_context("").verify_mode is ssl.CERT_REQUIRED

"""`kvrouter status` as a process, before a router and before servers that are none."""

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from pydantic import SecretStr
from tests.fakes.certificates import Authority
from tests.fakes.engine import FakeEngine
from tests.integration.router.conftest import Open, Site
from tests.integration.why.planted import kvrouter

from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.listener import HttpServer

CARD = {
    "id": "10.0.0.1:8000", "worker_type": "decode", "status": "up", "is_healthy": True,
    "circuit": "closed", "load": 1, "tokens": 2048, "models": ["m"], "problem": None,
    "index": None, "ranks": [],
}  # fmt: skip


status = partial(kvrouter, "status")


async def refused(*arguments: str) -> str:
    """The sentence of a command that ends with 2 and prints nothing else."""
    code, out, err = await status(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err


def cells(table: str) -> list[list[str]]:
    return [re.split(r" {2,}", line) for line in table.splitlines()]


async def _answer(code: int, body: bytes, exchange: Exchange) -> None:
    exchange.respond(code, body)


@asynccontextmanager
async def answering(code: int, body: bytes) -> AsyncIterator[str]:
    """The URL of a server that answers everything so."""
    server = HttpServer(partial(_answer, code, body))
    port = await server.listen("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.close()


def control(here: Site) -> str:
    server = here.app.ports.control
    assert server is not None
    return f"{here.app.ports.scheme}://127.0.0.1:{server.port}"


async def test_the_engines_of_a_router_are_a_table(site: Open) -> None:
    here = await site(1, 1, admin=True)
    code, out, err = await status(f"127.0.0.1:{here.port}")
    assert (code, err) == (0, "")
    heads, *rows = cells(out)
    assert heads == [
        "engine", "role", "state", "healthy", "breaker", "load", "tokens", "index", "models",
        "problem",
    ]  # fmt: skip
    for engine, role in ((here.prefill[0], "prefill"), (here.decode[0], "decode")):
        (row,) = [row for row in rows if row[0] == engine.address]
        assert row[1:7] == [role, "up", "yes", "closed", "0", "0"]
        assert row[8] == "m"


async def test_an_engine_that_is_away_says_why(site: Open) -> None:
    here = await site(0, 1, admin=True, addresses=([], ["127.0.0.1:9"]))
    _, out, _ = await status(here.url(""))
    assert re.search(r"^127.0.0.1:9 +decode +away +no +- .*Connection refused", out, re.M)


async def test_a_rank_has_a_line_of_its_own() -> None:
    ranks = [
        {"id": f"10.0.0.1:8000@{n}", "circuit": "open", "load": n, "tokens": 0, "index": None}
        for n in range(2)
    ]
    answer = {"workers": [{**CARD, "ranks": ranks}]}
    async with answering(200, json.dumps(answer).encode()) as url:
        _, out, _ = await status(url)
    assert [row[0] for row in cells(out)[1:]] == [CARD["id"], "10.0.0.1:8000@0", "10.0.0.1:8000@1"]
    assert re.search(r"8000 .* 1 +2,048 +- +m$", out, re.M)
    assert re.search(r"@1 +open +1 +0 +-$", out, re.M)


async def test_a_router_without_engines_says_so(site: Open) -> None:
    here = await site(0, 0, admin=True)
    assert await status(here.url("")) == (0, "The router has no engines.\n", "")


async def test_what_engines_name_cannot_move_the_cursor(site: Open) -> None:
    def name(made: list[FakeEngine]) -> None:
        made[0].model = "\x1b[2Jevil\x07\n"

    here = await site(0, 1, admin=True, prepare=name)
    code, out, _ = await status(here.url(""))
    assert (code, len(out.splitlines())) == (0, 2)
    assert "?[2Jevil??" in out


async def test_a_router_that_is_not_there_is_one_sentence_and_2() -> None:
    told = await refused("http://127.0.0.1:9")
    assert "http://127.0.0.1:9 does not answer (Connection refused); start the router with" in told


async def test_a_router_that_is_silent_is_one_sentence_and_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "does not answer (timed out)" in await refused(
            f"127.0.0.1:{port}", "--timeout", "0.1"
        )


async def test_a_control_port_without_admin_lists_engines_and_lets_none_be_changed(
    site: Open,
) -> None:
    here = await site(0, 1, control_port=0)
    engine, url = here.decode[0].address, f"{control(here)}/workers"
    code, out, _ = await status(control(here))
    assert (code, engine in out) == (0, True)
    added = {"url": "127.0.0.1:9", "worker_type": "decode"}
    async with here.http.post(url, json=added) as answer:
        assert answer.status == 405
    async with here.http.delete(f"{url}/{engine}") as answer:
        assert answer.status == 405


async def test_a_router_with_one_port_and_without_admin_has_no_list(site: Open) -> None:
    here = await site()
    told = await refused(here.url(""))
    assert "/workers answers 404; start the router with --control-port and" in told


async def test_an_answer_of_something_else_is_one_sentence_and_2() -> None:
    async with answering(500, b"") as url:
        assert f"{url}/workers answers 500; " in await refused(url)
    async with answering(200, b'{"workers": [{}]}') as url:
        assert "another version" in await refused(url)


async def test_a_token_and_a_file_of_an_authority_open_a_control_port(
    site: Open, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign()
    here = await site(
        control_port=0,
        admin=True,
        admin_token=SecretStr("sesame"),
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    url, trusted = control(here), ("--ca-file", authority.ca_file)
    assert "certificate verify failed" in await refused(url)
    assert "/absent: No such file" in await refused(url, "--ca-file", "/absent")
    assert "give its admin token in KVROUTER_STATUS_TOKEN" in await refused(url, *trusted)
    code, out, _ = await status(url, *trusted, KVROUTER_STATUS_TOKEN="sesame")
    assert code == 0
    assert here.decode[0].address in out


async def test_a_server_that_speaks_no_http_is_one_sentence_and_2() -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x1b[2J kv\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        told = await refused(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert "does not answer (" in told
    assert "\x1b" not in told


async def test_a_url_that_is_none_is_wrong_use() -> None:
    assert "http://HOST:PORT" in await refused("ftp://x")
    assert "http://HOST:PORT" in await refused("http://")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--once", "the command asks once"),
        ("--interval 5", "the command asks once; `watch kvrouter status` repeats it"),
        ("--json", "JSON is at /workers"),
        ("--color=never", "the table is plain text"),
    ],
)
async def test_a_flag_of_the_live_screen_is_refused_with_what_to_do(given: str, told: str) -> None:
    flag = re.split("[ =]", given)[0]
    assert f"there is no flag {flag}; leave it out: {told}" in await refused(*given.split())

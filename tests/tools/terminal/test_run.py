"""`kvrouter status` as a process, before a server that says what a test says."""

import asyncio
import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from tests.fakes.certificates import Authority
from tests.tools.terminal.test_draw import document

from kvrouter.credentials.tls import server_context
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.listener import HttpServer

COMMAND = str(Path(sys.executable).with_name("kvrouter"))
PATIENCE_S = 30


class FakeRouter:
    """Answers /status.json."""

    def __init__(self) -> None:
        self.port = 0
        self.status = 200
        self.body = msgspec.json.encode(document())
        self.token = ""
        self.asked = asyncio.Event()
        self.server = HttpServer(self.handle)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def handle(self, exchange: Exchange) -> None:
        self.asked.set()
        if self.token and exchange.headers.get("authorization") != f"Bearer {self.token}":
            exchange.respond(401, b"{}")
        elif exchange.path != "/status.json":
            exchange.respond(404, b"{}")
        else:
            exchange.respond(self.status, self.body)


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeRouter]:
    router = FakeRouter()
    router.port = await router.server.listen("127.0.0.1", 0)
    yield router
    await router.server.close()


async def status(*arguments: str, **environment: str) -> tuple[int, str, str]:
    done = await asyncio.to_thread(
        subprocess.run,
        [COMMAND, "status", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


async def test_once_prints_what_is_now_and_ends(fake: FakeRouter) -> None:
    code, out, err = await status(fake.url, "--once")
    assert (code, err) == (0, "")
    assert "10.0.0.1:8000" in out
    assert "\x1b" not in out


async def test_an_address_without_a_scheme_is_one_of_http(fake: FakeRouter) -> None:
    code, _, _ = await status(f"127.0.0.1:{fake.port}", "--once")
    assert code == 0


async def test_json_is_the_document_itself_on_one_line(fake: FakeRouter) -> None:
    code, out, _ = await status("--url", fake.url, "--once", "--json")
    assert code == 0
    assert out.count("\n") == 1
    assert json.loads(out) == json.loads(fake.body)


async def test_a_router_that_is_not_there_is_one_sentence_and_2() -> None:
    code, out, err = await status("http://127.0.0.1:9", "--once")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "--control-port" in err


@pytest.mark.parametrize("broken", [404, 500])
async def test_an_answer_that_is_none_is_one_sentence_and_2(fake: FakeRouter, broken: int) -> None:
    fake.status = broken
    code, out, err = await status(fake.url, "--once")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(broken) in err


async def test_a_document_of_another_version_is_one_sentence_and_2(fake: FakeRouter) -> None:
    fake.body = b'{"schema": 99}'
    code, _, err = await status(fake.url, "--once")
    assert (code, err.count("\n")) == (2, 1)
    assert "version" in err


async def test_a_router_with_a_token_is_shown_it(fake: FakeRouter) -> None:
    fake.token = "sesame"
    refused, _, err = await status(fake.url, "--once")
    admitted, _, _ = await status(fake.url, "--once", KVROUTER_STATUS_TOKEN="sesame")
    assert (refused, admitted) == (2, 0)
    assert "KVROUTER_STATUS_TOKEN" in err


async def test_a_router_under_tls_is_trusted_by_the_file_of_its_authority(tmp_path: Path) -> None:
    authority, router = Authority(tmp_path), FakeRouter()
    certificate, key = authority.sign()
    tls = server_context(certificate, key, "")
    port = await router.server.listen("127.0.0.1", 0, tls=tls)
    url = f"https://127.0.0.1:{port}"
    try:
        trusted, out, _ = await status(url, "--once", "--ca-file", authority.ca_file)
        foreign, _, err = await status(url, "--once")
        absent, _, missing = await status(url, "--once", "--ca-file", "/absent")
    finally:
        await router.server.close()
    assert (trusted, foreign, absent) == (0, 2, 2)
    assert "10.0.0.1:8000" in out
    assert "certificate" in err
    assert "/absent" in missing


async def test_a_url_that_is_none_is_wrong_use() -> None:
    code, _, err = await status("ftp://x", "--once")
    assert code == 2
    assert "http://HOST:PORT" in err


def documents(url: str, count: int) -> tuple[list[str], int]:
    """That many documents of a process that goes on, and its exit code once its pipe is closed."""
    command = [COMMAND, "status", url, "--interval", "0.1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(count)]
        process.stdout.close()
        return lines, process.wait(PATIENCE_S)


async def test_in_a_pipe_it_goes_on_in_plain_text_until_the_reader_ends(fake: FakeRouter) -> None:
    async with asyncio.timeout(PATIENCE_S):
        lines, code = await asyncio.to_thread(documents, fake.url, 3)
    assert [json.loads(line)["schema"] for line in lines] == [1, 1, 1]
    assert code == 0


async def test_on_a_terminal_it_draws_until_sigterm_and_reports_a_lost_router(
    fake: FakeRouter,
) -> None:
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        COMMAND, "status", fake.url, "--interval", "0.1",
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    seen = Screen(ours)
    try:
        await seen.until(b"10.0.0.1:8000")
        assert seen.text.startswith(b"\x1b[?1049h"), "a screen of its own"
        fake.status = 503
        await seen.until(b"no answer for")
        process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
        await seen.until(b"\x1b[?1049l")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        seen.close()


class Screen:
    """What a process writes to its terminal."""

    def __init__(self, fd: int) -> None:
        self.text = b""
        self._fd = fd
        self._more = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, self._read)

    async def until(self, part: bytes) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while part not in self.text:
                self._more.clear()
                await self._more.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    def _read(self) -> None:
        try:
            self.text += os.read(self._fd, 65536)
        except OSError:  # the other end is closed
            asyncio.get_running_loop().remove_reader(self._fd)
        self._more.set()


async def test_colours_are_there_where_they_are_wanted(fake: FakeRouter) -> None:
    assert "\x1b[" not in (await status("--once", fake.url))[1]
    assert "\x1b[" in (await status("--once", "--color", "always", fake.url))[1]

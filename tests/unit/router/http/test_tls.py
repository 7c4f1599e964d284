"""The HTTP server under TLS: what it shows and to whom, and what others than TLS get from it."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.certificates import Authority
from tests.unit.router.http.conftest import GET, Wire, hello, post

from kvrouter.credentials.tls import client_context, server_context, show_certificate
from kvrouter.http.server.exchange import Exchange
from kvrouter.http.server.limits import Limits
from kvrouter.http.server.listener import Handler, HttpServer


@pytest.fixture
def certificates(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


class Secured:
    """Servers under TLS, and raw clients."""

    def __init__(self, certificates: Authority) -> None:
        self.certificates = certificates
        self.shown = certificates.sign()
        self.servers: list[HttpServer] = []
        self.wires: list[Wire] = []

    async def serve(self, handler: Handler, clients: str = "", **limits: float) -> HttpServer:
        server = HttpServer(handler, Limits(tick_s=0.01, **limits))  # type: ignore[arg-type]
        await server.listen("127.0.0.1", 0, tls=server_context(*self.shown, clients))
        self.servers.append(server)
        return server

    async def dial(self, server: HttpServer, shows: tuple[str, str] | None = None) -> Wire:
        context = client_context(self.certificates.ca_file)
        if shows is not None:
            context.load_cert_chain(*shows)
        wire = Wire(*await asyncio.open_connection("127.0.0.1", server.port, ssl=context))
        self.wires.append(wire)
        return wire


@pytest_asyncio.fixture
async def secured(certificates: Authority) -> AsyncIterator[Secured]:
    made = Secured(certificates)
    yield made
    for wire in made.wires:
        wire.close()
    for server in made.servers:
        await server.close()
        assert server.connections == 0


def serial(wire: Wire) -> str:
    """Of the certificate that was shown."""
    shown = wire.writer.get_extra_info("ssl_object").getpeercert()
    return str(shown["serialNumber"])


async def test_requests_and_streams_pass(secured: Secured) -> None:
    async def parts(exchange: Exchange) -> None:
        exchange.start(200)
        for size in (1, 1000, 100_000, 3_000_000):
            exchange.write(b"x" * size)
            await exchange.drain()
        exchange.end()

    server = await secured.serve(parts)
    wire = await secured.dial(server)
    for _ in range(2):
        wire.send(post(b"a" * 500_000))
        status, _, body = await wire.answer()
        assert (status, len(body)) == (200, 3_101_001)


async def test_a_client_that_leaves_cancels_its_handler(secured: Secured) -> None:
    began, left = asyncio.Event(), asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    wire = await secured.dial(await secured.serve(wait))
    wire.send(GET)
    async with asyncio.timeout(20):
        await began.wait()
        wire.close()
        await left.wait()


@pytest.mark.parametrize("sent", [GET, b"\x16\x03\x01\xff\xff", b"\x00" * 4096, b"\x80\x2e\x01"])
async def test_what_is_no_tls_gets_no_answer_and_disturbs_nobody(
    secured: Secured, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server = await secured.serve(hello, handshake_timeout_s=0.5)
    plain = await Wire.dial(server.port)
    plain.send(sent)
    async with asyncio.timeout(20):
        answer = await plain.reader.read()
    assert b"HTTP" not in answer
    plain.close()
    wire = await secured.dial(server)
    wire.send(GET)
    assert (await wire.answer())[0] == 200
    assert caplog.text == ""


async def test_who_never_ends_the_handshake_is_dropped_in_time(secured: Secured) -> None:
    server = await secured.serve(hello, handshake_timeout_s=0.2)
    silent = [await Wire.dial(server.port) for _ in range(20)]
    for wire in silent:
        assert await wire.at_end()
        wire.close()
    assert server.connections == 0


async def test_another_certificate_is_shown_to_those_who_come_later(secured: Secured) -> None:
    go = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        exchange.start(200)
        exchange.write(b"first")
        await go.wait()
        exchange.write(b"last")
        exchange.end()

    server = await secured.serve(slow)
    port = server.port
    early = await secured.dial(server)
    early.send(GET)
    status, headers = await early.head()
    for _ in range(3):
        secured.shown = secured.certificates.sign()
        await server.renew(server_context(*secured.shown, ""))
    assert server.port == port
    late = await secured.dial(server)
    assert serial(late) != serial(early)
    go.set()
    assert (status, await early.body(headers)) == (200, b"firstlast")
    late.send(GET)
    assert (await late.answer())[2] == b"firstlast"
    await server.close()
    with pytest.raises(OSError):  # noqa: PT011 - whatever it is called: nobody listens
        await asyncio.open_connection("127.0.0.1", port)


async def test_nobody_is_refused_while_certificates_change(secured: Secured) -> None:
    server = await secured.serve(hello)
    done, answered = asyncio.Event(), asyncio.Semaphore(0)

    async def keep_asking() -> None:
        while not done.is_set():
            wire = await secured.dial(server)
            assert await ask(wire) == 200
            wire.close()
            answered.release()

    asking = asyncio.gather(*(keep_asking() for _ in range(4)))
    for _ in range(25):
        await server.renew(server_context(*secured.certificates.sign(), ""))
        async with asyncio.timeout(20):
            await answered.acquire()
    done.set()
    await asking


async def ask(wire: Wire) -> int:
    wire.send(GET)
    return (await wire.answer())[0]


async def test_clients_must_show_a_certificate_where_that_is_asked(
    secured: Secured, tmp_path: Path
) -> None:
    server = await secured.serve(hello, secured.certificates.ca_file)
    wire = await secured.dial(server, secured.certificates.sign("client"))
    wire.send(GET)
    assert (await wire.answer())[0] == 200
    folder = tmp_path / "others"
    folder.mkdir()
    for shows in (None, Authority(folder).sign("client")):
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await ask(await secured.dial(server, shows))  # TLS 1.3 refuses after its handshake
    assert server.connections == 1


@pytest.mark.parametrize("kind", ["absent", "garbage", "of another", "readable", "clients"])
def test_files_that_cannot_be_used_are_told(tmp_path: Path, kind: str) -> None:
    made = Authority(tmp_path)
    certificate, key = made.sign()
    clients = ""
    if kind == "absent":
        Path(key).unlink()
    elif kind == "garbage":
        Path(certificate).write_text("no PEM")
    elif kind == "of another":
        key = made.sign()[1]
    elif kind == "readable":
        Path(key).chmod(0o644)
    else:
        clients = key
    expected = {
        "absent": "no such file or directory",
        "garbage": "give a certificate and its key",
        "of another": "key values mismatch",
        "readable": "chmod 600",
        "clients": "give a PEM file of CAs",
    }
    with pytest.raises(ValueError, match=f"(?i){expected[kind]}"):
        server_context(certificate, key, clients)


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    certificate, key = Authority(tmp_path).sign()
    loaded = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    Path(key).write_bytes(
        loaded.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ValueError, match="its key has a passphrase"):
        server_context(certificate, key, "")
    pem = Path(certificate).read_bytes() + Path(key).read_bytes()
    with pytest.raises(ValueError, match="its key has a passphrase"):
        show_certificate(client_context(""), pem)


def test_the_text_of_cas_may_have_any_letters_and_must_have_a_certificate(tmp_path: Path) -> None:
    ca = Path(Authority(tmp_path).ca_file).read_bytes()
    context = client_context("", "# Főtanúsítvány\n".encode() + ca)
    assert len(context.get_ca_certs()) == 1
    for wrong in (b"no certificate", "é".encode()):
        with pytest.raises(ValueError, match="give a PEM file of CAs"):
            client_context("", wrong)


def test_a_certificate_may_hold_its_key(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).sign()
    both = tmp_path / "both.pem"
    both.write_bytes(Path(certificate).read_bytes() + Path(key).read_bytes())
    both.chmod(0o600)
    assert isinstance(server_context(str(both), "", ""), ssl.SSLContext)


async def test_connections_that_begin_no_handshake_keep_nobody_out(secured: Secured) -> None:
    server = await secured.serve(hello, handshakes=2)
    silent = [await Wire.dial(server.port) for _ in range(5)]
    secured.wires += silent
    wire = await secured.dial(server)
    wire.send(GET)
    assert (await wire.answer())[0] == 200
    for each in silent[:3]:
        assert await each.at_end()

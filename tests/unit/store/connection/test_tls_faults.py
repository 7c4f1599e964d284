"""What peers, links and files can do wrong under TLS: nothing hangs, nothing wrong is delivered."""

import os
import random
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.certificates import Authority
from tests.fakes.link import Link
from tests.fakes.patience import eventually
from tests.fakes.store import Memory, chain_of, manifest_of, put_chain

from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connection.tls import ClientTls
from kvrouter_store.errors import DeadlineExceeded, StoreUnavailable, Untrusted

MIB = 1 << 20
BLOCK = 300_001  # no multiple of a record
MANIFEST = manifest_of(BLOCK)
OK = BlockStatus.OK


@pytest.fixture
def server(authority: Authority) -> Iterator[StoreServer]:
    """A node under TLS without a Unix socket: everything travels over TCP."""
    node = StoreServer(pool_bytes=64 * MIB, tls=authority.sign().server())
    node.start()
    yield node
    node.stop()


@pytest.fixture
def url(server: StoreServer) -> str:
    return f"kvs://127.0.0.1:{server.port}"


@pytest.fixture
def client(url: str, authority: Authority) -> Iterator[StoreClient]:
    with StoreClient(url, tls=authority.trust) as client:
        yield client


def got(client: StoreClient, hashes: bytes) -> bytes:
    blocks = len(hashes) // 32
    memory, span = Memory(blocks, BLOCK), range(blocks)
    assert client.get_into(MANIFEST, 0, hashes, span, memory.segments, span) == [OK] * blocks
    return bytes(memory.data)


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01\x00"])
def test_a_peer_that_stalls_in_the_handshake_is_ended_at_the_deadline(
    authority: Authority, sent: bytes
) -> None:
    tls = authority.sign().server()
    node = StoreServer(pool_bytes=MIB, tls=tls, frame_deadline_s=0.15)
    node.start()
    with socket.create_connection(("127.0.0.1", node.port), timeout=10) as peer:
        peer.sendall(sent)
        assert eventually(lambda: node.stats()["stalled_total"] == 1)
        assert peer.recv(100) == b""
    assert node.stats()["connections"] == 0
    node.stop()


def test_a_peer_that_shakes_hands_and_says_nothing_is_ended_too(authority: Authority) -> None:
    tls = authority.sign().server()
    node = StoreServer(pool_bytes=MIB, tls=tls, frame_deadline_s=0.15)
    node.start()
    trusting = ssl.create_default_context(cafile=authority.ca_file)
    with (
        socket.create_connection(("127.0.0.1", node.port), timeout=10) as peer,
        trusting.wrap_socket(peer, server_hostname="localhost") as secured,
    ):
        assert secured.version() == "TLSv1.3"
        assert eventually(lambda: node.stats()["stalled_total"] == 1)
    node.stop()


def test_a_node_that_stalls_in_the_handshake_is_given_up_at_the_deadline(
    authority: Authority,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"kvs://127.0.0.1:{silent.getsockname()[1]}"
        with StoreClient(url, tls=authority.trust, deadline_s=0.2) as client:
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                client.stats()
            assert time.monotonic() - started < 5


def test_a_link_cut_in_a_transfer_is_replaced(server: StoreServer, authority: Authority) -> None:
    hashes = chain_of(20)
    with Link(("127.0.0.1", server.port)) as link:
        url = link.url.replace("kv:", "kvs:")
        with StoreClient(url, tls=authority.trust) as client:
            put_chain(client, MANIFEST, hashes)
            link.cut_after_down = link.passed_down + 2_000_000
            with pytest.raises(StoreUnavailable):
                got(client, hashes)
            link.cut_after_down = None
            assert eventually(lambda: _answers(client))
            assert got(client, hashes) == bytes(Memory(20, BLOCK).holds(hashes).data)
            link.cut_after_up = link.passed_up + 1_000_000
            with pytest.raises(StoreUnavailable):
                put_chain(client, MANIFEST, chain_of(20, "b"))
            link.cut_after_up = None
            assert eventually(lambda: _answers(client))
            assert eventually(lambda: server.stats()["reserved_blocks"] == 0)
            assert client.match(MANIFEST, chain_of(20, "b")).blocks < 20


class Tamperer(Link):
    """Changes one byte of what the server sends, once, after so many."""

    change_after: int | None = None

    def within_limit(self, data: bytes, upward: bool) -> tuple[bytes, bool]:
        passed = self.passed_down
        data, cut = super().within_limit(data, upward)
        at = -1 if upward or self.change_after is None else self.change_after - passed
        if 0 <= at < len(data):
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            self.change_after = None
        return data, cut


def test_a_byte_changed_on_the_way_ends_the_connection_and_is_never_delivered(
    server: StoreServer, authority: Authority
) -> None:
    hashes = chain_of(20)
    with Tamperer(("127.0.0.1", server.port)) as link:
        url = link.url.replace("kv:", "kvs:")
        with StoreClient(url, tls=authority.trust, verify=False) as client:
            put_chain(client, MANIFEST, hashes)
            link.change_after = link.passed_down + 3_000_000
            memory = Memory(20, BLOCK)
            with pytest.raises(Untrusted, match="bad record mac"):
                client.get_into(MANIFEST, 0, hashes, range(20), memory.segments, range(20))
            assert eventually(lambda: _answers(client))
            assert got(client, hashes) == bytes(Memory(20, BLOCK).holds(hashes).data)


def test_noise_at_the_port_leaves_the_node_as_it_was(
    server: StoreServer, client: StoreClient
) -> None:
    client.stats()
    chance, hello = random.Random(7), _client_hello()
    for k in range(300):
        noise = bytearray(hello if k % 2 else chance.randbytes(chance.randint(1, 600)))
        if k % 2:
            for _ in range(chance.randint(1, 8)):
                noise[chance.randrange(len(noise))] = chance.randrange(256)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as peer:
            peer.sendall(noise)
    assert eventually(lambda: server.stats()["connections"] == 1)
    assert server.stats()["tls_failures_total"] > 50
    assert put_chain(client, MANIFEST, chain_of(3)) == 3


def _client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    secured = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        secured.do_handshake()
    return outgoing.read()


def test_a_node_that_leaves_lets_go_of_those_that_ask_for_nothing(
    server: StoreServer, client: StoreClient
) -> None:
    put_chain(client, MANIFEST, chain_of(2))
    server.drain()
    assert eventually(lambda: server.stats()["connections"] == 0)
    with pytest.raises(StoreUnavailable):
        client.stats()


@pytest.mark.parametrize("make", [StoreClient, AsyncStoreClient])
def test_files_that_cannot_be_used_are_told_before_anything_is_sent(
    make: Callable[..., object], authority: Authority, tmp_path: Path
) -> None:
    url, signed = "kvs://localhost:1", authority.sign()
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("nothing")
    with pytest.raises(ValueError, match=r"write kvs://"):
        make("kv://localhost:1", tls=authority.trust)
    with pytest.raises(ValueError, match=r"CA file /nowhere\.pem cannot be used: No such file"):
        make(url, tls=ClientTls("/nowhere.pem"))
    with pytest.raises(ValueError, match=f"CA file {no_pem} cannot be used"):
        make(url, tls=ClientTls(str(no_pem)))
    with pytest.raises(ValueError, match="go together"):
        make(url, tls=ClientTls(cert_file=signed.cert_file))
    with pytest.raises(ValueError, match="cannot be used"):
        make(url, tls=ClientTls("", signed.cert_file, authority.sign().key_file))
    make("kv+unix:///nowhere", tls=authority.trust)


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(
    authority: Authority, tmp_path: Path
) -> None:
    signed, locked = authority.sign(), tmp_path / "locked.key"
    command = ["openssl", "pkey", "-in", signed.key_file, "-out", str(locked)]
    subprocess.run([*command, "-aes128", "-passout", "pass:secret"], check=True, timeout=30)
    with pytest.raises(ValueError, match=f"key file {locked} cannot be used"):
        signed._replace(key_file=str(locked)).server()
    tls = ClientTls("", signed.cert_file, str(locked))
    for make in (StoreClient, AsyncStoreClient):
        with pytest.raises(ValueError, match="cannot be used"):
            make("kvs://localhost:1", tls=tls)


def test_without_libssl_tls_is_refused_with_the_remedy_and_the_rest_works(
    authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "libssl.so.3").write_text("no library")
    signed = authority.sign()
    script = (
        "from kvrouter_store.client.blocking import StoreClient\n"
        "from kvrouter_store.node.settings import StoreSettings\n"
        "from kvrouter_store.node.start_checks import tls_of\n"
        "StoreClient('kv://localhost:1')\n"
        "assert tls_of(StoreSettings()) is None\n"
        "try: StoreClient('kvs://localhost:1')\n"
        "except ValueError as error: print(error)\n"
        f"files = dict(tls_cert_file={signed.cert_file!r}, tls_key_file={signed.key_file!r})\n"
        "try: tls_of(StoreSettings(**files))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(tmp_path)},
    )
    of_client, of_node = done.stdout.splitlines()
    assert of_client.startswith("TLS needs OpenSSL 3 (libssl.so.3)")
    assert "install it" in of_client
    assert of_node == f"StartRefused {of_client}"


def _answers(client: StoreClient) -> bool:
    try:
        client.stats()
    except StoreUnavailable:
        return False
    return True

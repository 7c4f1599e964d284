"""How a node leaves: what is under way ends, nobody new comes in, a second signal cuts it short."""

import http.client
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fakes.frames import put_frame
from tests.fakes.patience import eventually
from tests.fakes.store import Memory, StoreProcess, chain_of, content_of, manifest_of
from tests.fakes.store import put_chain as put

from kvrouter_store import _core
from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.dialer import TransportName
from kvrouter_store.errors import KVStoreError

pytestmark = pytest.mark.slow
BLOCK = 4096
MANIFEST = manifest_of(BLOCK)
CHAIN = chain_of(2)
LONG_S, SHORT_S = "60", "0.3"
Leaving = Callable[..., StoreProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Leaving]:
    """Starts a node that gives so many seconds to what is under way."""
    nodes: list[StoreProcess] = []

    def start(drain_timeout: str = LONG_S) -> StoreProcess:
        nodes.append(StoreProcess(tmp_path, "64MiB", "--drain-timeout", drain_timeout))
        return nodes[-1].start()

    yield start
    for node in nodes:
        node.kill()


def health(node: StoreProcess) -> tuple[int, bytes]:
    link = http.client.HTTPConnection("127.0.0.1", node.http_port, timeout=20)
    link.request("GET", "/healthz")
    answer = link.getresponse()
    told = answer.status, answer.read()
    link.close()
    return told


def leave(node: StoreProcess) -> None:
    """Send the first signal and wait until it has come."""
    node.send(signal.SIGTERM)
    assert eventually(lambda: health(node)[0] == 503)


def test_a_node_without_work_leaves_at_once(start: Leaving) -> None:
    node = start()
    with StoreClient(node.url) as client, StoreClient(node.url, transport="tcp") as other:
        put(client, MANIFEST, CHAIN)
        other.match(MANIFEST, CHAIN)
        started = time.monotonic()
        assert node.stop() == 0
        assert time.monotonic() - started < float(LONG_S) / 4
    assert "drained in" in node.log


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_leased_reader_ends_what_it_reads(start: Leaving, transport: TransportName) -> None:
    node = start()
    with StoreClient(node.url, transport=transport) as client:
        put(client, MANIFEST, CHAIN)
        lease = client.acquire(MANIFEST, CHAIN)
        leave(node)
        assert health(node) == (503, b'{"status":"draining"}\n')
        with pytest.raises(KVStoreError), StoreClient(node.url) as late:
            late.stats()
        sink = Memory(2, BLOCK)
        got = client.get_into(MANIFEST, 0, CHAIN, range(2), sink.segments, range(2))
        assert got == [BlockStatus.OK] * 2
        assert sink.data == Memory(2, BLOCK).holds(CHAIN).data
        lease.release()
        assert node.wait() == 0


def test_blocks_that_are_being_written_are_committed(start: Leaving) -> None:
    node = start()
    source = Memory(2, BLOCK).holds(CHAIN)
    with StoreClient(node.url, transport="shm") as client:
        with client.reserve(MANIFEST, 0, CHAIN, range(2)) as reservation:
            crcs = reservation.fill(source.segments, range(2))
            leave(node)
            assert reservation.commit(crcs) == [BlockStatus.OK] * 2
        assert node.wait() == 0


def test_a_put_that_has_half_come_is_received_and_answered(start: Leaving) -> None:
    node = start()
    with StoreClient(node.url, transport="tcp") as client:
        manifest_id = client.register(MANIFEST).manifest_id
    one = CHAIN[:32]
    data = content_of(one, BLOCK)
    payload = data + struct.pack("<I60x", _core.crc32c(data))
    with socket.create_connection(("127.0.0.1", node.port), timeout=20) as link:
        link.sendall(_core.encode_hello(1, name="slow"))
        answer(link)
        link.sendall(put_frame(2, manifest_id, 0, one, BLOCK) + payload[:1000])
        assert eventually(lambda: reserved(node) == 1)
        leave(node)
        link.sendall(payload[1000:])
        reply = answer(link)
        assert isinstance(reply, _core.StatusesReply)
        assert list(reply.statuses) == [BlockStatus.STORED]
        assert link.recv(1) == b""
        assert node.wait() == 0


def test_a_wait_that_nobody_can_end_is_answered(start: Leaving) -> None:
    node = start()
    with StoreClient(node.url, transport="tcp") as client:
        manifest_id = client.register(MANIFEST).manifest_id
    with socket.create_connection(("127.0.0.1", node.port), timeout=20) as link:
        link.sendall(_core.encode_hello(1, name="waiter"))
        answer(link)
        link.sendall(_core.encode_wait(2, manifest_id, CHAIN, 2, 600_000, True))
        assert eventually(lambda: stat(node, "waits") == 1)
        node.send(signal.SIGTERM)
        reply = answer(link)
        assert isinstance(reply, _core.WaitReply)
        assert not reply.landed
        assert node.wait() == 0


def test_a_wait_lands_while_its_blocks_are_still_being_written(server: StoreServer) -> None:
    url = f"kv+unix://{server.unix_path}"
    with StoreClient(url) as writer, StoreClient(url) as reader:
        source = Memory(2, BLOCK).holds(CHAIN)
        with writer.reserve(MANIFEST, 0, CHAIN, range(2)) as reservation:
            crcs = reservation.fill(source.segments, range(2))
            manifest_id = reader.register(MANIFEST).manifest_id
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(20)
                link.connect(str(server.unix_path))
                link.sendall(_core.encode_hello(1, name="waiter"))
                answer(link)
                link.sendall(_core.encode_wait(2, manifest_id, CHAIN, 2, 600_000, False))
                assert eventually(lambda: server.stats()["waits"] == 1)
                server.drain()
                assert server.draining
                assert reservation.commit(crcs) == [BlockStatus.OK] * 2
                reply = answer(link)
                assert isinstance(reply, _core.WaitReply)
                assert reply.landed
    assert eventually(lambda: server.stats()["connections"] == 0)


def test_what_takes_too_long_is_cut_and_the_log_says_so(start: Leaving) -> None:
    node = start(SHORT_S)
    with StoreClient(node.url) as client:
        put(client, MANIFEST, CHAIN)
        lease = client.acquire(MANIFEST, CHAIN)
        assert node.stop() == 0
        assert not lease.held
    assert "1 leases" in node.log
    assert f"after --drain-timeout {SHORT_S}" in node.log


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(start: Leaving, second: signal.Signals) -> None:
    node = start()
    with StoreClient(node.url) as client:
        put(client, MANIFEST, CHAIN)
        lease = client.acquire(MANIFEST, CHAIN)
        leave(node)
        started = time.monotonic()
        assert node.end(second) == 0
        assert time.monotonic() - started < float(LONG_S) / 4
        assert not lease.held
    assert "at the second signal" in node.log


def test_an_open_http_connection_does_not_keep_it(start: Leaving) -> None:
    node = start()
    link = http.client.HTTPConnection("127.0.0.1", node.http_port, timeout=20)
    link.request("GET", "/healthz")
    assert link.getresponse().read()
    assert node.stop() == 0
    link.close()


def test_its_socket_is_free_for_another_node_while_it_drains(start: Leaving) -> None:
    node = start()
    with StoreClient(node.url) as client:
        put(client, MANIFEST, CHAIN)
        lease = client.acquire(MANIFEST, CHAIN)
        leave(node)
        assert not Path(node.unix_path).exists()
        after = start()
        lease.release()
        assert node.wait() == 0
    with StoreClient(f"kv+unix://{after.unix_path}") as client:
        assert put(client, MANIFEST, CHAIN) == 2


def test_only_a_node_that_runs_can_be_drained() -> None:
    with pytest.raises(ValueError, match="only a server that runs"):
        StoreServer(pool_bytes=1 << 20).drain()


def answer(link: socket.socket) -> object:
    """The next reply of a connection."""
    header = _core.decode_header(link.recv(_core.HEADER_BYTES, socket.MSG_WAITALL))
    return _core.decode_reply(header, link.recv(header.body_bytes, socket.MSG_WAITALL))


def stat(node: StoreProcess, name: str) -> int:
    with StoreClient(node.url, transport="tcp") as client:
        return client.stats()[name]


def reserved(node: StoreProcess) -> int:
    return stat(node, "reserved_blocks")

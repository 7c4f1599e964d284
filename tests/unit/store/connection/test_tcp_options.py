"""How both ends set up their TCP connection."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from tests.fakes.store import chain_of, manifest_of, put_chain

from kvrouter_store import _core
from kvrouter_store._core import StoreServer
from kvrouter_store.client.blocking import StoreClient

PACED, UNPACED = b"bbr", (b"cubic", b"reno")
NAME_BYTES = 16
TCP = (socket.AF_INET, socket.SOCK_STREAM)


def congestion(end: socket.socket) -> bytes:
    name = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, NAME_BYTES)
    return name.rstrip(b"\0")


def ends_of(port: int) -> Iterator[socket.socket]:
    """Copies of this process's sockets that are an end of a connection to that port."""
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError), ExitStack() as stack:
            end = stack.enter_context(socket.fromfd(int(entry.name), *TCP))
            if port in {end.getpeername()[1], end.getsockname()[1]}:
                stack.pop_all()
                yield end


@pytest.fixture
def paced() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection on loopback; the first one is paced, as by some hosts' default."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = socket.create_connection(door.getsockname())
        far, _ = door.accept()
        with near, far:
            try:
                near.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, PACED)
            except OSError:
                pytest.skip(
                    f"no congestion control that paces: run with modprobe tcp_{PACED.decode()}"
                )
            yield near, far


def test_nothing_is_paced_between_a_client_and_a_node_of_its_host(server: StoreServer) -> None:
    with StoreClient(f"kv://127.0.0.1:{server.port}", transport="tcp") as client:
        assert put_chain(client, manifest_of(), chain_of(1)) == 1
        ends = list(ends_of(server.port))
        try:
            assert [congestion(end) in UNPACED for end in ends] == [True, True]
            options = [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in ends]
            assert all(options)
        finally:
            for end in ends:
                end.close()


def test_pacing_ends_where_the_peer_is_on_this_host(
    paced: tuple[socket.socket, socket.socket],
) -> None:
    near, _ = paced
    assert congestion(near) == PACED
    _core.tune_tcp(near.fileno())
    assert congestion(near) in UNPACED


def test_whose_peer_is_not_known_to_be_here_stays_as_its_host_wants(
    paced: tuple[socket.socket, socket.socket],
) -> None:
    with socket.socket() as alone:
        alone.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, PACED)
        _core.tune_tcp(alone.fileno())
        assert congestion(alone) == PACED
        assert alone.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

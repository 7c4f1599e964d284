"""A client that cannot reach its node: pauses that grow until a whole connection was made."""

import re
import socket
from pathlib import Path

import pytest

from kvrouter_store._core import StoreServer
from kvrouter_store.client.dialer import Dialer, TransportName
from kvrouter_store.connection.address import parse_url
from kvrouter_store.connection.channel import Access, Channel, Credentials
from kvrouter_store.connection.deadline import Deadline
from kvrouter_store.errors import DeadlineExceeded, StoreUnavailable
from kvrouter_store.rdma.initiator import Initiator

PAUSE = re.compile(r"next try in ([0-9.]+) s")


class Caller:
    """Opens channels on a clock of its own, which stands still."""

    def __init__(self, url: str, transport: TransportName) -> None:
        self.now = 100.0
        self.prepared = True
        self._dialer = Dialer(
            parse_url(url),
            transport,
            Credentials("caller"),
            Initiator(),
            self._prepare,
            clock=lambda: self.now,
        )

    def _prepare(self, channel: Channel, deadline: Deadline) -> None:
        if not self.prepared:
            raise StoreUnavailable("it went while manifests were registered")

    def open(self, deadline_s: float = 5) -> None:
        self._dialer.open(Access.NONE, Deadline(deadline_s)).discard()

    def transport(self) -> str:
        """By which bytes travel from now on."""
        self.open()
        assert self._dialer.chosen
        return self._dialer.chosen.kind

    def refused(self) -> str:
        with pytest.raises(StoreUnavailable) as refusal:
            self.open()
        return str(refusal.value)

    def pause_s(self) -> float:
        """How long it is to wait after one more attempt that fails; that long it waits."""
        assert not PAUSE.search(self.refused())
        found = PAUSE.search(self.refused())
        assert found
        self.now += float(found[1])
        return float(found[1])


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_pauses_grow_while_the_node_cannot_be_reached(
    server: StoreServer, transport: TransportName
) -> None:
    caller = Caller(f"kv://127.0.0.1:{server.port}", transport)
    server.stop()
    assert [caller.pause_s() for _ in range(6)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0]


def test_a_connection_that_fails_before_its_first_use_begins_a_pause_too(
    server: StoreServer,
) -> None:
    caller = Caller(f"kv://127.0.0.1:{server.port}", "auto")
    caller.open()
    caller.prepared = False
    assert [caller.pause_s() for _ in range(3)] == [0.05, 0.1, 0.2]
    caller.prepared = True
    caller.open()
    caller.prepared = False
    assert caller.pause_s() == 0.05


def test_a_lost_unix_socket_is_replaced_by_tcp_without_a_pause(
    server: StoreServer, tmp_path: Path
) -> None:
    caller = Caller(f"kv://127.0.0.1:{server.port}", "auto")
    caller.open()
    Path(server.unix_path or "").rename(tmp_path / "moved.sock")
    caller.open()
    (tmp_path / "moved.sock").rename(server.unix_path or "")


def test_a_node_that_does_not_answer_in_time_over_its_unix_socket_is_asked_there_again(
    server: StoreServer, tmp_path: Path
) -> None:
    caller, path = Caller(f"kv://127.0.0.1:{server.port}", "auto"), Path(server.unix_path or "")
    path.rename(tmp_path / "moved.sock")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(DeadlineExceeded):
            caller.open(deadline_s=0.2)
    (tmp_path / "moved.sock").rename(path)
    caller.now += 1.0
    assert caller.transport() == "shm"

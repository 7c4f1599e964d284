"""Which other nodes an engine reads from, and how many clients it keeps for that."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.fakes.store import Memory, chain_of, manifest_of, put_chain

from kvrouter_store._core import BlockStatus, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.neighbours import (
    IDLE_S,
    MOST_CLIENTS,
    Neighbours,
    Sources,
    name_of,
)
from kvrouter_store.errors import StoreClosed, StoreUnavailable

OWN = "kv://10.0.0.1:7400"
MANIFEST = manifest_of()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def node() -> Iterator[StoreServer]:
    node = StoreServer(pool_bytes=16 << 20)
    node.start()
    yield node
    node.stop()


def test_hints_of_other_routers_name_a_node_by_tcp() -> None:
    plain = Sources.of("10.0.0.2:7400", OWN)
    assert plain.url("tcp://10.0.0.2:7400") == "kv://10.0.0.2:7400"
    assert (plain.url("tcp://10.0.0.1:7400"), plain.url("tcp://10.0.0.3:7400")) == ("", None)
    tls = Sources.of("10.0.0.2:7400", OWN.replace("kv", "kvs"))
    assert tls.url("tcp://10.0.0.2:7400") == "kvs://10.0.0.2:7400"


def test_no_node_may_be_named_unless_the_settings_say_so() -> None:
    assert Sources.of("", OWN).url("kv://10.0.0.2:7400") is None


def test_the_own_node_is_known_by_each_of_its_addresses() -> None:
    sources = Sources.of("any", "kv://127.0.0.1:7400", "kv://Host-A:7400")
    assert sources.url("kv://127.0.0.1:7400/") == sources.url("kv://host-a:7400") == ""


@pytest.mark.parametrize("allowed", ["10.0.0.2:7400", "kv://10.0.0.2:7400", "a:1, 10.0.0.2:7400,"])
def test_a_node_that_is_listed_may_be_named_and_no_other(allowed: str) -> None:
    sources = Sources.of(allowed, OWN)
    assert sources.url("kv://10.0.0.2:7400") == "kv://10.0.0.2:7400"
    for other in ("kv://10.0.0.3:7400", "kv://10.0.0.2:7401", "kvs://10.0.0.2:7400"):
        assert sources.url(other) is None


def test_a_bare_address_is_reached_as_the_own_node_is() -> None:
    sources = Sources.of("b:7400", "kvs://a:7400")
    assert sources.url("kvs://b:7400") == "kvs://b:7400"
    assert sources.url("kv://b:7400") is None


def test_any_node_may_be_named_but_none_without_tls_where_the_own_one_has_it() -> None:
    assert Sources.of("any", OWN).url("kvs://b:1") == "kvs://b:1"
    assert Sources.of("any", "kvs://a:1").url("kvs://b:1") == "kvs://b:1"
    assert Sources.of("any", "kvs://a:1").url("kv://b:1") is None


@pytest.mark.parametrize(
    "source", ["", "b:7400", "http://b:1", "kv://b", "kv://token@b:1", "kv+unix:///tmp/s", "kv://["]
)
def test_what_names_no_node_of_another_host_is_not_allowed(source: str) -> None:
    assert Sources.of("any", OWN).url(source) is None


@pytest.mark.parametrize("wrong", ["b", "http://b:1", "a:1,any", "kv://b:x"])
def test_a_list_that_cannot_be_meant_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="write kv://HOST:PORT"):
        Sources.of(wrong, OWN)


def test_others_know_a_node_by_what_it_advertises_and_not_by_its_socket() -> None:
    assert name_of(OWN, "") == OWN
    assert name_of("kv+unix:///run/s", "") == ""
    assert name_of("kv+unix:///run/s", OWN) == OWN


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def neighbours(ended: list[str], clock: Clock) -> Neighbours[str]:
    """The client of a node is its name."""
    return Neighbours(str, ended.append, clock)


def test_the_clients_used_least_lately_make_room(
    neighbours: Neighbours[str], ended: list[str]
) -> None:
    for node in [*map(str, range(MOST_CLIENTS)), "0"]:
        with neighbours.client(node) as client:
            assert client == node
    assert not ended
    with neighbours.client("new"):
        assert ended == ["1"]
    neighbours.close()
    assert sorted(ended) == sorted(["new", *map(str, range(MOST_CLIENTS))])


def test_a_client_in_use_makes_no_room(neighbours: Neighbours[str], ended: list[str]) -> None:
    with ExitStack() as users:
        for node in range(MOST_CLIENTS - 1):
            users.enter_context(neighbours.client(str(node)))
        with neighbours.client("last"):
            with pytest.raises(StoreUnavailable, match="in use"), neighbours.client("new"):
                pass
            with neighbours.client("3") as shared:
                assert shared == "3"
        assert not ended
        with neighbours.client("new"):
            assert ended == ["last"]


def test_a_client_that_nobody_uses_is_ended_after_a_while(
    neighbours: Neighbours[str], ended: list[str], clock: Clock
) -> None:
    with neighbours.client("busy"):
        with neighbours.client("idle"):
            clock.now = 1
        clock.now = IDLE_S + 1
        with neighbours.client("other"):
            assert not ended
        clock.now = IDLE_S + 2
        with neighbours.client("other"):
            assert ended == ["idle"]


def test_a_client_that_cannot_be_made_is_not_kept(ended: list[str]) -> None:
    def make(node: str) -> str:
        raise StoreUnavailable(node)

    neighbours = Neighbours(make, ended.append)
    with pytest.raises(StoreUnavailable), neighbours.client("node"):
        pass
    neighbours.close()
    assert not ended


def test_blocks_are_read_from_another_node_until_its_client_is_ended(node: StoreServer) -> None:
    url, chain, memory = f"kv://127.0.0.1:{node.port}", chain_of(3), Memory(3, 4096)
    with StoreClient(url) as client:
        put_chain(client, MANIFEST, chain)
    neighbours = Neighbours(lambda url: StoreClient(url, transport="tcp"), StoreClient.close)
    with neighbours.client(url) as reader:
        span = range(3)
        found = reader.get_into(MANIFEST, 0, chain, span, memory.segments, span)
    assert found == [BlockStatus.OK] * 3
    assert memory.data == Memory(3, 4096).holds(chain).data
    with neighbours.client(url) as again:
        assert again is reader
    neighbours.close()
    with pytest.raises(StoreClosed):
        reader.stats()

"""What requests hold of the memory of a store, over real nodes."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.patience import eventually
from tests.fakes.store import (
    StoreProcess,
    chain_of,
    content_of,
    manifest_of,
    overwrite_stored,
    put_chain,
)

from kvrouter_store._core import StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.vllm.leases import Fetch, Leases
from kvrouter_store.connectors.vllm.room import LEAST_WAIT_S

BLOCK = 64 << 10  # 256 of them fill the node
MANIFEST = manifest_of(BLOCK)
GROUP = (0).to_bytes(4, "big")
Connect = Callable[..., StoreClient]


class Request:
    """What vLLM keeps of one."""

    def __init__(self, req_id: str) -> None:
        self.req_id = req_id
        self._state: dict[type, Any] = {}

    def get_state(self, kind: type[Any]) -> Any:
        return self._state.get(kind)

    def set_state(self, state: Any) -> None:
        self._state[type(state)] = state


def keys_of(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + 32] + GROUP for at in range(0, len(hashes), 32)]


@pytest.fixture
def link(connect: Connect) -> Iterator[StoreLink]:
    link = StoreLink(connect(), MANIFEST, logging.getLogger("leases"), engine="e1")
    link.start()
    assert eventually(lambda: bool(link.latest))
    yield link
    link.close()


def fetch_nothing(node: str, group: int, keys: list[bytes]) -> None:
    raise AssertionError(f"nothing is at {node}")


def leases_over(
    link: StoreLink, clock: Callable[[], float] = lambda: 0.0, fetch: Fetch = fetch_nothing
) -> Leases:
    made = Leases({0: link}, threading.Event(), fetch, clock)
    made.epoch = link.client.channels()[0].hello.epoch
    return made


@pytest.fixture
def leases(link: StoreLink) -> Iterator[Leases]:
    made = leases_over(link)
    yield made
    made.close()


def answered(leases: Leases, keys: list[bytes], request: Request) -> None:
    assert leases.serves(request)
    assert eventually(lambda: not leases.asks(keys, request, 1e9))


def test_one_question_leases_the_leading_blocks_and_tells_where_they_are(
    server: StoreServer, client: StoreClient, leases: Leases
) -> None:
    hashes, request = chain_of(5), Request("r")
    put_chain(client, MANIFEST, hashes[:96])
    answered(leases, keys_of(hashes), request)
    assert list(leases.places(request)) == keys_of(hashes)[:3]
    assert [leases.misses(key, request) for key in keys_of(hashes)[3:]] == [True, True]
    assert [leases.take_counts(), leases.take_counts()] == [(5, 3), (0, 0)]
    runs, places = leases.load(keys_of(hashes)[1:3], request)
    assert [run.hashes for run in runs] == [hashes[32:96]]
    pool = client.channels()[0].pool
    assert pool is not None
    stored = [bytes(memoryview(pool.slice(offset, BLOCK))) for offset, _ in places]
    assert stored == [content_of(hashes[at : at + 32], BLOCK) for at in (32, 64)]
    assert server.stats()["leased_blocks"] == 3
    leases.ended(request)
    assert server.stats()["leased_blocks"] == 3  # the ranks still load
    leases.release(request)
    assert eventually(lambda: server.stats()["leased_blocks"] == 0)
    assert leases.holding == 0


def test_what_has_no_place_in_the_directory_is_loaded_another_way(tmp_path: Path) -> None:
    """By way of vLLM's host memory: the ranks would not find it, and it would be computed."""
    small, hashes = manifest_of(4096), chain_of(220)
    node = StoreServer(unix_path=str(tmp_path / "s"), pool_bytes=1 << 20, granule_bytes=4096)
    node.start()  # its directory has 128 entries
    client = StoreClient(f"kv://127.0.0.1:{node.port}")
    for at in range(0, len(hashes), 32 * 55):
        put_chain(client, small, hashes[at : at + 32 * 55])
    link = StoreLink(client, small, logging.getLogger("leases"), engine="e1")
    link.start()
    leases = leases_over(link)
    listed, lost = Request("listed"), Request("lost")
    answered(leases, keys_of(hashes[:64]), listed)
    assert len(leases.places(listed)) == 2
    leases.ended(listed)
    assert leases.serves(lost)
    assert leases.asks(keys_of(hashes), lost, 1e9)

    def served() -> bool:
        leases.flush()  # the end of a step
        return leases.serves(lost)

    assert eventually(lambda: not served())
    assert not leases.places(lost)
    leases.close()
    assert eventually(lambda: node.stats()["leased_blocks"] == 0)
    link.close()
    node.stop()


@pytest.mark.parametrize("how", ["drop", "ended", "forget"])
def test_what_is_not_loaded_is_given_back(
    server: StoreServer, client: StoreClient, leases: Leases, how: str
) -> None:
    hashes, request = chain_of(3), Request("r")
    put_chain(client, MANIFEST, hashes)
    answered(leases, keys_of(hashes), request)
    if how == "forget":
        leases.forget()
    else:
        getattr(leases, how)(request)
    assert eventually(lambda: server.stats()["leased_blocks"] == 0)
    assert leases.holding == 0


def test_an_answer_that_comes_after_its_request_ended_is_given_back(
    server: StoreServer, client: StoreClient, leases: Leases
) -> None:
    hashes, request = chain_of(3), Request("r")
    put_chain(client, MANIFEST, hashes)
    assert leases.serves(request)
    assert leases.asks(keys_of(hashes), request, 1.0)
    leases.ended(request)
    leases.close()
    assert server.stats()["leased_blocks"] == 0


def test_a_request_that_is_computed_after_all_asks_no_more(
    client: StoreClient, leases: Leases
) -> None:
    hashes, request = chain_of(3), Request("r")
    put_chain(client, MANIFEST, hashes)
    answered(leases, keys_of(hashes), request)
    leases.drop(request)
    assert not leases.asks(keys_of(hashes), request, 1.0)
    assert not leases.places(request)


def test_a_block_that_landed_is_asked_for_again_once(client: StoreClient, leases: Leases) -> None:
    hashes, request = chain_of(2), Request("r")
    keys = keys_of(hashes)
    answered(leases, keys, request)
    assert leases.misses(keys[0], request)
    put_chain(client, MANIFEST, hashes[:32])
    assert leases.landed(keys[0], request, "")
    leases.flush()
    answered(leases, keys, request)
    assert list(leases.places(request)) == keys[:1]
    assert not leases.landed(keys[0], request, "")


def test_what_landed_at_another_node_is_copied_before_it_is_leased(
    client: StoreClient, link: StoreLink
) -> None:
    hashes, request = chain_of(4), Request("r")
    keys, fetched = keys_of(hashes), list[tuple[str, int, list[bytes]]]()

    def fetch(node: str, group: int, wanted: list[bytes]) -> None:
        fetched.append((node, group, wanted))
        put_chain(client, MANIFEST, hashes[:96])

    put_chain(client, MANIFEST, hashes[:32])
    leases = leases_over(link, fetch=fetch)
    answered(leases, keys, request)
    for key in keys[1:3]:
        assert leases.misses(key, request)
        assert leases.landed(key, request, "kv://far:7400")
    answered(leases, keys, request)
    assert fetched == [("kv://far:7400", 0, keys[1:3])]
    assert list(leases.places(request)) == keys[:3]
    leases.close()


def test_requests_together_hold_half_of_the_store_and_the_next_waits_its_turn(
    client: StoreClient, leases: Leases
) -> None:
    chains = [chain_of(70, seed=str(number)) for number in range(2)]
    for hashes in chains:
        put_chain(client, MANIFEST, hashes)
    first, second = Request("first"), Request("second")
    answered(leases, keys_of(chains[0]), first)
    assert leases.serves(second)
    for _ in range(3):
        assert leases.asks(keys_of(chains[1]), second, 1e9)
        leases.flush()
    assert leases.asking
    leases.release(first)
    answered(leases, keys_of(chains[1]), second)
    assert len(leases.places(second)) == 70


def test_the_next_waits_as_long_as_computing_takes_all_before_it(
    link: StoreLink, client: StoreClient
) -> None:
    now = [100.0]
    leases = leases_over(link, lambda: now[0])
    chains = [chain_of(70, seed=str(number)) for number in range(3)]
    for hashes in chains:
        put_chain(client, MANIFEST, hashes)
    holds, second, third = Request("holds"), Request("second"), Request("third")
    answered(leases, keys_of(chains[0]), holds)
    assert leases.serves(second)
    assert leases.asks(keys_of(chains[1]), second, 2.0)
    assert leases.serves(third)
    assert leases.asks(keys_of(chains[2]), third, 3.0)
    now[0] += 2.001
    assert not leases.asks(keys_of(chains[1]), second, 2.0)
    now[0] += 2.998
    assert leases.asks(keys_of(chains[2]), third, 3.0)
    now[0] += 0.002
    assert not leases.asks(keys_of(chains[2]), third, 3.0)
    leases.close()


def test_one_request_may_hold_more_than_half(client: StoreClient, leases: Leases) -> None:
    hashes, request = chain_of(150), Request("r")
    put_chain(client, MANIFEST, hashes)
    answered(leases, keys_of(hashes), request)
    assert len(leases.places(request)) == 150


def test_a_store_that_hangs_is_waited_for_no_longer_than_computing_takes(tmp_path: Path) -> None:
    with StoreProcess(tmp_path) as node:
        client = StoreClient(node.url, deadline_s=5.0)
        link = StoreLink(client, MANIFEST, logging.getLogger("leases"))
        client.stats()
        now = [0.0]
        leases = leases_over(link, lambda: now[0])
        hashes, request = chain_of(3), Request("r")
        put_chain(client, MANIFEST, hashes)
        many = hashes + chain_of(600, seed="b")  # more than this client pins by itself
        node.send(signal.SIGSTOP)
        assert leases.serves(request)
        assert leases.asks(keys_of(many), request, 3.0)
        now[0] = max(LEAST_WAIT_S, 3.0)
        assert leases.asks(keys_of(many), request, 3.0)
        now[0] += 0.001
        assert not leases.asks(keys_of(many), request, 3.0)
        assert not leases.places(request)
        node.send(signal.SIGCONT)
        leases.close()
        assert eventually(lambda: client.stats()["leased_blocks"] == 0)
        client.close()


def test_a_request_is_not_served_from_a_pool_that_the_ranks_do_not_have(
    client: StoreClient, leases: Leases
) -> None:
    hashes, request = chain_of(3), Request("r")
    put_chain(client, MANIFEST, hashes)
    leases.epoch += 1
    assert leases.serves(request)
    assert eventually(lambda: not leases.asks(keys_of(hashes), request, 1e9))
    assert not leases.serves(request)
    leases.epoch = 0
    assert not leases.serves(Request("another"))


def test_of_a_window_whichever_blocks_are_there_are_leased(
    client: StoreClient, leases: Leases
) -> None:
    hashes, request = chain_of(6), Request("r")
    put_chain(client, MANIFEST, hashes)
    client.delete(MANIFEST, hashes[64:96])
    leases.windowed = {0}
    answered(leases, keys_of(hashes), request)
    keys = keys_of(hashes)
    left = [key for key in keys if key in leases.places(request)]
    assert left == [*keys[:2], *keys[3:]]
    assert leases.misses(keys[2], request)


def test_blocks_whose_load_failed_are_examined_and_what_decayed_is_deleted(
    server: StoreServer, client: StoreClient, leases: Leases, tmp_path: Path
) -> None:
    hashes, request = chain_of(3), Request("r")
    put_chain(client, MANIFEST, hashes)
    overwrite_stored(str(tmp_path / "s.sock"), MANIFEST, hashes[64:], b"\0" * BLOCK)
    answered(leases, keys_of(hashes), request)
    leases.load(keys_of(hashes), request)
    leases.release(request)
    leases.examine(request)
    assert eventually(lambda: client.match(MANIFEST, hashes).blocks == 2)
    assert eventually(lambda: server.stats()["leased_blocks"] == 0)


def test_names_that_are_not_the_stores_are_missing(leases: Leases) -> None:
    request, weak = Request("r"), b"\1" * 8 + GROUP
    answered(leases, [weak], request)
    assert leases.misses(weak, request)

"""The SSD tier as clients see it: what memory let go is still there, unless the disk fails."""

import json
import resource
from collections.abc import Callable

import pytest
from tests.fakes.disk import MANIFEST, POOL_BLOCKS, DiskNode, read
from tests.fakes.patience import eventually
from tests.fakes.store import chain_of, put_chain

from kvrouter_store._core import StoreServer
from kvrouter_store.client.asyncio_client import AsyncStoreClient
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.dialer import TransportName
from kvrouter_store.node.http_api import HttpApi
from kvrouter_store.node.own_client import OwnClient

pytestmark = pytest.mark.slow
Start = Callable[..., DiskNode]


async def test_an_announced_prefix_is_in_memory_before_it_is_read(start_over_disk: Start) -> None:
    node = start_over_disk()
    chains = node.fill(10)
    async with AsyncStoreClient(node.url) as router:
        assert (await router.match(MANIFEST, chains[0])).places[-1].tier == 1
        assert node.stat("disk_promoted_total") == 0
        assert (await router.match(MANIFEST, chains[0], promote=True)).blocks == 16
        assert eventually(lambda: node.stat("disk_promoted_total") == 16)
        assert [each.tier for each in (await router.match(MANIFEST, chains[0])).places] == [0]
    assert node.stat("disk_announced_total") == 1
    assert node.stat("disk_parked_total") == node.stat("pinned_blocks") == 0


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_what_memory_let_go_is_read_back_equal(
    start_over_disk: Start, transport: TransportName
) -> None:
    node = start_over_disk("--disk-read-timeout", "15")  # none is late, however busy the host is
    chains = node.fill(10)  # 160 blocks; the memory has 64
    assert node.stat("blocks") <= POOL_BLOCKS
    with StoreClient(node.url, transport=transport) as client:
        for hashes in chains:
            assert client.match(MANIFEST, hashes).blocks == 16
            assert read(client, hashes) == 16
    assert node.stat("disk_promoted_total") >= 160 - POOL_BLOCKS
    assert node.stat("disk_errors_total") == node.stat("disk_late_total") == 0


def test_what_was_put_without_digests_lies_on_the_disk_with_them(start_over_disk: Start) -> None:
    node, hashes = start_over_disk("--digests", "off"), chain_of(16, "blind")
    with StoreClient(node.url) as client:
        put_chain(client, MANIFEST, hashes)
    assert node.flush() == 16
    node.kill()
    node = start_over_disk()
    with StoreClient(node.url) as client:
        assert read(client, hashes) == 16
    assert node.stat("disk_promoted_total") == 16
    assert node.stat("corrupt_total") == node.stat("disk_errors_total") == 0


def test_a_match_says_which_tier_has_how_much(start_over_disk: Start) -> None:
    node = start_over_disk()
    chains = node.fill(10)
    with StoreClient(node.url) as client:
        assert client.held(MANIFEST, chains[0] + bytes(32)) == [True] * 16 + [False]
        places = client.match(MANIFEST, chains[0]).places
        assert [(place.blocks, place.tier) for place in places][-1] == (16, 1)
        assert read(client, chains[0]) == 16
        places = client.match(MANIFEST, chains[0]).places
        assert [(place.blocks, place.tier) for place in places] == [(16, 0)]
    assert node.stat("hits_total.disk") >= 16


def test_what_is_deleted_or_purged_does_not_come_back(start_over_disk: Start) -> None:
    node = start_over_disk()
    one, other, third = node.fill(3)
    with StoreClient(node.url) as client:
        assert client.delete(MANIFEST, one) == 16
        assert client.match(MANIFEST, one).blocks == 0
        node.flush()
    node.kill()
    node = start_over_disk()
    with StoreClient(node.url) as client:
        assert client.match(MANIFEST, one).blocks == 0
        assert client.match(MANIFEST, other).blocks == 16
        assert client.purge() == 32
        assert client.match(MANIFEST, third).blocks == 0


def test_a_lease_holds_blocks_that_came_from_the_disk(start_over_disk: Start) -> None:
    node = start_over_disk()
    chains = node.fill(6)
    with StoreClient(node.url) as client, StoreClient(node.url) as other:
        lease = client.acquire(MANIFEST, chains[0])
        assert lease.blocks == 16
        for hashes in chains[1:]:
            read(other, hashes)
        assert node.stat("leased_blocks") == 16
        promoted = node.stat("disk_promoted_total")
        assert read(other, chains[0]) == 16
        assert node.stat("disk_promoted_total") == promoted
        lease.release()
    assert eventually(lambda: node.stat("pinned_blocks") == 0)


def test_a_landing_with_a_lease_brings_what_lies_on_the_disk(start_over_disk: Start) -> None:
    node = start_over_disk()
    chains = node.fill(6)
    with StoreClient(node.url) as client:
        landing = client.wait(MANIFEST, chains[0], 16, 10.0, lease=True)
        assert landing.landed
        assert landing.blocks == 16
        assert landing.lease is not None
        assert node.stat("leased_blocks") == 16
        landing.lease.release()


def limit_files(node: DiskNode, most: int) -> None:
    """From now on no file of the node's may grow beyond that, as on a disk that is full."""
    resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def test_a_full_disk_is_bypassed_and_used_again(start_over_disk: Start) -> None:
    node = start_over_disk()
    chains = node.fill(1)
    limit_files(node, 128 << 10)
    with StoreClient(node.url) as client:
        put_chain(client, MANIFEST, chain_of(8, "more"))
        assert eventually(lambda: node.stat("disk_bypassed.full") == 1)
        assert read(client, chain_of(8, "more")) == 8  # from memory
        assert read(client, chains[0]) == 16
        status, told = node.ask("/flush", "POST")
        assert status == 503
        assert "bypassed: full" in str(told)
        limit_files(node, resource.RLIM_INFINITY)
        assert eventually(lambda: node.stat("disk_bypassed") == 0)
        assert node.flush() == 24
    assert node.says("is bypassed since it is full")
    assert node.says("is used again after")


async def test_a_node_without_a_disk_cannot_flush(server: StoreServer) -> None:
    answer = await HttpApi(server, OwnClient("kv://127.0.0.1:1")).answer("POST", "/flush", {})
    assert answer.status == 503
    assert "there is no disk" in json.loads(answer.body)["error"]["message"]

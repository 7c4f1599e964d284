"""What a node tells of itself at /metrics: every stat, with its labels, once."""

import re
from collections.abc import Callable, Iterable

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.fakes.patience import eventually
from tests.fakes.store import Memory, chain_of, manifest_of, put_chain

from kvrouter_store._core import StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.client.dialer import TransportName
from kvrouter_store.node.http_api import StatsCollector
from kvrouter_store.node.metrics import FAMILIES, SHARING_REFUSED, node_metrics
from kvrouter_store.node.own_client import OwnClient

BLOCK = 4096
MANIFEST = manifest_of(BLOCK)
Connect = Callable[..., StoreClient]


def scraped(server: StoreServer) -> dict[str, float]:
    """Every sample of a scrape, by its name with its labels."""
    registry = CollectorRegistry()
    registry.register(StatsCollector(server, OwnClient(f"kv://127.0.0.1:{server.port}")))
    return {
        _spelled(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def _spelled(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return name.removeprefix("kvstore:") + (f"{{{inside}}}" if inside else "")


def stats_left_out(stats: Iterable[str]) -> set[str]:
    return {name.split(".")[0] for name in stats} - {family.stat for family in FAMILIES}


def test_every_stat_is_a_metric_and_every_metric_has_samples(server: StoreServer) -> None:
    stats = server.stats()
    assert stats_left_out(stats) == set()
    assert [one.name for one in node_metrics(stats) if not one.samples] == []


def test_a_label_s_values_are_told_in_the_help(server: StoreServer) -> None:
    for family in node_metrics(server.stats()):
        values = {value for sample in family.samples for value in sample.labels.values()}
        if family.name != "kvstore:operation_seconds" and family.type != "histogram":
            assert {value for value in values if value not in family.documentation} == set()


def test_a_family_has_one_label_set_and_one_place() -> None:
    names = [family.name for family in (*FAMILIES, SHARING_REFUSED)]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"kvstore:[a-z_]+", name) for name in names)


@pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
def test_bytes_are_counted_by_how_they_travelled(
    server: StoreServer, connect: Connect, transport: TransportName
) -> None:
    client, hashes, memory = connect(transport), chain_of(3), Memory(3, BLOCK)
    put_chain(client, MANIFEST, hashes)
    client.get_into(MANIFEST, 0, hashes, range(2), memory.segments, range(2))
    samples = scraped(server)
    for other in ("shm", "unix", "tcp"):
        mine = other == transport
        assert samples[f"bytes_in_total{{transport={other}}}"] == (3 * BLOCK if mine else 0)
        assert samples[f"bytes_out_total{{transport={other}}}"] == (2 * BLOCK if mine else 0)
    assert samples[f"connections{{transport={transport}}}"] >= 1
    assert server.stats()["bytes_in_total"] == 3 * BLOCK


def test_a_lease_without_the_pool_gives_no_bytes(server: StoreServer, connect: Connect) -> None:
    client, hashes = connect("tcp"), chain_of(2)
    put_chain(client, MANIFEST, hashes)
    with client.acquire(MANIFEST, hashes):
        assert scraped(server)["leased_blocks"] == 2
        assert server.stats()["bytes_out_total"] == 0


def test_hits_and_misses_are_those_of_a_tier(server: StoreServer, client: StoreClient) -> None:
    put_chain(client, MANIFEST, chain_of(2))
    client.match(MANIFEST, chain_of(5))
    samples = scraped(server)
    assert samples["hits_total{tier=memory}"] == 2
    assert samples["misses_total{tier=memory}"] == 3


def test_evictions_say_why_a_block_went(server: StoreServer, client: StoreClient) -> None:
    put_chain(client, MANIFEST, chain_of(4))
    client.delete(MANIFEST, chain_of(1))
    server.purge()
    samples = scraped(server)
    assert samples["evictions_total{reason=deleted}"] == 1
    assert samples["evictions_total{reason=purged}"] == 3
    assert samples["evictions_total{reason=capacity}"] == 0
    large = manifest_of(4 << 20)
    for seed in "abcdef":
        assert put_chain(client, large, chain_of(1, seed)) == 1
    assert scraped(server)["evictions_total{reason=capacity}"] == 3


def test_waits_end_with_an_outcome_and_landed_ones_have_a_time(
    server: StoreServer, connect: Connect
) -> None:
    client, hashes = connect("tcp"), chain_of(2)
    assert not client.wait(MANIFEST, hashes, 2, deadline_s=0.01).landed
    put_chain(client, MANIFEST, hashes)
    assert client.wait(MANIFEST, hashes, 2, deadline_s=5.0).landed
    samples = scraped(server)
    assert samples["landings_total{outcome=landed}"] == 1
    assert samples["landings_total{outcome=timeout}"] == 1
    assert samples["landing_wait_seconds_count"] == 1
    assert samples["landing_wait_seconds_bucket{le=0.001}"] == 1  # it had landed before
    assert samples["waits"] == 0


def test_operations_are_counted_with_the_time_they_took(
    server: StoreServer, client: StoreClient
) -> None:
    before = scraped(server)
    for _ in range(5):
        client.match(MANIFEST, chain_of(1))
    after = scraped(server)
    for name in ("count", "bucket{le=+Inf,"):
        key = f"operation_seconds_{name}{'{' if name == 'count' else ''}operation=match}}"
        assert after[key] - before[key] == 5
    spent = "operation_seconds_sum{operation=match}"
    assert 0 < after[spent] - before[spent] < 1
    assert after["operation_seconds_count{operation=purge}"] == 0


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_put_is_one_operation_however_many_pieces_it_comes_in(
    server: StoreServer, connect: Connect, transport: TransportName
) -> None:
    client, large = connect(transport), manifest_of(2 << 20)
    assert put_chain(client, large, chain_of(3)) == 3
    assert eventually(lambda: server.stats()["puts_total"] == 1)
    samples = scraped(server)
    assert samples["operation_seconds_count{operation=put}"] == 1
    # 6 MiB cannot be received and digested in less.
    assert samples["operation_seconds_sum{operation=put}"] > 100e-6


def test_a_client_reads_the_same_stats_over_the_wire(
    server: StoreServer, client: StoreClient
) -> None:
    put_chain(client, MANIFEST, chain_of(2))
    told, own = client.stats(), server.stats()
    assert list(told) == list(own)
    assert told["bytes_in_total.shm"] == own["bytes_in_total"] == 2 * BLOCK

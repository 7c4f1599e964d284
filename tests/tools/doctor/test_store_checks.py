"""Checks of a store by figures that a real store does not reach in a test."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.foreign_stores import FakeMaster

from kvrouter.engines.families import Families
from kvrouter.membership.probe_client import ProbeClient
from kvrouter.tools.doctor.base import Finding, Host, Setup, Severity
from kvrouter.tools.doctor.registry import CHECKS
from kvrouter.tools.doctor.run import DoctorSettings
from kvrouter.tools.doctor.store import StoreFacts
from kvrouter_store.client.results import SharingRefusal
from kvrouter_store.errors import StoreUnavailable

URL = "kv://10.0.0.9:7400"
GIB = 1 << 30


async def found(
    check: str,
    root: Path = Path("/nowhere"),
    more: Sequence[StoreFacts] = (),
    events: Sequence[str] = (),
    replays: Sequence[str] = (),
    **facts: Any,
) -> list[Finding]:
    """The findings of one check for a store with these facts, and `more` nodes."""
    nodes = [StoreFacts(URL, **facts), *more]
    urls = [node.url for node in nodes]
    settings = DoctorSettings(
        store=urls, store_events_connect=list(events), store_events_replay=list(replays)
    )
    setup = Setup(settings, Host(root), Families(), ProbeClient(), 1)
    setup.stores = nodes
    (examine,) = (each.examine for each in CHECKS if each.name == check)
    return [found async for found in examine(setup)]


async def test_a_disk_that_is_bypassed_is_named_with_its_reason() -> None:
    stats = {"disk_bypassed.slow": 1, "disk_bypassed.full": 0}
    (finding,) = await found("store-disk", stats=stats)
    assert finding.finding == "it does not use its disk: slow"
    assert not await found("store-disk", stats={"disk_bypassed.slow": 0})


async def test_of_several_nodes_each_is_checked_and_those_that_are_away_are_named() -> None:
    other, away = "kv://10.0.0.8:7400", "kv://10.0.0.7:7400"
    more = [
        StoreFacts(other, stats={"disk_bypassed.slow": 1}),
        StoreFacts(away, error=StoreUnavailable("no route")),
    ]
    (finding,) = await found("store-disk", more=more)
    assert finding.subject == other
    (finding,) = await found("store-reachable", more=more)
    assert (finding.subject, finding.finding) == (away, "it does not answer: no route")


async def test_three_nodes_need_a_tier_and_two_that_both_have_none_do_not() -> None:
    other = StoreFacts("kv://10.0.0.8:7400", stats={"tiered": 1})
    bare = [StoreFacts(f"kv://10.0.0.{n}:7400") for n in (6, 7)]
    (finding,) = await found("store-tier", more=[other])
    assert finding.subject == URL
    (finding,) = await found("store-tier", more=bare)
    assert finding.subject == ", ".join([URL, *(each.url for each in bare)])
    assert not await found("store-tier", more=bare[:1])
    assert not await found("store-tier", more=[other, other], stats={"tiered": 1})


async def test_a_tier_that_does_not_answer_is_named() -> None:
    stats = {"tier_up.redis://10.0.0.1:6379": 0, "tier_up.mooncake://m": 1}
    (finding,) = await found("store-tier-up", stats=stats)
    assert (finding.subject, finding.severity) == (URL, Severity.WARNING)
    assert finding.finding == "it does not use its tier: redis://10.0.0.1:6379 does not answer"
    assert not await found("store-tier-up", stats={"tier_up.mooncake://m": 1})
    assert not await found("store-tier-up")


async def test_nodes_with_different_tiers_are_named_with_them() -> None:
    first, second = {"tiered": 1, "tier_up.redis://a": 1}, {"tiered": 1, "tier_up.redis://b": 0}
    other = StoreFacts("kv://10.0.0.8:7400", stats=second)
    (finding,) = await found("store-tier", more=[other], stats=first)
    assert finding.subject == f"{URL} (redis://a), kv://10.0.0.8:7400 (redis://b)"
    assert not await found("store-tier", more=[StoreFacts("kv://b:1", stats=first)], stats=first)


@pytest.mark.parametrize("name", ["corrupt_total", "disk_dropped_total", "bad_frames_total"])
async def test_what_should_never_happen_is_reported(name: str) -> None:
    (finding,) = await found("store-health", stats={name: 3})
    assert finding.finding.startswith("3 ")
    assert not await found("store-health", stats={name: 0})


async def test_an_engine_that_shares_nothing_is_named_with_its_reason() -> None:
    (finding,) = await found("store-health", refusals=(SharingRefusal("vllm/a", "it is an MoE"),))
    assert (finding.subject, "it is an MoE" in finding.finding) == ("vllm/a", True)


async def test_refused_puts_and_tenants_beyond_their_quota_are_reported() -> None:
    stats = {"no_space_total": 2, "tenant_limited_total.batch": 5, "tenant_limited_total.a": 0}
    refused, limited = await found("store-pressure", stats=stats)
    assert "2 puts found no room" in refused.finding
    assert "tenant batch reached its quota 5 times" in limited.finding


async def test_a_large_pool_of_small_pages_is_reported_with_the_way_to_huge_ones(
    tmp_path: Path,
) -> None:
    stats = {"pool_bytes": 2 * GIB, "page_bytes.small": 4096}
    plant(tmp_path, "proc/meminfo", "Hugepagesize:       2048 kB\n")
    plant(tmp_path, "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "0\n")
    (finding,) = await found("huge-pages", tmp_path, here=True, stats=stats)
    assert "takes 1024 huge pages" in finding.finding
    assert "sysctl vm.nr_hugepages=1024" in finding.remedy
    small = {**stats, "pool_bytes": GIB // 2}
    assert not await found("huge-pages", tmp_path, here=True, stats=small)
    assert not await found("huge-pages", tmp_path, here=False, stats=stats), "not this host's"


async def test_a_pool_that_is_bound_to_none_of_several_numa_nodes_is_reported(
    tmp_path: Path,
) -> None:
    stats = {"pool_bytes": 2 * GIB, "numa_used_bytes.any": 0}
    plant(tmp_path, "sys/devices/system/node/has_memory", "0-1\n")
    (finding,) = await found("numa", tmp_path, here=True, stats=stats)
    assert "2 NUMA nodes" in finding.finding
    divided = {"pool_bytes": 2 * GIB, "numa_used_bytes.0": 0, "numa_used_bytes.1": 0}
    assert not await found("numa", tmp_path, here=True, stats=divided)


async def test_an_rdma_device_that_a_remote_store_does_not_use_is_reported_with_the_reason(
    tmp_path: Path,
) -> None:
    plant(tmp_path, "sys/class/infiniband/mlx5_0/node_type", "1: CA\n")
    remote: dict[str, Any] = {"transport": "tcp", "no_rdma": "pyverbs is not installed"}
    (finding,) = await found("store-rdma", tmp_path, **remote)
    assert "pyverbs is not installed" in finding.finding
    assert not await found("store-rdma", tmp_path, **{**remote, "transport": "rdma"})


async def test_a_node_that_publishes_or_repeats_no_events_where_others_do_is_named() -> None:
    place = ("127.0.0.1", 0)
    with (
        socket.create_server(place) as heard,
        socket.create_server(place) as asked,
        socket.socket() as bound,
    ):
        bound.bind(place)  # and does not listen
        publishes, silent = "kv://127.0.0.1:1", "kv://127.0.0.1:2"
        pairs = [(publishes, heard), (silent, bound)]
        ports = [f"{url.removeprefix('kv://')}={at.getsockname()[1]}" for url, at in pairs]
        more = [StoreFacts(url) for url, _ in pairs]
        replays = [str(asked.getsockname()[1])]
        (finding,) = await found("store-events", more=more, events=ports, replays=replays)
        assert (finding.subject, "Connection refused" in finding.finding) == (silent, True)
        (finding,) = await found("store-events", more=more[:1], events=ports[:1], replays=["1"])
        assert finding.remedy.endswith("--store-events-replay")
        assert not await found("store-events", more=more)


def plant(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


async def test_a_store_of_another_project_that_does_not_answer_is_named() -> None:
    master = FakeMaster()
    await master.start()
    settings = DoctorSettings(store=[master.url])
    setup = Setup(settings, Host(Path("/nowhere")), Families(), ProbeClient(), 1)
    (examine,) = (each.examine for each in CHECKS if each.name == "store-reachable")
    assert [found async for found in examine(setup)] == []
    await master.stop()
    (finding,) = [found async for found in examine(setup)]
    assert finding.subject == master.url
    assert "does not answer" in finding.finding

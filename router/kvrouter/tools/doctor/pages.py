"""Checks of a store on this host: whether its pool has huge pages, and is spread over NUMA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvrouter.tools.doctor.base import Check, SetUp, remark
from kvrouter_store.node.placement import memory_nodes, plan

if TYPE_CHECKING:
    from kvrouter.tools.doctor.base import Found

LARGE_POOL_BYTES: Final = 1 << 30
"""A smaller pool gains nothing that can be measured."""


async def _huge_pages(setup: SetUp) -> Found:
    store = await setup.the_store()
    if store is None or not store.here or not store.stat("page_bytes.small"):
        return
    pool = store.stat("pool_bytes")
    if pool < LARGE_POOL_BYTES:
        return
    lack, _, remedy = plan(setup.host.read, pool, "auto", "auto", prefault=False).lack.partition(
        ": "
    )
    yield remark(
        store.url,
        f"its pool is made of small pages{f': {lack}' if lack else ''}; huge ones make copies "
        "quicker",
        f"before the node starts, {remedy}" if lack else "this host has them now: restart the node",
    )


async def _numa(setup: SetUp) -> Found:
    store = await setup.the_store()
    if store is None or not store.here or store.stat("pool_bytes") < LARGE_POOL_BYTES:
        return
    nodes = memory_nodes(setup.host.read)
    if len(nodes) > 1 and "numa_used_bytes.any" in store.stats:
        yield remark(
            store.url,
            f"this host has {len(nodes)} NUMA nodes, and the pool is bound to none of them",
            "give its container the capability SYS_NICE, or run a node for each under `numactl "
            "--cpunodebind=N --membind=N`",
        )


CHECKS: Final = (
    Check("huge-pages", "a large pool of a store on this host has huge pages", _huge_pages),
    Check("numa", "a large pool of a store on this host is divided among NUMA nodes", _numa),
)

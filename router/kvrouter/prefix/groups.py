"""What the store holds for engines that keep KV in several cache groups, each stored by itself.

A prefix can be loaded up to a boundary where all groups have what they reach back to: full
attention all blocks, a sliding window the last ones, a recurrent state the last one.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from kvrouter_store.client.asyncio_client import AsyncLanding, AsyncLease, AsyncStoreClient
from kvrouter_store.client.batches import hashes_of, requests
from kvrouter_store.identity.chain import HASH_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvrouter.engines.engine import CacheGroup
    from kvrouter_store.identity.block import Manifest

    Group = tuple[Manifest, int | None]  # and how many trailing blocks it needs; None: all


class Leases:
    """Several leases as one."""

    def __init__(self) -> None:
        self.held: list[AsyncLease] = []

    def release(self) -> None:
        """End all of them. Idempotent."""
        for lease in self.held:
            lease.release()
        self.held.clear()


async def loadable(store: AsyncStoreClient, groups: Sequence[Group], hashes: bytes) -> int:
    """Leading blocks of a chain that can be loaded, by all groups."""
    blocks = len(hashes) // HASH_BYTES if groups else 0
    for manifest, reach in groups:
        if reach is None and blocks:
            found = await store.match(manifest, hashes[: blocks * HASH_BYTES], promote=True)
            blocks = found.blocks
    tails = [(manifest, reach) for manifest, reach in groups if reach is not None]
    if not tails:
        return blocks
    boundaries = set(range(1, blocks + 1))
    for manifest, reach in tails:
        if boundaries:
            held = await store.held(manifest, hashes[: blocks * HASH_BYTES])
            boundaries &= _boundaries(held, reach)
    return max(boundaries, default=0)


def known_loadable(
    run: Callable[[str, int, int], int], groups: Sequence[CacheGroup], blocks: int
) -> int:
    """The same of a chain of `blocks`, by what is known.

    run: how many blocks from a first one on, before an end, are there of a manifest without a hole.
    """
    left = blocks if groups else 0
    while left:
        ends = []
        for group in groups:
            if group.reach is None:
                ends.append(min(left, run(group.manifest, 0, blocks)))
            else:
                first = max(0, left - group.reach)
                ends.append(first + run(group.manifest, first, left))
        if min(ends) == left:
            break
        left = min(ends)  # the block behind it is missing, and all boundaries up to here need it
    return left


async def wait_landed(
    store: AsyncStoreClient,
    groups: Sequence[Group],
    hashes: bytes,
    span: range,
    deadline_s: float,
    *,
    lease: bool,
) -> tuple[AsyncLanding, Leases]:
    """Wait until the blocks `span`, and what is before them, can be loaded by all groups.

    Raises KVStoreError. The leases are the caller's, and there are none unless all has landed.
    """
    leases, until = Leases(), monotonic() + deadline_s
    try:
        for manifest, reach in groups:
            first = span.start if reach is None else max(0, span.stop - reach)
            for piece in requests(range(first, span.stop)):
                left_s = max(0.0, until - monotonic())
                chain = hashes_of(hashes, piece)
                landing = await store.wait(manifest, chain, len(piece), left_s, lease)
                if landing.lease is not None:
                    leases.held.append(landing.lease)
                if not landing.landed:
                    leases.release()
                    come = piece.start + landing.blocks
                    whole = come > first and len(groups) == 1  # else no tail is where it ends
                    return AsyncLanding(False, come if whole else 0), leases
    except BaseException:
        leases.release()
        raise
    return AsyncLanding(True, span.stop), leases


def _boundaries(held: Sequence[bool], reach: int) -> set[int]:
    """Numbers of leading blocks after which the last `reach` blocks, or all, are held."""
    found, run = set(), 0
    for blocks, there in enumerate(held, 1):
        run = run + 1 if there else 0
        if run >= min(reach, blocks):
            found.add(blocks)
    return found

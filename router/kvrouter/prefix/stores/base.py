"""The interface of KV stores as the router sees them.

An implementation raises nothing where its store is unreachable or slow: the request goes on without
reuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kvrouter.engines.engine import Identity
    from kvrouter.engines.families.base import Handoff
    from kvrouter.prefix.groups import Leases


class LandingOutcome(StrEnum):
    """How the wait for a landing ended."""

    LANDED = "landed"
    TIMEOUT = "timeout"
    STORE_AWAY = "store_away"
    UNKNOWN_MANIFEST = "unknown_manifest"


class StoreMatch(NamedTuple):
    """Leading blocks of a chain that an engine can load.

    `nodes`: those at each of several nodes, by URL; None: there is one store.
    """

    blocks: int = 0
    nodes: Mapping[str, int] | None = None

    def at(self, node: str | None) -> int:
        """Those at one of several nodes; else all."""
        return self.blocks if self.nodes is None else self.nodes.get(node or "", 0)

    def source(self, own: str | None) -> str | None:
        """The node that has most of them, for an engine with the node `own`; None: that has."""
        if not self.nodes:
            return None
        best = max(self.nodes, key=self.nodes.__getitem__)
        return best if self.nodes[best] > self.nodes.get(own or "", 0) else None

    def with_landed(self, node: str | None, blocks: int) -> StoreMatch:
        """The same after `blocks` were found at `node`; None: there is only one."""
        if node is None:
            return self
        return StoreMatch(max(self.blocks, blocks), {**(self.nodes or {}), node: blocks})


NOTHING_HELD: Final = StoreMatch()


@dataclass(frozen=True, slots=True)
class LandingResult:
    """The end of a wait."""

    outcome: LandingOutcome
    blocks: int = 0  # leading blocks that are whole in the store, as far as it answered
    lease: Leases | None = None  # on them; its owner must release it. Empty in stores without any
    node: str | None = None  # URL of the node, if it is one of several


@dataclass(frozen=True, slots=True)
class Origin:
    """What the block hashes of a prompt were made of, for stores that name KV in another way."""

    ids: bytes  # its token ids, native uint32
    block_tokens: int
    cache_salt: str | None
    adapter: tuple[str, str] | None  # name and path of the LoRA adapter


@dataclass(frozen=True, slots=True)
class WantedBlocks:
    """Leading blocks of a prompt that are to land."""

    manifest: str  # by which they are written now: from `promised` or `current`
    hashes: bytes  # of the chain, 32 bytes each
    upto: int  # how many are wanted
    held: StoreMatch = NOTHING_HELD  # which of them were there already
    node: str | None = None  # where they are written; None or unknown: at any node
    lease: bool = True  # whether they are to stay
    origin: Origin | None = None
    reused: int | None = None  # tokens that the engine which writes them did not compute


class StoreClient(Protocol):
    """One server of a store, as the router tells about it."""

    url: str

    @property
    def connected(self) -> bool:
        """Whether it can be asked now."""

    async def stats(self) -> dict[str, int]:
        """Its gauges and counters, if it has any; also while it is away. Raises KVStoreError."""


class StoreView(Protocol):
    """Asks a store about blocks of engines. Calls may be concurrent. Its owner closes it."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Outcomes of waits by name, and `match_failed`."""

    @property
    def clients(self) -> Collection[StoreClient]:
        """One of each of its servers."""

    @property
    def away(self) -> Collection[str]:
        """URLs of those that are not connected."""

    @property
    def nodes(self) -> Collection[str]:
        """URLs of its nodes, if it has or had several and each engine writes to one of them."""

    @property
    def out_of_reach(self) -> Collection[str]:
        """URLs of several nodes that are not connected, or that left; engines may still name them.

        What such an engine computes reaches no other.
        """

    async def start(self, wait_s: float) -> None:
        """Connect in the background; returns when all is connected, or after `wait_s`."""

    async def close(self) -> None:
        """End the connections and what they hold. Idempotent."""

    async def joins(self, identity: Identity) -> Identity:
        """Take note of an engine before it joins; what it is to this store."""

    def promised(self, handoff: Handoff, identity: Identity | None) -> tuple[str | None, int]:
        """The manifest and the leading blocks that an engine's prefill leg puts into this store."""

    def current(self, manifest: str) -> str:
        """The manifest by which an engine that joined with this one was last heard to write."""

    async def match(self, manifest: str, hashes: bytes, origin: Origin | None = None) -> StoreMatch:
        """Leading blocks of the chain that an engine can load; 0 if the store does not answer.

        `manifest` is a hex digest or from `joins`, `hashes` 32 bytes per block.
        """

    async def wait(self, wanted: WantedBlocks, deadline_s: float) -> LandingResult:
        """Wait until an engine can load what is wanted, at most `deadline_s`.

        Cancellation ends the wait at the store too. A lease in the result must be released.
        """

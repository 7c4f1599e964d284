"""The interface of KV stores as the router sees them.

An implementation raises nothing where its store is unreachable or slow: the request goes on without
reuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections import Counter

    from kvrouter.engines.engine import CacheGroup, Identity
    from kvrouter.prefix.groups import Leases


class LandingOutcome(StrEnum):
    """How the wait for a landing ended."""

    LANDED = "landed"
    TIMEOUT = "timeout"
    STORE_AWAY = "store_away"
    UNKNOWN_MANIFEST = "unknown_manifest"


@dataclass(frozen=True, slots=True)
class LandingResult:
    """The end of a wait."""

    outcome: LandingOutcome
    blocks: int = 0  # leading blocks that are whole in the store, as far as it answered
    lease: Leases | None = None  # on them; its owner must release it. Empty in stores without any


@dataclass(frozen=True, slots=True)
class Origin:
    """What the block hashes of a prompt were made of, for stores that name KV in another way."""

    ids: bytes  # its token ids, native uint32
    block_tokens: int
    cache_salt: str | None
    adapter: tuple[str, str] | None  # name and path of the LoRA adapter


class StoreView(Protocol):
    """Asks a store about blocks of engines. Calls may be concurrent.

    `counts` has the outcomes of waits by name, and `match_failed`.
    """

    counts: Counter[str]
    adopts: bool  # whether it gives engines manifests; their answers then name none

    def adopt(self, identity: Identity) -> Identity:
        """What an engine that joins is to this store, where its connector tells no manifest."""

    async def learn(self, manifest: str, groups: tuple[CacheGroup, ...] = ()) -> None:
        """Fetch a manifest that is not known yet, for `difference`; note what it stands for."""

    def rename(self, joined: str, manifest: str, groups: tuple[CacheGroup, ...]) -> None:
        """An engine that joined with one manifest names its blocks by another: match those."""

    def difference(self, one: str, other: str) -> str:
        """How two manifests differ, in a few words."""

    async def match(self, manifest: str, hashes: bytes, origin: Origin | None = None) -> int:
        """Leading blocks of the chain that an engine can load; 0 if the store does not answer.

        `manifest` is a hex digest or from `adopt`, `hashes` 32 bytes per block.
        """

    async def wait(
        self,
        manifest: str,
        hashes: bytes,
        upto: int,
        deadline_s: float,
        *,
        held: int = 0,
        lease: bool = True,
        origin: Origin | None = None,
    ) -> LandingResult:
        """Wait until an engine can load the first `upto` blocks, at most `deadline_s`.

        held: how many of them were there already.

        Cancellation ends the wait at the store too. A lease in the result must be released.
        """

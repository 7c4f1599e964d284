"""Applies the KV events of one engine to the index: which events count, and which blocks they name.

It knows neither publishers nor the order of messages.
"""

from __future__ import annotations

import logging
from collections import ChainMap, Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from kvrouter.prefix.events.messages import (
    NIL,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    decode_tokens,
    is_plain,
    low_id,
    low_ids,
)
from kvrouter.prefix.index import PrefixIndex, block_ids
from kvrouter.prefix.lower import MEDIA, LowerTiers, Tier
from kvrouter_store.identity.chain import HASH_BYTES, hash_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvrouter.engines.engine import Engine, HashDomain

WHOLE_KINDS: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of cache groups that keep the whole history, by vLLM's names (`KVCacheSpecKind` of 0.33):
they say how far a prefix is held. None: the engine names no kind. The others drop blocks that a
prefix still needs, or cannot be told."""

MOST_EVICTED: Final = 8192
"""Names that are kept of blocks that left the device: vLLM may name them after that, once they are
copied to host memory."""

log = logging.getLogger(__name__)


class Naming(StrEnum):
    """How the block names of an engine's events relate to the router's block hashes."""

    UNKNOWN = "unknown"  # no first block of a chain seen yet; names are used as they are
    EXACT = "exact"  # they are the low 64 bits
    MAPPED = "mapped"  # another hash: the router hashes the token ids of each block
    FOREIGN = "foreign"  # another block size: blocks cannot be mapped, and are ignored


@dataclass(slots=True)
class BlockNaming:
    """How one engine names its blocks."""

    naming: Naming = Naming.UNKNOWN
    domain: HashDomain | None = None  # the router's hash domain for which `naming` holds
    known: dict[Tier, OrderedDict[int, bytes]] = field(
        default_factory=lambda: {tier: OrderedDict() for tier in Tier}
    )
    """If MAPPED, our 32-byte hash by the engine's name, for each tier, oldest first."""
    evicted: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    """The latest of these that left the device, of which a lower tier may be told later."""
    ahead: bool = False  # whether its names cover tokens after the block, as those of draft layers
    uses: Counter[tuple[Tier, bytes]] = field(default_factory=Counter)
    """If `ahead`, how many names `known` has of each of our hashes."""
    group: int | None = None  # the cache group that counts, from its first event
    uncounted: bool = False  # whether blocks were stored, but none of a group that counts
    counted: bool = False  # whether blocks of a group that counts were stored
    unnamed: bool = False  # whether blocks could not be mapped since the cache was empty
    dropped: bool = False  # whether blocks were forgotten that older messages would bring back
    used_unknown: bool = False  # whether names were used before the naming was known

    def emptied(self) -> None:
        """The index has no block of the engine any more; the naming stays known."""
        for known in (*self.known.values(), self.evicted):
            known.clear()
        self.uses.clear()
        self.unnamed = self.used_unknown = False

    def learn(self, tier: Tier, name: int, own: bytes) -> None:
        """A tier has a block under that name; `own` is our hash of it."""
        known = self.known[tier]
        if self.ahead and known.get(name) != own:
            self.uses[tier, own] += 1
        known[name] = own

    def forget(self, tier: Tier, name: int) -> bytes | None:
        """Our hash of a block that lost its name; None: it is unknown, or has another name yet."""
        own = self.known[tier].pop(name, None)
        if own is not None and tier is Tier.DEVICE:
            self.evicted[name] = own
            if len(self.evicted) > MOST_EVICTED:
                self.evicted.popitem(last=False)
        if own is None or (left := self.uses.pop((tier, own), 1) - 1) == 0:
            return own
        self.uses[tier, own] = left
        return None

    def counts_for(self, event: BlockStored | BlockRemoved, tier: Tier = Tier.DEVICE) -> bool:
        """Whether the event is of the cache group that counts, the first with the whole history.

        Groups of a sliding window drop blocks that a prefix still needs, so they do not say how
        far a prefix is held (llm-d-router issues 2362 and 2363). The device's events say which
        group that is: lower tiers may name no kind (see `BlockMapping._stored_below`).
        """
        device = tier is Tier.DEVICE
        if isinstance(event, BlockStored):
            if event.kv_cache_spec_kind not in WHOLE_KINDS:
                self.uncounted = not self.counted if device else self.uncounted
                return False
            if self.group is None and device:
                self.group = event.group_idx
        return event.group_idx is None or event.group_idx == self.group

    def own_hashes(self, event: BlockStored, domain: HashDomain) -> bytes | None:
        """Our hashes of the event's blocks; None: unknown."""
        parent = None
        if event.parent_block_hash is not None:
            parent = self.known[Tier.DEVICE].get(low_id(event.parent_block_hash))
            if parent is None:
                return None
        if event.block_size != domain.block_tokens or not is_plain(event):
            return None
        try:
            tokens = decode_tokens(event)
            if len(tokens) // event.block_size != len(event.block_hashes):
                return None
            salt = event.cache_salt if parent is None else None
            size, root = event.block_size, domain.root
            return hash_tokens(tokens, size, root=root, parent=parent, cache_salt=salt).data
        except ValueError:
            return None


class EventMapping(Protocol):
    """Applies events to an index. `engine` is what publishes them."""

    def is_foreign(self, engine: Engine, names: BlockNaming) -> bool:
        """Whether its events say nothing of the router's present hashes."""

    def empty(self, engine: Engine, names: BlockNaming) -> None:
        """Forget all its blocks."""

    def apply(self, engine: Engine, names: BlockNaming, event: Event) -> bool:
        """Apply one event; returns whether it emptied what publishes it."""


class EventCounts(Counter[str]):
    """Counts by kind; each only grows."""

    def warn(self, name: str, message: str, *args: object) -> None:
        """Count, and log at each power of two, so that the log stays bounded."""
        self[name] += 1
        if self[name].bit_count() == 1:
            log.warning(message + " (%d so far)", *args, self[name])


@dataclass(eq=False)
class BlockMapping:
    """Applies events of engines; see `CacheTracker` for the arguments."""

    index: PrefixIndex
    domain: Callable[[Engine], HashDomain | None]
    max_names: int
    counts: EventCounts
    lower: LowerTiers

    def __post_init__(self) -> None:
        self._indexes = {Tier.DEVICE: self.index, **self.lower.indexes}

    def is_foreign(self, engine: Engine, names: BlockNaming) -> bool:
        """See `EventMapping`."""
        foreign = names.naming is Naming.FOREIGN and names.domain == self.domain(engine)
        return foreign or names.uncounted

    def empty(self, engine: Engine, names: BlockNaming) -> None:
        """Forget all blocks of `engine`, in all tiers.

        vLLM's event that all is cleared does not say whether its host memory is, too.
        """
        for index in self._indexes.values():
            index.clear(engine)
        names.emptied()

    def apply(self, engine: Engine, names: BlockNaming, event: Event) -> bool:
        """Apply one event; returns whether it emptied the engine's cache."""
        if isinstance(event, AllBlocksCleared):
            self.empty(engine, names)
            return True
        tier = MEDIA.get(event.medium, Tier.STORAGE)
        if not names.counts_for(event, tier):
            self.counts["other_group"] += 1
        elif isinstance(event, BlockStored):
            store = self._stored if tier is Tier.DEVICE else self._stored_below
            store(engine, names, event, tier)
        elif names.naming in (Naming.MAPPED, Naming.FOREIGN):
            self._forget(engine, names, tier, map(low_id, event.block_hashes))
        else:
            self._indexes[tier].removed(engine, low_ids(event.block_hashes))
        return False

    def _stored(self, engine: Engine, names: BlockNaming, event: BlockStored, tier: Tier) -> None:
        if names.uncounted:
            self.index.clear(engine)  # guesses, in place of which its events are used now
        names.counted, names.uncounted = True, False
        names.ahead = names.ahead or event.lookahead_token_ids != NIL
        domain = self.domain(engine)
        if names.domain != domain:
            self._change_domain(engine, names, domain)
        is_root = event.parent_block_hash is None
        if names.naming is Naming.UNKNOWN and domain is not None and is_root and is_plain(event):
            self._learn_naming(engine, names, event, domain)
        if names.naming in (Naming.UNKNOWN, Naming.EXACT):
            if names.naming is Naming.UNKNOWN:
                names.used_unknown = True
            self.index.stored(engine, low_ids(event.block_hashes))
            return
        hashes = names.own_hashes(event, domain) if domain else None
        if hashes is None or len(hashes) != HASH_BYTES * len(event.block_hashes):
            self.counts["unmapped_blocks"] += len(event.block_hashes)
            names.unnamed = True
            return
        self._credit(engine, names, tier, low_ids(event.block_hashes), hashes)

    def _stored_below(
        self, engine: Engine, names: BlockNaming, event: BlockStored, tier: Tier
    ) -> None:
        """Blocks of a lower tier, by the names that they had in the engine's own cache.

        Events of vLLM 0.33 (distributed/kv_transfer/kv_connector/v1/offloading/events.py) have no
        tokens, kind or block size, and of a chunk of blocks only the last name, so that it is never
        found. With `self_describing_kv_events` they have all but salts: tokens do not suffice.
        """
        domain = self.domain(engine)
        size = domain.block_tokens if domain is not None else event.block_size
        if names.naming in (Naming.UNKNOWN, Naming.EXACT) and event.block_size in (0, size):
            names.used_unknown = names.used_unknown or names.naming is Naming.UNKNOWN
            self._indexes[tier].stored(engine, low_ids(event.block_hashes))
            return
        known = ChainMap(*names.known.values(), names.evicted)
        found = {name: known[name] for name in map(low_id, event.block_hashes) if name in known}
        self.counts["unmapped_blocks"] += len(event.block_hashes) - len(found)
        self._credit(engine, names, tier, found, b"".join(found.values()))

    def _credit(
        self, engine: Engine, names: BlockNaming, tier: Tier, new: Iterable[int], hashes: bytes
    ) -> None:
        """These are in a tier. Beyond the bound the oldest leave it: their removal has no name."""
        for place, name in enumerate(new):
            names.learn(tier, name, hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES])
        self._indexes[tier].credit(engine, hashes)
        known = names.known[tier]
        if len(known) > self.max_names:
            self._forget(engine, names, tier, [*islice(known, len(known) - self.max_names)])
            names.unnamed = names.unnamed or tier is Tier.DEVICE

    def _forget(self, engine: Engine, names: BlockNaming, tier: Tier, gone: Iterable[int]) -> None:
        own = (names.forget(tier, name) for name in gone)
        self._indexes[tier].removed(engine, [_id_of(each) for each in own if each is not None])

    def _change_domain(self, engine: Engine, names: BlockNaming, domain: HashDomain | None) -> None:
        """The router hashes its prompts in another domain from now on: mapped blocks are void."""
        if names.naming is not Naming.UNKNOWN:
            self.empty(engine, names)
            names.dropped = True
        names.naming, names.domain = Naming.UNKNOWN, domain

    def _learn_naming(
        self, engine: Engine, names: BlockNaming, event: BlockStored, domain: HashDomain
    ) -> None:
        """Compare a chain's first blocks with our own hashes of their tokens: once per engine."""
        if event.block_size != domain.block_tokens:
            names.naming = Naming.FOREIGN
            remedy = f"start it with --block-size {domain.block_tokens}"
        else:
            hashes = names.own_hashes(event, domain)
            if hashes and block_ids(hashes) == low_ids(event.block_hashes):
                names.naming = Naming.EXACT
                return
            names.naming = Naming.MAPPED
            remedy = "vLLM does with --prefix-caching-hash-algo sha256_cbor and no PYTHONHASHSEED"
            if names.ahead:
                remedy += ', and "disable_lookahead_block_hashes" in its --speculative-config'
        names.dropped = names.dropped or names.used_unknown
        self.empty(engine, names)
        self.counts.warn(
            "foreign_names",
            "KV events of %s do not name blocks as this router does (%s): %s",
            engine.address,
            names.naming,
            remedy,
        )


def _id_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")

"""Applies the KV events of one engine to the index: which events count, and which blocks they name.

It knows neither publishers nor the order of messages.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from kvrouter.prefix.events.messages import (
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
from kvrouter_store.identity.chain import HASH_BYTES, hash_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvrouter.engines.engine import Engine, HashDomain

DEVICE_MEDIA: Final = (None, "GPU")
"""Media of an engine's own cache; vLLM says "GPU" on its CPU build too."""

WHOLE_KINDS: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of cache groups that keep the whole history, by vLLM's names (`KVCacheSpecKind` of 0.33):
they say how far a prefix is held. None: the engine names no kind. The others drop blocks that a
prefix still needs, or cannot be told."""

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
    known: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    """If MAPPED, our 32-byte hash by the engine's name, oldest first."""
    group: int | None = None  # the cache group that counts, from its first event
    uncounted: bool = False  # whether blocks were stored, but none of a group that counts
    counted: bool = False  # whether blocks of a group that counts were stored
    unnamed: bool = False  # whether blocks could not be mapped since the cache was empty
    dropped: bool = False  # whether blocks were forgotten that older messages would bring back
    used_unknown: bool = False  # whether names were used before the naming was known

    def emptied(self) -> None:
        """The index has no block of the engine any more; the naming stays known."""
        self.known.clear()
        self.unnamed = self.used_unknown = False

    def counts_for(self, event: BlockStored | BlockRemoved) -> bool:
        """Whether the event is of the cache group that counts, the first with the whole history.

        Groups of a sliding window drop blocks that a prefix still needs, so they do not say how
        far a prefix is held (llm-d-router issues 2362 and 2363).
        """
        if isinstance(event, BlockStored):
            if event.kv_cache_spec_kind not in WHOLE_KINDS:
                self.uncounted = not self.counted
                return False
            if self.group is None:
                self.group = event.group_idx
        return event.group_idx is None or event.group_idx == self.group

    def own_hashes(self, event: BlockStored, domain: HashDomain) -> bytes | None:
        """Our hashes of the event's blocks; None: unknown."""
        parent = None
        if event.parent_block_hash is not None:
            parent = self.known.get(low_id(event.parent_block_hash))
            if parent is None:
                return None
        if event.block_size != domain.block_tokens or not is_plain(event):
            return None
        try:
            tokens = decode_tokens(event)
            if len(tokens) // event.block_size != len(event.block_hashes):
                return None
            return hash_tokens(tokens, event.block_size, root=domain.root, parent=parent).data
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

    def is_foreign(self, engine: Engine, names: BlockNaming) -> bool:
        """See `EventMapping`."""
        foreign = names.naming is Naming.FOREIGN and names.domain == self.domain(engine)
        return foreign or names.uncounted

    def empty(self, engine: Engine, names: BlockNaming) -> None:
        """Forget all blocks of `engine`."""
        self.index.clear(engine)
        names.emptied()

    def apply(self, engine: Engine, names: BlockNaming, event: Event) -> bool:
        """Apply one event; returns whether it emptied the engine's cache."""
        if isinstance(event, AllBlocksCleared):
            self.empty(engine, names)
            return True
        if event.medium not in DEVICE_MEDIA:
            self.counts["other_medium"] += 1
        elif not names.counts_for(event):
            self.counts["other_group"] += 1
        elif isinstance(event, BlockStored):
            self._stored(engine, names, event)
        elif names.naming in (Naming.MAPPED, Naming.FOREIGN):
            own = (names.known.pop(low_id(name), None) for name in event.block_hashes)
            self.index.removed(engine, [_id_of(each) for each in own if each is not None])
        else:
            self.index.removed(engine, low_ids(event.block_hashes))
        return False

    def _stored(self, engine: Engine, names: BlockNaming, event: BlockStored) -> None:
        if names.uncounted:
            self.index.clear(engine)  # guesses, in place of which its events are used now
        names.counted, names.uncounted = True, False
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
        for place, name in enumerate(event.block_hashes):
            own = hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES]
            names.known[low_id(name)] = own
        self.index.credit(engine, hashes)
        if len(names.known) > self.max_names:
            self._bound(engine, names)

    def _bound(self, engine: Engine, names: BlockNaming) -> None:
        """Forget the oldest names with their blocks, whose removal could not be mapped."""
        gone = []
        while len(names.known) > self.max_names:
            gone.append(_id_of(names.known.popitem(last=False)[1]))
        self.index.removed(engine, gone)
        names.unnamed = True

    def _change_domain(self, engine: Engine, names: BlockNaming, domain: HashDomain | None) -> None:
        """The router hashes its prompts in another domain from now on: mapped blocks are void."""
        if names.naming is not Naming.UNKNOWN:
            self.index.clear(engine)
            names.dropped = True
            names.emptied()
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
        self.index.clear(engine)
        names.dropped = names.dropped or names.used_unknown
        self.counts.warn(
            "foreign_names",
            "KV events of %s do not name blocks as this router does (%s): %s",
            engine.address,
            names.naming,
            remedy,
        )


def _id_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")

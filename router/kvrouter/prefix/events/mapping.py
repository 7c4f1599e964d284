"""KV events of one engine -> what the index says it holds: which events count, and what they name.

Knows neither publishers nor the order of messages.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from kvrouter.prefix.events.messages import (
    Cleared,
    Removed,
    Stored,
    decode_tokens,
    low_id,
    low_ids,
)
from kvrouter.prefix.index import block_ids
from kvrouter_store.identity.chain import HASH_BYTES, hash_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvrouter.engines.engine import Engine, HashDomain
    from kvrouter.prefix.events.messages import Event, Id
    from kvrouter.prefix.index import PrefixIndex

DEVICE_MEDIA: Final = (None, "GPU")
"""Media that count as an engine's own cache; vLLM says "GPU" on its CPU build too."""

log = logging.getLogger(__name__)


class Naming(StrEnum):
    """How the names in an engine's events relate to the router's own block hashes."""

    UNKNOWN = "unknown"  # no first block of a chain seen yet; taken as they are until one is
    EXACT = "exact"  # they are the low 64 bits of them
    MAPPED = "mapped"  # another hash: each is named anew from its token ids
    FOREIGN = "foreign"  # blocks of another size: they cannot be named, and are left out


@dataclass(slots=True)
class BlockNaming:
    """What is known of how one engine names its blocks.

    Attributes:
        naming: see `Naming`.
        domain: the hash domain under which `naming` was learnt.
        known: where MAPPED, the engine's name -> our 32-byte hash, oldest first.
        group: the cache group that counts, learnt from the first full-attention event.
        unnamed: whether blocks that it holds could not be named since its cache was empty.
        dropped: whether claims were dropped that its earlier messages could bring back.
        as_they_are: whether names were taken as they are before the naming was known.
    """

    naming: Naming = Naming.UNKNOWN
    domain: HashDomain | None = None
    known: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    group: int | None = None
    unnamed: bool = False
    dropped: bool = False
    as_they_are: bool = False

    def emptied(self) -> None:
        """Nothing is claimed of the engine any more; how it names blocks stays known."""
        self.known.clear()
        self.unnamed = False
        self.as_they_are = False


class MappingTally(Counter[str]):
    """Counts by kind; each only grows. Log lines about a kind grow rare."""

    def warn(self, name: str, message: str, *args: object) -> None:
        """Count; log the first and then each at a power of two, so that nobody floods the log."""
        self[name] += 1
        if self[name].bit_count() == 1:
            log.warning(message + " (%d so far)", *args, self[name])


class BlockMapping:
    """Applies events to the index.

    Args:
        index: is told what engines hold.
        domain: the hash domain of the router's own hashes now, or None while unknown.
        max_names: bound of the names kept per engine whose naming is MAPPED.
        counts: unknown_event, other_medium, other_group, foreign_names, unmapped_blocks.
    """

    def __init__(
        self,
        index: PrefixIndex,
        domain: Callable[[], HashDomain | None],
        max_names: int,
        counts: MappingTally,
    ) -> None:
        self._index = index
        self._domain = domain
        self._max_names = max_names
        self._counts = counts

    def empty(self, engine: Engine, names: BlockNaming) -> None:
        """Claim nothing of `engine` any more."""
        self._index.clear(engine)
        names.emptied()

    def apply(self, engine: Engine, names: BlockNaming, event: Event) -> bool:
        """Apply one event; returns whether it emptied the engine's cache."""
        if isinstance(event, Cleared):
            self.empty(engine, names)
            return True
        if event.medium not in DEVICE_MEDIA:
            self._counts["other_medium"] += 1
        elif not _counts_for(names, event):
            self._counts["other_group"] += 1
        elif isinstance(event, Stored):
            self._stored(engine, names, event)
        else:
            self._removed(engine, names, event)
        return False

    def _stored(self, engine: Engine, names: BlockNaming, event: Stored) -> None:
        domain = self._domain()
        if names.domain != domain:
            self._learn_anew(engine, names, domain)
        if names.naming is Naming.UNKNOWN and domain is not None and _is_plain_root(event):
            self._learn_naming(engine, names, event, domain)
        if names.naming in (Naming.UNKNOWN, Naming.EXACT):
            if names.naming is Naming.UNKNOWN:
                names.as_they_are = True
            self._index.stored(engine, low_ids(event.block_hashes))
            return
        hashes = _own_hashes(names, event, domain) if domain else None
        if hashes is None or len(hashes) != HASH_BYTES * len(event.block_hashes):
            self._counts["unmapped_blocks"] += len(event.block_hashes)
            names.unnamed = True
            return
        for place, name in enumerate(event.block_hashes):
            own = hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES]
            names.known[low_id(name)] = own
        self._index.credit(engine, hashes)
        if len(names.known) > self._max_names:
            self._bound(engine, names)

    def _bound(self, engine: Engine, names: BlockNaming) -> None:
        """Let the oldest names go, and what is claimed by them: its removal could not be read."""
        gone = []
        while len(names.known) > self._max_names:
            gone.append(_id_of(names.known.popitem(last=False)[1]))
        self._index.removed(engine, gone)
        names.unnamed = True

    def _learn_anew(self, engine: Engine, names: BlockNaming, domain: HashDomain | None) -> None:
        """The router names blocks otherwise from now on: what was named before is void."""
        if names.naming is not Naming.UNKNOWN:
            self._index.clear(engine)
            names.dropped = True
        names.naming, names.domain = Naming.UNKNOWN, domain
        names.emptied()

    def _learn_naming(
        self, engine: Engine, names: BlockNaming, event: Stored, domain: HashDomain
    ) -> None:
        """Compare a chain's first blocks with our own hashes of their tokens: once per engine."""
        if event.block_size != domain.block_tokens:
            names.naming = Naming.FOREIGN
            remedy = f"start it with --block-size {domain.block_tokens}"
        else:
            hashes = _own_hashes(names, event, domain)
            if hashes and block_ids(hashes) == low_ids(event.block_hashes):
                names.naming = Naming.EXACT
                return
            names.naming = Naming.MAPPED
            remedy = "start it with --prefix-caching-hash-algo sha256_cbor and no PYTHONHASHSEED"
        self._index.clear(engine)
        names.dropped = names.dropped or names.as_they_are
        self._counts.warn(
            "foreign_names",
            "KV events of %s do not name blocks as this router does (%s): %s",
            engine.address,
            names.naming,
            remedy,
        )

    def _removed(self, engine: Engine, names: BlockNaming, event: Removed) -> None:
        if names.naming in (Naming.MAPPED, Naming.FOREIGN):
            self._index.removed(engine, _forget(names, event.block_hashes))
        else:
            self._index.removed(engine, low_ids(event.block_hashes))


def _counts_for(names: BlockNaming, event: Stored | Removed) -> bool:
    """Whether the event is of the cache group that decides: the first full-attention one.

    Groups of a sliding window drop blocks that a prefix still needs elsewhere, so they say
    nothing about how far a prefix is held (llm-d-router issues 2362 and 2363).
    """
    if isinstance(event, Stored):
        if event.kv_cache_spec_kind not in (None, "full_attention"):
            return False
        if names.group is None:
            names.group = event.group_idx
    return event.group_idx is None or event.group_idx == names.group


def _is_plain(event: Stored) -> bool:
    """Whether the event's blocks are named by tokens alone: no adapter, salt or image."""
    return event.lora_id is None and event.lora_name is None and not any(event.extra_keys or ())


def _is_plain_root(event: Stored) -> bool:
    return event.parent_block_hash is None and _is_plain(event)


def _own_hashes(names: BlockNaming, event: Stored, domain: HashDomain) -> bytes | None:
    """Our hashes of the event's blocks, or None where they cannot be known."""
    parent = None
    if event.parent_block_hash is not None:
        parent = names.known.get(low_id(event.parent_block_hash))
        if parent is None:
            return None
    if event.block_size != domain.block_tokens or not _is_plain(event):
        return None
    try:
        tokens = decode_tokens(event)
        return hash_tokens(tokens, event.block_size, root=domain.root, parent=parent).data
    except ValueError:
        return None


def _forget(names: BlockNaming, gone: Iterable[Id]) -> list[int]:
    own = (names.known.pop(low_id(name), None) for name in gone)
    return [_id_of(each) for each in own if each is not None]


def _id_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")

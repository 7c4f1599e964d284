"""Blocks of a store on this host that stay in its memory until the ranks have loaded them from it.

A request asks for all that it wants at once. The answer to ACQUIRE is a lease, and says where the
blocks are; the node first brings into its memory what is on its disk. What another node has is
copied to this one first. Ranks check the digests, and that the directory has not changed: a lease
that was lost costs a miss, and never a wrong byte.
Imports no vLLM.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol, TypeVar

from kvrouter_store._core import MAX_HASHES
from kvrouter_store.client.lease import Lease
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.vllm.room import LEAST_WAIT_S
from kvrouter_store.connectors.vllm_tier.identity import GROUP, KEY_BYTES, NAME, PART
from kvrouter_store.errors import CorruptBlock, LeaseLost

log = logging.getLogger("vllm.kvstore")

THREADS = 8  # that wait for answers, some of them for a disk
PIECE_BYTES = 256 << 20  # of one lease: its deadline grows with what the disk may have to bring
SHARE = 2  # one part in so many of the store is held at most, unless one prompt is more
TRIES = 3  # to give a lease back whose connection is busy

T = TypeVar("T")
Place = tuple[int, int]  # offset in the pool, digest
Fetch = Callable[[str, int, list[bytes]], None]
"""Copy blocks of a cache group from another node to the own one, as far as that can be."""


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one cache group, as ranks find them in the directory of the node."""

    spec_id: int
    part_ids: tuple[int, ...]
    hashes: bytes


class Context(Protocol):
    """VLLM's of a request, of which this keeps a state."""

    req_id: str

    def get_state(self, kind: type[T]) -> T | None:
        """The state of this kind."""

    def set_state(self, state: Any) -> None:
        """Keep a state, by its kind."""


@dataclass
class _Answer:
    """What the store has of what was asked for.

    stale: the ranks would not find it: it is in another pool than theirs, or not in its directory.
    """

    leases: list[Lease] = field(default_factory=list)
    places: dict[bytes, Place] = field(default_factory=dict)
    names: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    stale: bool = False


@dataclass
class _Held:
    """Kept by vLLM with a request.

    served: whether it loads from the pool. found: what is leased. missing: what the store has not.
    wanted: what it has yet to be asked for, and the other node that has it ('': none). again: what
    landed after it was missing. loaded: what the ranks were told to load at any time.
    """

    served: bool
    found: _Answer = field(default_factory=_Answer)
    missing: set[bytes] = field(default_factory=set)
    wanted: dict[bytes, str] = field(default_factory=dict)
    again: set[bytes] = field(default_factory=set)
    asked: tuple[Future[_Answer], dict[bytes, str]] | None = None
    until: float = 0.0
    loading: bool = False
    loaded: set[bytes] = field(default_factory=set)

    @property
    def open(self) -> bool:
        """Whether the store has yet to answer."""
        return self.asked is not None or bool(self.wanted)

    @property
    def blocks(self) -> int:
        """What is leased, or may be."""
        return len(self.found.places) + (len(self.asked[1]) if self.asked is not None else 0)


@dataclass(eq=False)
class Leases:
    """Of the scheduler's thread. Owns threads: close() ends them. Leases end with the connections.

    news: is set whenever the store has answered.

    Attributes:
        epoch: the life of the node whose pool all ranks have mapped; 0: of none.
        windowed: cache groups of which a hit needs the last blocks alone.
    """

    links: Mapping[int, StoreLink]
    news: threading.Event
    fetch: Fetch
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.epoch = 0
        self.windowed: Collection[int] = ()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvstore-leases")
        self._counts = 0, 0
        self._holding: dict[str, _Held] = {}  # those that hold, or have asked for, something

    def serves(self, context: Context) -> bool:
        """Whether a request loads from the pool: decided when this is asked first."""
        held = context.get_state(_Held)
        if held is None:
            held = _Held(bool(self.epoch) and not any(link.away for link in self.links.values()))
            context.set_state(held)
        return bool(held.served)

    def asks(self, keys: Iterable[bytes], context: Context, compute_s: float) -> bool:
        """Ask for what was not asked for yet; whether there is no answer.

        It is waited for no longer than computing takes, all that waits before it and itself, nor is
        it asked for while others hold half of the store: what is computed needs room there, too.
        """
        held = self._held(context)
        found, missing, wanted = held.found.places, held.missing, held.wanted
        asked = held.asked[1] if held.asked is not None else ()
        for key in keys:
            if not (key in found or key in missing or key in asked):
                wanted.setdefault(key, "")
        if not held.open:
            return False
        if not held.until:
            begun = max([self.clock(), *(each.until for each in self._holding.values())])
            held.until = max(begun + compute_s, self.clock() + LEAST_WAIT_S)
        self._turn(held)
        return held.open

    def places(self, context: Context) -> Mapping[bytes, Place]:
        """What is leased for a request, and where it is."""
        held = context.get_state(_Held)
        return held.found.places if held is not None else {}

    def misses(self, key: bytes, context: Context) -> bool:
        """Whether the store has not what is not leased; else it is asked, if it was not."""
        held = self._held(context)
        if key in held.missing:
            return True
        if held.asked is None or key not in held.asked[1]:
            held.wanted[key] = ""
        return False

    def landed(self, key: bytes, context: Context, node: str) -> bool:
        """A block landed that was missing. Whether the store is asked for it again: once.

        node: another one, that has it; '' where it landed at the own one.
        """
        held = self._held(context)
        if key in held.again:
            return False
        held.again.add(key)
        held.missing.discard(key)
        held.wanted[key] = node
        return True

    def flush(self) -> None:
        """The end of a step: ask for what was looked up in it, and take what was answered."""
        for held in self._holding.values():
            if held.open:
                self._turn(held)

    def take_counts(self) -> tuple[int, int]:
        """Blocks that the store was asked for and has answered since the last call; those found."""
        counts, self._counts = self._counts, (0, 0)
        return counts

    @property
    def asking(self) -> bool:
        """Whether a request waits for an answer."""
        return any(each.open for each in self._holding.values())

    @property
    def holding(self) -> int:
        """Requests that hold, or have asked for, something."""
        return len(self._holding)

    def loaded(self, context: Context) -> set[bytes]:
        """What a request has loaded: the store had it."""
        held = context.get_state(_Held)
        return held.loaded if held is not None else set()

    def load(self, keys: Collection[bytes], context: Context) -> tuple[list[Run], list[Place]]:
        """The ranks load these blocks, which are leased until `release`; where they are."""
        held = self._held(context)
        held.loading, found = True, held.found
        held.loaded.update(keys)
        runs = [
            Run(*found.names[int.from_bytes(group, "big")], b"".join(map(NAME, members)))
            for group, members in groupby(keys, GROUP)
        ]
        return runs, [found.places[key] for key in keys]

    def drop(self, context: Context) -> None:
        """The request is computed: what it holds is missing from now on, unless it loads it."""
        if (held := context.get_state(_Held)) is not None and not held.loading:
            missing = held.missing | held.found.places.keys() | held.wanted.keys()
            self.release(context)
            held.missing = missing

    def examine(self, context: Context) -> None:
        """A load failed: find out in a thread which of its blocks are not what was put.

        The store then deletes them.
        """
        if (held := context.get_state(_Held)) is not None and held.loaded:
            self._threads.submit(self._examine, list(held.loaded))
            held.loaded.clear()

    def release(self, context: Context, *, elsewhere: bool = False) -> None:
        """The request ended, or the ranks have loaded. Idempotent.

        elsewhere: it loads by way of vLLM's host memory, and not from the pool.
        """
        if (held := context.get_state(_Held)) is None:
            if elsewhere:
                context.set_state(_Held(False))
            return
        self._holding.pop(context.req_id, None)
        self._empty(held)
        held.served = held.served and not elsewhere

    def ended(self, context: Context) -> None:
        """The request ended; what it still loads is held until it has."""
        if (held := context.get_state(_Held)) is not None and not held.loading:
            self.release(context)

    def forget(self) -> None:
        """Release what all requests hold: the blocks have other names from now on."""
        for held in self._holding.values():
            self._empty(held)
        self._holding.clear()

    def close(self) -> None:
        """End the threads, when they have done what they were told."""
        self._threads.shutdown()

    def _held(self, context: Context) -> _Held:
        held: _Held | None = context.get_state(_Held)
        assert held is not None  # `serves` was asked
        self._holding[context.req_id] = held
        return held

    def _empty(self, held: _Held) -> None:
        if held.asked is not None:
            self._threads.submit(_give_back_of, held.asked[0])
        if held.found.leases:
            self._threads.submit(_give_back, held.found.leases)
        held.found, held.asked, held.until, held.loading = _Answer(), None, 0.0, False
        held.missing, held.wanted, held.again = set(), {}, set()

    def _turn(self, held: _Held) -> None:
        """Take the answer and ask for the rest, or give it up when it is late."""
        if held.asked is not None and held.asked[0].done():
            (future, keys), held.asked = held.asked, None
            self._take(held, future.result(), keys)
        if not held.served:
            return self._empty(held)
        if held.asked is None:
            self._ask(held)
        if held.open and self.clock() > held.until > 0.0:
            held.missing.update(held.wanted)
            held.wanted.clear()
            if held.asked is not None:
                (future, keys), held.asked = held.asked, None
                held.missing.update(keys)
                self._threads.submit(_give_back_of, future)
        if not held.open:
            held.until = 0.0

    def _take(self, held: _Held, answer: _Answer, keys: Collection[bytes]) -> None:
        if answer.stale:
            held.served = False
        found = held.found
        found.leases += answer.leases
        found.places.update(answer.places)
        found.names.update(answer.names)
        asked, there = self._counts
        self._counts = asked + len(keys), there + len(answer.places)
        held.missing.update(key for key in keys if key not in answer.places)

    def _ask(self, held: _Held) -> None:
        """Ask for what is wanted, if there is room for it beside what others hold."""
        if not held.wanted or not self._fits(held):
            return
        keys, held.wanted = held.wanted, {}
        held.asked = self._threads.submit(self._leased, keys, self.epoch), keys

    def _fits(self, held: _Held) -> bool:
        others = sum(each.blocks for each in self._holding.values() if each is not held)
        link = next(iter(self.links.values()))
        block_bytes = link.manifest.parts[PART].block_bytes
        blocks = link.latest.get("pool_bytes", 0) // SHARE // block_bytes
        return not others or others + len(held.wanted) <= blocks

    # In the threads.

    def _leased(self, keys: Mapping[bytes, str], epoch: int) -> _Answer:
        answer = _Answer()
        try:
            for named, members in groupby(sorted(keys, key=GROUP), GROUP):
                group, wanted = int.from_bytes(named, "big"), list(members)
                for node, there in groupby(wanted, keys.__getitem__):
                    if node:
                        self.fetch(node, group, list(there))
                self._lease(answer, group, wanted, epoch)
        except Exception:
            log.exception("the store is not asked for blocks of its pool")
        finally:
            self.news.set()
        return answer

    def _lease(self, answer: _Answer, group: int, keys: list[bytes], epoch: int) -> None:
        """Lease the leading blocks of a group, or of a window whichever are there."""
        link = self.links[group]
        # VLLM's weak hashes are shorter than the store's names: it has no such block.
        keys = [key for key in keys if len(key) == KEY_BYTES]
        if group in self.windowed:
            held = link.held(b"".join(map(NAME, keys)))
            keys = [key for key, there in zip(keys, held, strict=True) if there]
        most = min(MAX_HASHES, max(1, PIECE_BYTES // link.manifest.parts[PART].block_bytes))
        for first in range(0, len(keys), most):
            piece = keys[first : first + most]
            lease = link.acquire(b"".join(map(NAME, piece)), PART)
            if lease is None:
                return
            answer.leases.append(lease)
            answer.stale |= lease.known.epoch != epoch or not lease.is_listed(PART)
            if answer.stale:
                return
            answer.names[group] = lease.known.spec_id, lease.known.part_ids
            answer.places.update(zip(piece, lease.places(PART), strict=False))
            if lease.blocks < len(piece):
                return

    def _examine(self, keys: list[bytes]) -> None:
        for key in keys:
            lease = self.links[int.from_bytes(GROUP(key), "big")].acquire(NAME(key), PART)
            if lease is None:
                return
            with suppress(CorruptBlock, LeaseLost), lease:
                for block in range(lease.blocks):
                    lease.view(block, PART, verify=True)


def _give_back_of(asked: Future[_Answer]) -> None:
    """When it was answered, in a thread that began after it."""
    _give_back(asked.result().leases)


def _give_back(leases: list[Lease]) -> None:
    for lease in leases:
        for _ in range(TRIES):
            lease.release()
            if lease.over:
                break

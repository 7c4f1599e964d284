"""Who has room in the host memory for what the store has of a prompt. Imports no vLLM.

A request gets room for all that it lacks or for nothing, in the order in which the scheduler asks:
so none holds a part and waits for another that does the same. What it has is pinned until the
engine loads it. It waits no longer than computing would take all that wait before it, and itself.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final, Protocol

LEAST_WAIT_S: Final = 0.25  # a few steps of a busy engine
STORES_SHARE: Final = 8  # one part in so many is left to what the engine computes


class Chunk(Enum):
    """Where a chunk is in the host memory."""

    ABSENT = auto()
    COMING = auto()  # being written
    IDLE = auto()  # there, and may be evicted
    HELD = auto()  # there, and may not


class Found(Enum):
    """What a look-up of a chunk said."""

    MISS = auto()
    UNKNOWN = auto()  # nobody knows yet, or it has yet to land
    THERE = auto()  # in the store, or in the host memory


class Memory(Protocol):
    """The host memory. `context` is vLLM's of a request; pins are counted."""

    @property
    def chunks(self) -> int:
        """All of it."""

    @property
    def free(self) -> int:
        """Chunks that are free, or may be evicted."""

    def states(self, keys: Iterable[bytes]) -> list[Chunk]:
        """Where each of these chunks is."""

    def pin(self, keys: Collection[bytes], context: Any) -> None:
        """Let chunks that are there not be evicted."""

    def unpin(self, keys: Collection[bytes], context: Any) -> None:
        """Undo a pin."""

    def bring(self, keys: Collection[bytes], context: Any) -> bool:
        """Begin to bring chunks that are absent; False where there is no room."""

    def short(self, chunks: int) -> None:
        """So many chunks are computed for want of room, although the store has them."""


@dataclass(eq=False)
class _Claim:
    """What a request wants that waits.

    compute_s: what computing it takes, and all that waited before it.
    keys: asked for in the last pass of look-ups, but for misses and those that have yet to land,
    which are `unknown`. reserved: chunks of the memory for these. denied: keys without room.
    brought: those that the store had. open: keys that are not there yet. step: of the scheduler,
    when it was deferred last.
    """

    context: Any
    compute_s: float
    keys: dict[bytes, None] = field(default_factory=dict)
    unknown: int = 0
    reserved: int = 0
    pinned: dict[bytes, None] = field(default_factory=dict)
    denied: set[bytes] = field(default_factory=set)
    brought: set[bytes] = field(default_factory=set)
    open: list[bytes] = field(default_factory=list)
    admitted: bool = False
    queued: bool = False
    arriving: bool = False
    over: bool = False
    waited_s: float = 0.0
    since: float = 0.0
    step: int = -1


class Room:
    """Of the scheduler's thread. Its owner releases a request that ended or got its blocks."""

    def __init__(self, memory: Memory, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory, self._clock = memory, clock
        self._claims: dict[str, _Claim] = {}
        self._asked: list[_Claim] = []  # in this step, in the scheduler's order
        self._step = 0

    def waits(self, request_id: str) -> bool:
        """Whether a request that is asked for again still waits, so that no look-up says more."""
        if (claim := self._claims.get(request_id)) is None:
            return False
        now = self._clock()
        if claim.step == self._step - 1 and not claim.arriving:
            claim.waited_s += now - claim.since  # it could have been computed in this step
        if claim.waited_s > max(LEAST_WAIT_S, claim.compute_s):
            self._give_up(claim)
        if claim.open and self._memory.states(claim.open[-1:]) != [Chunk.COMING]:
            claim.open = self._those(claim.open, Chunk.COMING)
        if claim.over or not (claim.queued or claim.open):
            return False
        self._defer(claim, now)
        return not claim.arriving  # else the caller knows whether something came

    def begin(self, request_id: str, context: Any, compute_s: float) -> None:
        """A pass of look-ups begins; computing what is looked up would take so long."""
        if (claim := self._claims.get(request_id)) is None:
            ahead_s = (each.compute_s - each.waited_s for each in self._claims.values())
            compute_s += max([0.0, *ahead_s])
            claim = self._claims[request_id] = _Claim(context, compute_s)
        claim.keys, claim.unknown = {}, 0

    def found(self, request_id: str, key: bytes, found: Found) -> bool:
        """Note what a look-up of a pass said. Whether the request may wait for the chunk."""
        claim = self._claims.get(request_id)
        if claim is None or found is Found.MISS:
            return True
        if found is Found.UNKNOWN:
            claim.unknown += 1
        else:
            claim.keys[key] = None
        return not claim.over and key not in claim.denied

    def deferred(self, request_id: str, *, arriving: bool) -> None:
        """The pass ended, and the request waits; `arriving`: for what has yet to land."""
        claim = self._claims[request_id]
        asking = bool(claim.unknown) and not arriving
        claim.arriving = arriving
        claim.queued = bool(claim.keys) and not asking and not claim.over
        claim.reserved = min(claim.reserved, claim.unknown)
        if claim.queued or asking:
            self._defer(claim, self._clock())

    def decided(self, request_id: str, *, loads: bool) -> None:
        """The pass ended, and the request is scheduled when the engine has blocks for it."""
        claim = self._claims[request_id]
        claim.queued, claim.reserved, claim.step = False, 0, -1
        claim.open.clear()
        if not loads or not claim.pinned:
            self.release(request_id)

    def came(self, keys: Iterable[bytes]) -> None:
        """Chunks are there now: pin them for those that wait for them."""
        waiting = [each for each in self._claims.values() if each.open and not each.over]
        for claim in waiting:
            self._pin(claim, [key for key in keys if key in claim.keys])

    def grant(self) -> None:
        """The end of a step: give room to those that were asked for, as long as there is some."""
        asked, self._asked = self._asked, []
        self._step += 1
        full = False
        for claim in asked:
            if not claim.queued or self._claims.get(claim.context.req_id) is not claim:
                continue
            if claim.admitted:
                self._give(claim)
            elif len(claim.keys) + claim.unknown > self._memory.chunks:
                self._give(claim)  # never fits: it gets what there is, and does not wait
            elif not full and not (full := not self._fits(claim)):
                self._give(claim)

    def from_store(self, request_id: str) -> set[bytes]:
        """Chunks that the store had for a request, and that are there."""
        claim = self._claims.get(request_id)
        return set() if claim is None else claim.brought & claim.pinned.keys()

    def release(self, request_id: str) -> None:
        """The request ended, was given its blocks, or is computed. Idempotent."""
        claim = self._claims.pop(request_id, None)
        if claim is not None and claim.pinned:
            self._memory.unpin(claim.pinned, claim.context)

    def forget(self) -> None:
        """The memory was emptied, with all pins."""
        self._claims.clear()
        self._asked.clear()

    @property
    def waiting(self) -> bool:
        """Whether a request waits for room."""
        return any(each.queued for each in self._claims.values())

    def pinned(self) -> int:
        """Pins of all requests."""
        return sum(len(each.pinned) for each in self._claims.values())

    def _defer(self, claim: _Claim, now: float) -> None:
        claim.since, claim.step = now, self._step
        self._asked.append(claim)

    def _give_up(self, claim: _Claim) -> None:
        if claim.queued and not claim.admitted:
            self._memory.short(len(claim.keys))
        claim.over, claim.queued, claim.reserved = True, False, 0
        claim.open.clear()

    def _free(self, claim: _Claim) -> int:
        """Chunks that are not reserved for others."""
        others = sum(each.reserved for each in self._claims.values()) - claim.reserved
        return max(0, self._memory.free - others)

    def _fits(self, claim: _Claim) -> bool:
        states = self._memory.states(claim.keys)
        need = claim.unknown + states.count(Chunk.ABSENT) + states.count(Chunk.IDLE)
        free = self._free(claim)
        if any(each.admitted for each in self._claims.values()):
            free -= self._memory.chunks // STORES_SHARE
        return need <= free

    def _give(self, claim: _Claim) -> None:
        """Pin what is there, bring what there is room for, and deny the rest."""
        claim.admitted, claim.queued = True, False
        self._pin(claim, claim.keys)
        coming = self._those(claim.keys, Chunk.COMING)
        absent = self._those(claim.keys, Chunk.ABSENT)
        if claim.denied:
            absent = [key for key in absent if key not in claim.denied]
        free = self._free(claim)
        bring = absent[:free]
        if bring and not self._memory.bring(bring, claim.context):
            bring = []
        claim.brought.update(bring)
        claim.reserved = min(claim.unknown, free - len(bring))
        if denied := absent[len(bring) :]:
            claim.denied.update(denied)
            self._memory.short(len(denied))
        claim.open = coming + bring

    def _those(self, keys: Collection[bytes], state: Chunk) -> list[bytes]:
        """Those of `keys` that are there."""
        states = self._memory.states(keys)
        return [key for key, each in zip(keys, states, strict=True) if each is state]

    def _pin(self, claim: _Claim, keys: Iterable[bytes]) -> None:
        new = [key for key in keys if key not in claim.pinned]
        absent = (Chunk.ABSENT, Chunk.COMING)
        states = zip(new, self._memory.states(new), strict=True)
        new = [key for key, state in states if state not in absent]
        if new:
            self._memory.pin(new, claim.context)
            claim.pinned.update(dict.fromkeys(new))

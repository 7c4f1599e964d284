"""Copies between manifests of different shape: what is read, and how it becomes an engine's part.

A plan is made once and then copies any blocks, without the GIL. It knows names of parts and places
of blocks in a chain; it never asks a store and owns no memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore._core import PartShape, Segments, StridedCopy
from kvstore.block import CacheSpec, Manifest, Part
from kvstore.errors import BadDocument, CannotMap
from kvstore.layout import ORDERED, PER_HEAD

__all__ = ["CopyPlan", "Needed", "Reach", "heads_of_rank", "reach_of"]

WHOLE: Final = frozenset({"full_attention", "mla_attention"})
WINDOWS: Final = frozenset({"sliding_window", "sliding_window_mla"})
STATES: Final = frozenset({"mamba"})
# What must agree, so that equal tokens have equal KV and chains have equal names.
SAME: Final = ("model", "weights_revision", "kv_dtype", "hash_algo", "root", "groups", "adapters")


class Reach(NamedTuple):
    """What of a chain the next token needs: its last `window` tokens (0: all) or the last state."""

    window: int = 0
    state: bool = False


class Needed(NamedTuple):
    """Blocks of a chain: of the stored ones, and those of the engine that are made of them."""

    source: range
    target: range


def heads_of_rank(kv_heads: int, ranks: int, rank: int) -> tuple[int, int]:
    """The range of KV heads that a tensor-parallel rank holds; with fewer heads several hold one.

    Raises CannotMap where the heads cannot be divided so.
    """
    if not 0 <= rank < ranks:
        raise CannotMap(f"there is no rank {rank} among {ranks}")
    if kv_heads % ranks == 0:
        each = kv_heads // ranks
        return rank * each, (rank + 1) * each
    if ranks % kv_heads == 0:
        head = rank // (ranks // kv_heads)
        return head, head + 1
    raise CannotMap(f"{kv_heads} KV heads cannot be divided among {ranks} ranks")


def reach_of(group: str) -> Reach:
    """What of a chain a cache group needs, by its kind in a cache spec ('sliding_window:4096').

    Raises CannotMap where the kind does not tell.
    """
    kind, _, window = group.partition(":")
    if group in WHOLE:
        return Reach()
    if group in STATES:
        return Reach(state=True)
    if kind in WINDOWS and window.isdecimal() and int(window) > 0:
        return Reach(window=int(window))
    if kind in WINDOWS:
        raise CannotMap(f"the cache group {group!r} does not tell how many tokens its window has")
    raise CannotMap(f"what a cache group of kind {group!r} needs of a prefix is not known")


@dataclass(frozen=True, slots=True)
class _Sides:
    """One cache group of two manifests."""

    source: Manifest
    target: Part
    target_tokens: int

    @property
    def source_tokens(self) -> int:
        """Tokens of a stored block."""
        return self.source.spec.block_tokens


class CopyPlan:
    """How the parts of `source` become part `part` of `target`. Immutable, safe in threads.

    Either side may be the engine. source_memory, target_memory: where a side's blocks lie, unless
    each is one piece of memory (of the sources by number of the part); later calls may give other
    segments of the same sizes.
    Raises CannotMap, with the reason, where the one cannot become the other.

    reads: numbers of the source's parts that are read.
    boundary_tokens: prefixes can be carried over in multiples of this.
    least_run_bytes: the shortest run of bytes that is copied in one piece.
    """

    def __init__(
        self,
        source: Manifest,
        target: Manifest,
        part: int,
        *,
        source_memory: Mapping[int, Segments] | None = None,
        target_memory: Segments | None = None,
    ) -> None:
        check_specs(source.spec, target.spec)
        wanted = target.parts[part]
        self._source_tokens = source.spec.block_tokens
        self._target_tokens = target.spec.block_tokens
        self._reach = reach_of(target.spec.groups[wanted.group])
        if wanted.layout.kind in {ORDERED, PER_HEAD} and wanted.layout.state != self._reach.state:
            raise CannotMap("the layout of a state is for groups that keep one, and for no others")
        sides = _Sides(source, wanted, self._target_tokens)
        self._candidates = _candidates(sides)
        self.boundary_tokens = _boundary(sides)
        sizes = {number: tuple(one.sizes) for number, one in (source_memory or {}).items()}
        sources = [
            _shape(source.parts[number], sizes.get(number, ())) for number in self._candidates
        ]
        into = _shape(wanted, target_memory.sizes if target_memory is not None else ())
        try:
            self._native = StridedCopy(sources, into)
        except ValueError as error:
            raise CannotMap(str(error)) from None
        read = zip(self._candidates, self._native.reads, strict=True)
        self.reads = tuple(number for number, is_read in read if is_read)
        self.least_run_bytes = self._native.least_run_bytes

    def needed(self, tokens: int) -> Needed:
        """The blocks without which a request that has `tokens` tokens computed cannot go on.

        Raises CannotMap where blocks of both sides do not end there.
        """
        if tokens < 0 or tokens % self.boundary_tokens:
            raise CannotMap(
                f"{tokens} tokens are no boundary of blocks of {self._source_tokens} and of "
                f"{self._target_tokens} tokens"
            )
        end = tokens // self._target_tokens
        first = 0
        if self._reach.state:
            first = max(0, end - 1)
        elif self._reach.window:
            first = max(0, tokens - self._reach.window + 1) // self._target_tokens
        target = range(min(first, end), end)
        return Needed(self.source_blocks(target), target)

    def source_blocks(self, target: range) -> range:
        """The places in the source's chain of the blocks that these of the target are made of.

        Raises CannotMap where a state is wanted that no stored block ends with.
        """
        if not target:
            return range(0)
        start, end = target.start * self._target_tokens, target.stop * self._target_tokens
        if self._reach.state:
            if len(target) > 1 or end % self._source_tokens:
                raise CannotMap(f"no state is stored after {end} tokens alone")
            last = end // self._source_tokens
            return range(last - 1, last)
        return range(start // self._source_tokens, -(-end // self._source_tokens))

    def copy(
        self,
        target: range,
        sources: Mapping[int, tuple[Segments, Sequence[int]]],
        memory: Segments,
        indices: Sequence[int],
    ) -> None:
        """Fill blocks `target` of a chain, which lie in `memory` at `indices` (one each).

        sources: for each part in `reads`, where its blocks lie, and the index there of each of
            `source_blocks(target)`. They must not overlap the target's.
        Raises ValueError or IndexError, before anything is written, where that does not fit.
        """
        if target.step != 1 or target.start < 0 or len(target) != len(indices):
            raise ValueError("each block of the target needs one index")
        if not target:
            return
        nothing = (memory, ())
        chosen = [sources.get(number, nothing) for number in self._candidates]
        skipped = 0 if self._reach.state else target.start % self._native.target_blocks
        wanted = len(self.source_blocks(target))
        missing = [n for n in self.reads if n not in sources or len(sources[n][1]) != wanted]
        if missing:
            raise ValueError(f"part {missing[0]} of the source needs {wanted} indices")
        self._native.run(
            [segments for segments, _ in chosen],
            [list(given) for _, given in chosen],
            memory,
            list(indices),
            skipped,
        )


def check_specs(source: CacheSpec, target: CacheSpec) -> None:
    """Raise CannotMap where KV of the same tokens is not the same, or has not the same names."""
    for name in SAME:
        theirs, ours = getattr(source, name), getattr(target, name)
        if theirs != ours:
            raise CannotMap(f"{name}: {_short(theirs)} is stored, {_short(ours)} is wanted")


def _short(value: object) -> str:
    """As it is, or its beginning."""
    text = ", ".join(value) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 40 else f"{text[:12]}.."


def _candidates(sides: _Sides) -> list[int]:
    """Numbers of the source's parts that the target can be made of."""
    found, reasons = [], []
    for number, part in enumerate(sides.source.parts):
        if part.group == sides.target.group:
            reason = _unlike(part, sides)
            reasons.append(reason)
            if not reason:
                found.append(number)
    if not found:
        raise CannotMap(next(iter(reasons), "no part of its cache group is stored"))
    return found


def _unlike(part: Part, sides: _Sides) -> str:
    """Why nothing of this stored part can go into the target; '' where it can."""
    ours, theirs = sides.target.layout, part.layout
    if ours.kind != theirs.kind:
        return f"the stored layout is {theirs.kind}, the engine's is {ours.kind}"
    if ours.kind == ORDERED:
        return "" if ours.state == theirs.state else "one is a state and the other is not"
    if theirs != ours:
        return "bytes that are opaque are for equal engines alone, and their layouts differ"
    if not ours.state and sides.source_tokens != sides.target_tokens:
        return (
            f"opaque bytes of a block of {sides.source_tokens} tokens cannot become those of "
            f"{sides.target_tokens}"
        )
    if ours.kind != PER_HEAD and part.digest != sides.target.digest:
        return "an opaque part is shared whole or not at all, and the stored ones have other bounds"
    return ""


def _boundary(sides: _Sides) -> int:
    larger, smaller = sorted((sides.source_tokens, sides.target_tokens), reverse=True)
    if larger % smaller:
        raise CannotMap(
            f"blocks of {sides.source_tokens} tokens and of {sides.target_tokens}: neither is a "
            "multiple of the other"
        )
    return larger


def _shape(part: Part, segments: Sequence[int]) -> PartShape:
    """The part in numbers; an opaque one is a single thing without layers and heads."""
    one, size = (0, 1), (part.block_bytes, 0)
    try:
        shape = part.layout.shape(part.layers, part.kv_heads, segments)
        return shape or PartShape(one, one, order="E", elements=size, segments=segments)
    except (BadDocument, ValueError) as error:
        raise CannotMap(str(error)) from None

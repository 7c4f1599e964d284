"""Random pairs of shapes, and what a copy between them must yield: by plain permutations of arrays.

`choose` picks one of several; arrays are numpy's, or torch's where that is at hand.
"""

import ctypes
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore._core import Segments
from kvstore.block import CacheSpec, Manifest, Part
from kvstore.copy_plan import CopyPlan, heads_of_rank
from kvstore.layout import Layout

T = TypeVar("T")
Choose = Callable[[Sequence[Any]], Any]
ROOT = "00" * 32
FILL = 0xAA  # what memory holds before a copy, and padding after it
UNITS = 3  # of a chain: so many blocks of the larger kind
TOKENS = ((4, 4), (2, 8), (8, 2), (1, 4), (6, 3), (3, 12), (16, 16), (4, 1))
ELEMENTS = ((4, 4), (3, 5), (8, 8), (1, 1), (5, 0), (6, 2))
ORDERS = (
    *("LKHTE", "LKTHE", "LHTKE", "KLTHE", "LKHET", "TLKHE"),
    *("HLKTE", "LTHKE", "KHLET", "LHKTE", "LTKHE", "LKTEH"),
)
GROUPS = ("full_attention", "full_attention", "sliding_window:5", "mamba")


class Numpy:
    """The few operations of arrays that the reference needs."""

    def __init__(self) -> None:
        import numpy as np

        self._np = np

    def array(self, data: bytes, shape: Sequence[int]) -> Any:
        return self._np.frombuffer(data, dtype=self._np.uint8).reshape(tuple(shape))

    def permuted(self, array: Any, axes: Sequence[int]) -> Any:
        return array.transpose(tuple(axes))

    def beside(self, arrays: Sequence[Any]) -> Any:
        return self._np.concatenate(list(arrays), axis=1)

    def data(self, array: Any) -> bytes:
        return bytes(array.tobytes())


class Torch:
    """The same with torch."""

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def array(self, data: bytes, shape: Sequence[int]) -> Any:
        return self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8).reshape(*shape)

    def permuted(self, array: Any, axes: Sequence[int]) -> Any:
        return array.permute(*axes)

    def beside(self, arrays: Sequence[Any]) -> Any:
        return self._torch.cat(list(arrays), dim=1)

    def data(self, array: Any) -> bytes:
        return bytes(array.contiguous().numpy().tobytes())


@dataclass(frozen=True)
class Pair:
    """Manifests of one model in two shapes, and the part of the second that is wanted."""

    source: Manifest
    target: Manifest
    part: int
    elements: tuple[int, int]
    element_bytes: int
    layers: int
    kv_heads: int

    @property
    def chain_tokens(self) -> int:
        return UNITS * max(self.source.spec.block_tokens, self.target.spec.block_tokens)


def random_pair(choose: Choose) -> Pair:
    """Two shapes that fit each other: ordered ones mostly, else opaque or opaque per head."""
    group, kind = choose(GROUPS), choose(("ordered", "ordered", "ordered", "per head", "opaque"))
    tokens = choose(TOKENS)
    if kind == "opaque" or (kind != "ordered" and group != "mamba"):
        tokens = (tokens[0], tokens[0])
    elements, element_bytes = choose(ELEMENTS), choose((1, 2, 4))
    heads = 1 if elements[1] == 0 else choose((1, 2, 3, 4, 6, 8))
    layers = choose((1, 2, 3, 5))
    described = _Described(choose, kind, group, elements, element_bytes)
    sides = []
    cuts = [(_cuts(choose, layers), _head_ranges(choose, heads)) for _ in range(2)]
    for side in (0, 1):
        spec = CacheSpec("m", "r", "bf16", tokens[side], "sha256_cbor", ROOT, (group,))
        bounds = cuts[0 if kind == "opaque" else side]
        sides.append(Manifest(spec, described.parts(tokens[side], *bounds)))
    source, target = sides
    part = choose(range(len(target.parts)))
    return Pair(source, target, part, elements, element_bytes, layers, heads)


@dataclass(frozen=True)
class _Described:
    choose: Choose
    kind: str
    group: str
    elements: tuple[int, int]
    element_bytes: int

    def parts(
        self, tokens: int, layers: list[tuple[int, int]], heads: list[tuple[int, int]]
    ) -> tuple[Part, ...]:
        return tuple(self._part(tokens, each, range_) for each in layers for range_ in heads)

    def _part(self, tokens: int, layers: tuple[int, int], heads: tuple[int, int]) -> Part:
        counted = 1 if self.group == "mamba" else tokens
        many = (layers[1] - layers[0]) * (heads[1] - heads[0])
        head_bytes = counted * sum(self.elements) * self.element_bytes
        if self.kind == "opaque":
            return Part(layers, heads, 0, many * head_bytes, Layout.opaque("engine"))
        if self.kind == "per head":
            layout = Layout.per_head("engine", head_bytes, state=self.group == "mamba")
            return Part(layers, heads, 0, many * head_bytes, layout)
        return self._ordered(tokens, layers, heads, many * head_bytes)

    def _ordered(
        self, tokens: int, layers: tuple[int, int], heads: tuple[int, int], content: int
    ) -> Part:
        order = self.choose(ORDERS)
        if self.elements[0] != self.elements[1] and order.index("E") < order.index("K"):
            order = "LKHTE"
        dropped = ("T" if self.group == "mamba" else "") + ("KH" if self.elements[1] == 0 else "")
        order = "".join(letter for letter in order if letter not in dropped)
        number = layers[1] - layers[0]
        page = content // number + self.choose((1, 16)) if order[0] == "L" and self._pads() else 0
        layout = Layout.ordered(
            order,
            tokens=0 if self.group == "mamba" else tokens,
            element_bytes=self.element_bytes,
            elements=self.elements,
            page_bytes=page,
        )
        return Part(layers, heads, 0, page * number or content, layout)

    def _pads(self) -> bool:
        return bool(self.choose((False, False, True)))


def _cuts(choose: Choose, layers: int) -> list[tuple[int, int]]:
    """Layers divided among pipeline stages, not always evenly."""
    at = choose(range(layers + 1))
    bounds = sorted({0, at, layers})
    return list(itertools.pairwise(bounds))


def _head_ranges(choose: Choose, heads: int) -> list[tuple[int, int]]:
    """The heads of each rank; ranks that hold the same ones count once."""
    ranks = choose([n for n in (1, 2, 3, 4, 8) if heads % n == 0 or n % heads == 0])
    return sorted({heads_of_rank(heads, ranks, rank) for rank in range(ranks)})


class Reference:
    """The KV of a chain of random tokens, and the bytes of any of its blocks in any layout."""

    def __init__(self, pair: Pair, seed: int, arrays: Numpy | Torch) -> None:
        draw = random.Random(seed)
        self._pair, self._arrays = pair, arrays
        self._shape = [pair.layers, pair.chain_tokens, pair.kv_heads]
        self._planes = [
            arrays.array(draw.randbytes(self._bytes(count)), self._plane_shape(count))
            for count in pair.elements
            if count
        ]

    def block(self, manifest: Manifest, number: int, index: int) -> bytes:
        """Block `index` of the chain, of one part; padding is FILL."""
        part, tokens = manifest.parts[number], manifest.spec.block_tokens
        first = index * tokens
        if manifest.spec.groups[0] == "mamba":
            first, tokens = first + tokens - 1, 1
        chosen = [
            plane[
                part.layers[0] : part.layers[1],
                first : first + tokens,
                part.kv_heads[0] : part.kv_heads[1],
            ]
            for plane in self._planes
        ]
        fields = dict(part.layout.fields)
        return self._ordered(chosen, str(fields.get("order") or "LHKTE"), part)

    def _ordered(self, planes: list[Any], order: str, part: Part) -> bytes:
        axes = ["LTHE".index(letter) for letter in order if letter != "K"]
        whole = [axis for axis in range(4) if axis not in axes] + axes + [4]
        turned = [self._arrays.permuted(plane, whole) for plane in planes]
        if "K" in order and len(planes) == 2:
            outer = 1
            for axis in axes[: order.index("K")]:
                outer *= planes[0].shape[axis]
            turned = [self._arrays.beside([plane.reshape(outer, -1) for plane in turned])]
        return _padded(self._arrays.data(turned[0]), part)

    def _plane_shape(self, count: int) -> list[int]:
        return [*self._shape, count, self._pair.element_bytes]

    def _bytes(self, count: int) -> int:
        total = count * self._pair.element_bytes
        for each in self._shape:
            total *= each
        return total


def _padded(content: bytes, part: Part) -> bytes:
    layers = part.layers[1] - part.layers[0]
    each, page = len(content) // layers, part.block_bytes // layers
    padding = bytes([FILL]) * (page - each)
    return b"".join(content[at : at + each] + padding for at in range(0, len(content), each))


class Memory:
    """Blocks in memory, each in several pieces that lie apart; FILL wherever nothing was put."""

    def __init__(self, choose: Choose, block_bytes: int, blocks: int) -> None:
        cuts = {choose(range(block_bytes + 1)) for _ in range(choose((0, 0, 1, 3)))}
        bounds = sorted({0, block_bytes} | cuts)
        self.sizes = [end - first for first, end in itertools.pairwise(bounds)]
        self.strides = [size + choose((0, 7)) for size in self.sizes]
        self._offsets, at = [], 5
        for stride in self.strides:
            self._offsets.append(at)
            at += stride * blocks + 5
        self.data = bytearray([FILL]) * at
        self._view = (ctypes.c_char * at).from_buffer(self.data)
        base = ctypes.addressof(self._view)
        self.segments = Segments(
            [base + offset for offset in self._offsets], self.strides, self.sizes, blocks=blocks
        )

    def put(self, index: int, content: bytes, data: bytearray | None = None) -> None:
        """Write a block, here or into a copy of this memory."""
        into = self.data if data is None else data
        first = 0
        for offset, stride, size in zip(self._offsets, self.strides, self.sizes, strict=True):
            at = offset + stride * index
            into[at : at + size] = content[first : first + size]
            first += size


def check_copy(pair: Pair, choose: Choose, seed: int, arrays: Numpy | Torch) -> None:
    """Copy some blocks of a chain between the shapes. Raises AssertionError on any wrong byte."""
    reference = Reference(pair, seed, arrays)
    tokens = pair.target.spec.block_tokens
    chain = range(pair.chain_tokens // tokens)
    part = pair.target.parts[pair.part]
    memory = Memory(choose, part.block_bytes, len(chain) + 1)
    stored = pair.chain_tokens // pair.source.spec.block_tokens
    places = {n: Memory(choose, p.block_bytes, stored) for n, p in enumerate(pair.source.parts)}
    plan = CopyPlan(
        pair.source,
        pair.target,
        pair.part,
        source_memory={number: place.segments for number, place in places.items()},
        target_memory=memory.segments,
    )
    wanted = plan.needed(choose(range(0, pair.chain_tokens + 1, plan.boundary_tokens)))
    target = wanted.target
    if pair.target.spec.groups[0] != "mamba" and len(target) > 1:
        target = range(choose(range(target.start, target.stop)), target.stop)
    indices = random.Random(seed).sample(range(len(chain) + 1), len(target))
    blocks = plan.source_blocks(target)
    slots = random.Random(seed).sample(range(stored), len(blocks))
    for number in plan.reads:
        for slot, index in zip(slots, blocks, strict=True):
            places[number].put(slot, reference.block(pair.source, number, index))
    expected = bytearray(memory.data)
    for index, place in zip(target, indices, strict=True):
        memory.put(place, reference.block(pair.target, pair.part, index), expected)
    before = {number: bytes(place.data) for number, place in places.items()}
    chosen = {number: (places[number].segments, slots) for number in plan.reads}
    plan.copy(target, chosen, memory.segments, indices)
    assert memory.data == expected
    assert before == {number: bytes(place.data) for number, place in places.items()}

"""Where the blocks of a KV cache are in its tensors, and the manifest with one part per layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from kvrouter_store._core import Segments


@dataclass(frozen=True, eq=False)
class HostBlocks:
    """Blocks in host memory: block i is `sizes[k]` bytes at `bases[k] + i * strides[k]` for each k.

    Owners keep it as long as the memory: an RDMA device registers the segments of one object once.
    """

    bases: Sequence[int]
    strides: Sequence[int]
    sizes: Sequence[int]
    blocks: int

    @cached_property
    def segments(self) -> "Segments":
        """As the store's client takes it."""
        # Checks of a GPU copy blocks where nothing is compiled.
        from kvrouter_store._core import Segments  # noqa: PLC0415

        return Segments(self.bases, self.strides, self.sizes, blocks=self.blocks)


@dataclass(frozen=True, eq=False)
class LayerBlocks:
    """The blocks of one layer: one tensor each for keys and values, or one for both.

    `tensors`: [blocks, block_tokens, ...] each, on one device. The bytes of a block are its bytes
    in the first tensor, then those in the next. Keeps the tensors alive.

    Raises ValueError where a tensor does not hold each block as one run of memory.
    """

    tensors: "tuple[Tensor, ...]"

    def __post_init__(self) -> None:
        if not self.tensors or len({tensor.shape[:2] for tensor in self.tensors}) != 1:
            raise ValueError("a layer needs tensors of equal [blocks, block_tokens, ...]")
        if any(tensor.dim() < 2 or not tensor[:1].is_contiguous() for tensor in self.tensors):
            raise ValueError("the memory of a block has gaps: its tokens must be dense, in order")

    @classmethod
    def paged(cls, *tensors: "Tensor") -> Self:
        """Over tensors [blocks, block_tokens, ...], in whatever order the blocks are used."""
        return cls(tensors)

    @classmethod
    def contiguous(cls, *tensors: "Tensor", block_tokens: int) -> Self:
        """Over tensors [tokens, ...]: block i has the tokens from i * block_tokens on.

        Tokens after the last whole block belong to none.
        """
        blocks = tensors[0].shape[0] // block_tokens
        whole = (tensor[: blocks * block_tokens] for tensor in tensors)
        return cls(tuple(tensor.unflatten(0, (blocks, block_tokens)) for tensor in whole))

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of a block in each tensor."""
        return [tensor[:1].numel() * tensor.element_size() for tensor in self.tensors]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all tensors."""
        return sum(self.sizes)

    @cached_property
    def in_host_memory(self) -> HostBlocks:
        """The blocks in place. ValueError where they are not in host memory."""
        if self.tensors[0].device.type != "cpu":
            raise ValueError(f"the tensors are on {self.tensors[0].device}, not in host memory")
        bases = [tensor.data_ptr() for tensor in self.tensors]
        strides = [tensor.stride(0) * tensor.element_size() for tensor in self.tensors]
        return HostBlocks(bases, strides, self.sizes, int(self.tensors[0].shape[0]))

    def part(self, layer: int, engine: str) -> Part:
        """The part of the manifest that this layer is; see `layered_manifest`."""
        shapes = [tuple(tensor.shape[1:]) for tensor in self.tensors]
        fields = {
            "dtype": str(self.tensors[0].dtype).removeprefix("torch."),
            "order": " ".join("x".join(map(str, shape)) for shape in shapes),
        }
        heads = shapes[0][1] if len(shapes[0]) > 2 else 1
        layout = Layout.opaque(engine, fields)
        return Part((layer, layer + 1), (0, heads), 0, self.block_bytes, layout)


def layered_manifest(spec: CacheSpec, layers: Sequence[LayerBlocks], engine: str) -> Manifest:
    """A manifest whose part i is layer i, so that each layer travels by itself.

    A block counts as stored when all its parts are. engine: names what else decides the meaning of
    the bytes. ValueError where blocks have another number of tokens than `spec` says.
    """
    if any(layer.tensors[0].shape[1] != spec.block_tokens for layer in layers):
        raise ValueError(f"the tensors do not have {spec.block_tokens} tokens a block, as the spec")
    return Manifest(spec, tuple(layer.part(at, engine) for at, layer in enumerate(layers)))

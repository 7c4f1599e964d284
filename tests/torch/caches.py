"""KV caches of a model that nobody computes, a link to a store, and a device without a GPU."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.identity.block import CacheSpec
from kvrouter_store.identity.chain import hash_tokens, root_hash
from kvrouter_store.tensors.client import Blocks, TensorClient
from kvrouter_store.tensors.layers import LayerBlocks, layered_manifest

BLOCK_TOKENS, HEADS, ELEMENTS, LAYERS = 8, 2, 16, 3
BLOCK_BYTES = 2 * BLOCK_TOKENS * HEADS * ELEMENTS * 4
WAIT_S = 10.0
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PATIENT_S = 60.0  # of the store's client: a busy machine is not a store that is away


def names(blocks: int, first_token: int = 0) -> bytes:
    """The hashes of a chain."""
    tokens = list(range(first_token, first_token + blocks * BLOCK_TOKENS))
    return hash_tokens(tokens, BLOCK_TOKENS, root=root_hash(None)).data


def contiguous(blocks: int, *, empty: bool = False) -> list[LayerBlocks]:
    """Layers whose tokens follow one another, of random numbers or of zeros."""
    make = torch.zeros if empty else torch.randn
    shape = (blocks * BLOCK_TOKENS + 3, HEADS, ELEMENTS)  # three tokens of no whole block
    return [
        LayerBlocks.contiguous(make(shape), make(shape), block_tokens=BLOCK_TOKENS)
        for _ in range(LAYERS)
    ]


def paged(pages: int, *, empty: bool = False) -> list[LayerBlocks]:
    """Layers of pages: keys and values are halves of one tensor, as vLLM keeps them."""
    make = torch.zeros if empty else torch.randn
    both = [make(2, pages, BLOCK_TOKENS, HEADS, ELEMENTS) for _ in range(LAYERS)]
    return [LayerBlocks.paged(each[0], each[1]) for each in both]


def some(layers: Sequence[LayerBlocks], indices: Sequence[int], first: int = 0) -> Blocks:
    """Blocks of the chain, from `first` on, at these places."""
    stop = first + len(indices)
    return Blocks(layers, indices, names(stop), range(first, stop))


def contents(blocks: Blocks) -> list[Tensor]:
    """What the tensors hold of them."""
    at = list(blocks.indices)
    return [tensor[at] for layer in blocks.layers for tensor in layer.tensors]


def equal(one: Blocks, other: Blocks) -> bool:
    """Whether both hold the same numbers."""
    return all(map(torch.equal, contents(one), contents(other)))


def put_all(client: TensorClient, blocks: Blocks) -> int:
    """Put all layers; how many leading blocks are there."""
    with client.put_tensors(blocks) as put:
        for layer in range(len(blocks.layers)):
            put.layer(layer)
        return put.finish()


@contextmanager
def linked(url: str, layers: Sequence[LayerBlocks]) -> Iterator[StoreLink]:
    """A link whose manifest has a part for each layer."""
    spec = CacheSpec("m", "r1", "float32", BLOCK_TOKENS, "sha256_cbor", root_hash(None).hex())
    manifest = layered_manifest(spec, layers, "test")
    client = StoreClient(url, deadline_s=PATIENT_S)
    link = StoreLink(client, manifest, logging.getLogger("torch"), engine="test")
    try:
        yield link
    finally:
        link.close()


@dataclass
class PretendedEvent:
    """Copies that are done when somebody looks after the device was let go."""

    device: "PretendedDevice"
    copies: Callable[[], None] | None

    def query(self) -> bool:
        if self.device.broken:
            raise RuntimeError(self.device.broken)
        if self.device.held:
            return False
        if self.copies is not None:
            self.copies()
        self.copies = None
        return True


@dataclass
class PretendedDevice:
    """A `Device` that copies as late as a GPU may: not before it is looked at.

    held: it gets no further. broken: what it says instead of working.
    """

    held: bool = False
    broken: str = ""
    memory: list[Tensor] = field(default_factory=list)

    def host_memory(self, size: int) -> Tensor:
        self.memory.append(torch.empty(size, dtype=torch.uint8))
        return self.memory[-1]

    def index(self, indices: list[int]) -> Tensor:
        return torch.tensor(indices)

    def run(self, copies: Callable[[], None]) -> PretendedEvent:
        if self.broken:
            raise RuntimeError(self.broken)
        return PretendedEvent(self, copies)

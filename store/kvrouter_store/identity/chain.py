"""Block hashes: tokens to the names of their blocks, equal to vLLM's `sha256_cbor` chain.

A block's hash is chained over its tokens and its parent's hash, so a prefix has one name per full
block; a partial last block has none. The hashing is native (`_core.chain_hashes`).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, overload

from kvrouter_store import _core

if TYPE_CHECKING:
    from typing_extensions import Buffer

HASH_BYTES = 32


class BlockHashes(Sequence[bytes]):
    """The hashes of consecutive blocks, held as one bytes object of 32 bytes each (`data`)."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        if len(data) % HASH_BYTES:
            raise ValueError(f"{len(data)} bytes are no whole number of {HASH_BYTES}-byte hashes")
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // HASH_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> "BlockHashes": ...
    def __getitem__(self, index: int | slice) -> "bytes | BlockHashes":
        """One hash, or (slice of step 1) the hashes of consecutive blocks."""
        if isinstance(index, slice):
            first, end, step = index.indices(len(self))
            if step != 1:
                raise ValueError("block hashes are consecutive: slices have step 1")
            return BlockHashes(self.data[first * HASH_BYTES : end * HASH_BYTES])
        place = range(len(self))[index] * HASH_BYTES
        return self.data[place : place + HASH_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        data = self.data
        return (data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockHashes) and other.data == self.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        last = self[-1].hex()[:16] if self.data else "-"
        return f"<BlockHashes {len(self)} blocks, last {last}>"

    def low64(self) -> list[int]:
        """The low 64 bits of each hash: the ids that vLLM's KV events carry."""
        return _core.low64(self.data)


@lru_cache(maxsize=64)
def root_hash(seed: str | None = None) -> bytes:
    """The hash before the first block: vLLM's NONE_HASH for `PYTHONHASHSEED=seed`."""
    return _core.root_hash(seed)


def hash_tokens(
    tokens: "Buffer | list[int]",
    block_tokens: int,
    *,
    root: bytes,
    parent: bytes | None = None,
    lora: tuple[str, str] | None = None,
    cache_salt: str | None = None,
) -> BlockHashes:
    """The hashes of the full blocks of `tokens` (32- or 64-bit integers, or a list).

    `parent` continues a chain after that block, which has `cache_salt` in it already. Raises
    ValueError where a token id is outside 0..2**32-1.
    """
    data = _core.chain_hashes(
        tokens, block_tokens, root=root, parent=parent, lora=lora, cache_salt=cache_salt
    )
    return BlockHashes(data)

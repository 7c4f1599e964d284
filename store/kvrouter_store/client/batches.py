"""How puts and gets of many blocks are cut into requests, and what is checked before.

A chain is 32 bytes of hash for each block, from block 0 on; a range names the blocks meant.
"""

from collections.abc import Sequence

from kvrouter_store._core import MAX_HASHES, Segments
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.chain import HASH_BYTES

BATCH_BYTES = 64 << 20
"""What one request of a put or get moves at most: so much of the pool it may hold at a time."""
BATCH_BLOCKS = 1024


def check_range(  # noqa: PLR0917
    manifest: Manifest,
    part: int,
    hashes: bytes,
    span: range,
    segments: Segments,
    indices: Sequence[int],
) -> None:
    """Raise ValueError where the arguments of a put or get do not fit together."""
    blocks, rest = divmod(len(hashes), HASH_BYTES)
    if rest:
        raise ValueError(f"hashes are {HASH_BYTES} bytes each, got {len(hashes)} bytes")
    if span.step != 1 or span.start < 0 or (span and span.stop > blocks):
        raise ValueError(f"{span} is no run of the chain's {blocks} blocks")
    if len(indices) != len(span):
        raise ValueError(f"{len(span)} blocks need as many indices, got {len(indices)}")
    if not 0 <= part < len(manifest.parts):
        raise ValueError(f"the manifest has {len(manifest.parts)} parts, not part {part}")
    expected = manifest.parts[part].block_bytes
    if segments.block_bytes != expected:
        raise ValueError(
            f"part {part} has {expected} bytes per block, the segments {segments.block_bytes}"
        )


def check_upto(hashes: bytes, upto: int) -> None:
    """Raise ValueError where a wait names more blocks than it has hashes for, or than one may."""
    blocks = len(hashes) // HASH_BYTES
    if not 0 <= upto <= blocks:
        raise ValueError(f"cannot wait for {upto} blocks of a chain of {blocks}")
    if upto > MAX_HASHES:
        raise ValueError(f"one wait is for {MAX_HASHES} blocks at most, not {upto}: cut the chain")


def requests(span: range) -> list[range]:
    """The range, cut into as many blocks as one request may name."""
    return _cut(span, MAX_HASHES)


def questions(hashes: bytes) -> list[bytes]:
    """The hashes, cut into as many as one request may have."""
    most = MAX_HASHES * HASH_BYTES
    return [hashes[at : at + most] for at in range(0, len(hashes), most)]


def hashes_of(hashes: bytes, span: range) -> bytes:
    """The hashes of the blocks in the range."""
    return hashes[span.start * HASH_BYTES : span.stop * HASH_BYTES]


def parent_of(hashes: bytes, span: range) -> bytes | None:
    """The hash before the range; None where it begins the chain."""
    return hashes_of(hashes, range(span.start - 1, span.start)) if span.start else None


def batches(span: range, block_bytes: int) -> list[range]:
    """The range, cut so that each request moves at most BATCH_BYTES, or one block."""
    return _cut(span, max(1, min(BATCH_BLOCKS, BATCH_BYTES // max(1, block_bytes))))


def _cut(span: range, most: int) -> list[range]:
    if 0 < len(span) <= most:  # the usual case: a call for one block takes 8 us
        return [span]
    return [span[at : at + most] for at in range(0, len(span), most)]

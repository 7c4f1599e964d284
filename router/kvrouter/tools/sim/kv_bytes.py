"""What stands in for attention: KV bytes from a block's name, and text from KV bytes. Does no I/O.

The KV of a block is a function of its cache spec and its hash, so an engine can tell every wrong
byte. The next token is a function of the bytes that the engine holds for the full blocks before it
and of the tokens after them, so wrong KV makes wrong text, and right KV the same text anywhere.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256, shake_128
from typing import TYPE_CHECKING

from kvrouter_store import _core

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["KVContext", "kv_of_block"]

_PAGE_BYTES = 4096
_STRIDE = 61


def kv_of_block(spec_digest: bytes, block_hash: bytes, block_bytes: int) -> bytes:
    """The KV of a block, `block_bytes` long.

    A page is drawn from SHAKE-128 and laid down again and again, each time turned by a little, so
    that it is cheap (about 20 us for 64 KiB) and still no two places look alike.
    """
    page_bytes = min(_PAGE_BYTES, block_bytes)
    page = shake_128(spec_digest + block_hash).digest(page_bytes)
    if block_bytes <= page_bytes:
        return page
    twice = page + page
    turns = (index * _STRIDE % page_bytes for index in range(-(-block_bytes // page_bytes)))
    return b"".join(twice[turn : turn + page_bytes] for turn in turns)[:block_bytes]


class KVContext:
    """What an engine has in front of it: blocks of KV, then tokens that fill no block yet."""

    __slots__ = ("_state", "blocks")

    def __init__(self, spec_digest: bytes) -> None:
        self._state = sha256(spec_digest).digest()
        self.blocks = 0

    def add_block(self, kv: "Buffer") -> None:
        """Take in the next block's bytes as they are held, right or wrong."""
        digest = _core.crc32c(kv)
        self._state = sha256(self._state + digest.to_bytes(4, "little")).digest()
        self.blocks += 1

    def next_number(self, tail: Sequence[int], seed: int | None = None) -> int:
        """A number that stands for the next token after the blocks and the `tail` of tokens.

        With a seed it stands for a token drawn at random.
        """
        drawn = b"" if seed is None else b"%d" % seed
        seen = sha256(self._state + array("I", tail).tobytes() + drawn).digest()
        return int.from_bytes(seen[:8], "little")

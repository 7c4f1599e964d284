"""A substitute for attention: KV bytes from a block's name, and tokens from KV bytes. Does no I/O.

The KV of a block is a function of its cache spec and its hash, so an engine detects every wrong
byte. The next token is a function of the bytes that the engine holds for the full blocks and of the
tokens after them: wrong KV gives a wrong text, right KV gives the same text on every engine.

An engine's KV memory has slots of one block each, and knows no names.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256, shake_128
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import TYPE_CHECKING

from kvrouter.tools.sim.tokenizer import SimTokenizer
from kvrouter_store import _core
from kvrouter_store.identity.block import Manifest
from kvrouter_store.identity.chain import hash_tokens

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PAGE_BYTES = 4096
_STRIDE = 61


def kv_of_block(spec_digest: bytes, block_hash: bytes, block_bytes: int) -> bytes:
    """The KV of a block, `block_bytes` long.

    A page of SHAKE-128 is repeated, each time rotated: that is fast (about 20 us for 64 KiB), and
    no two places have the same bytes.
    """
    page_bytes = min(_PAGE_BYTES, block_bytes)
    page = shake_128(spec_digest + block_hash).digest(page_bytes)
    if block_bytes <= page_bytes:
        return page
    twice = page + page
    turns = (index * _STRIDE % page_bytes for index in range(-(-block_bytes // page_bytes)))
    return b"".join(twice[turn : turn + page_bytes] for turn in turns)[:block_bytes]


class KVContext:
    """The state of a request: blocks of KV; tokens that fill no block yet come on top."""

    __slots__ = ("_state", "blocks")

    def __init__(self, spec_digest: bytes) -> None:
        self._state = sha256(spec_digest).digest()
        self.blocks = 0

    def add_block(self, kv: "Buffer") -> None:
        """Add the next block's bytes as the engine holds them, right or wrong."""
        digest = _core.crc32c(kv)
        self._state = sha256(self._state + digest.to_bytes(4, "little")).digest()
        self.blocks += 1

    def next_number(self, tail: Sequence[int], seed: int | None = None) -> int:
        """A number for the next token after the blocks and the `tail` of tokens.

        With a seed it is a token drawn at random.
        """
        drawn = b"" if seed is None else b"%d" % seed
        seen = sha256(self._state + array("I", tail).tobytes() + drawn).digest()
        return int.from_bytes(seen[:8], "little")


class KVMemory:
    """`blocks` slots of `block_bytes` bytes; a page takes memory only once it is written."""

    def __init__(self, spec_digest: bytes, blocks: int, block_bytes: int) -> None:
        self._spec_digest = spec_digest
        self._memory = mmap(-1, blocks * block_bytes, MAP_PRIVATE | MAP_ANONYMOUS)
        self._view = memoryview(self._memory)
        self.block_bytes = block_bytes
        self.segments = _core.Segments.over(self._memory, block_bytes, writable=True)

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot."""
        return self._view[index * self.block_bytes : (index + 1) * self.block_bytes]

    def compute(self, slots: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Fill slots with the KV of these hashes, as a forward pass does."""
        for index, block_hash in zip(slots, hashes, strict=True):
            self.slot(index)[:] = kv_of_block(self._spec_digest, block_hash, self.block_bytes)

    def right_blocks(self, slots: Sequence[int], hashes: Sequence[bytes]) -> int:
        """How many leading slots hold exactly the KV of their hashes."""
        for count, (index, block_hash) in enumerate(zip(slots, hashes, strict=True)):
            if self.slot(index) != kv_of_block(self._spec_digest, block_hash, self.block_bytes):
                return count
        return len(slots)


class Oracle:
    """The right answers of every engine with this manifest, computed without an engine.

    It shares only the functions from names to bytes and from bytes to tokens with engines: no
    cache, store or router can change them.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._spec = manifest.spec
        self._block_bytes = manifest.block_bytes
        self._root = bytes.fromhex(manifest.spec.root)
        self.tokenizer = SimTokenizer()

    def text(self, prompt: list[int], answer_tokens: int) -> str:
        """The text of the answer to a prompt of token ids, without a cache salt."""
        tokens = list(prompt)
        context = KVContext(self._spec.digest)
        for _ in range(answer_tokens):
            self._attend(context, tokens)
            tail = tokens[context.blocks * self._spec.block_tokens :]
            tokens.append(self.tokenizer.syllable(context.next_number(tail)))
        return self.tokenizer.decode(tokens[len(prompt) :])

    def _attend(self, context: KVContext, tokens: list[int]) -> None:
        size = self._spec.block_tokens
        if len(tokens) // size == context.blocks:
            return
        names = hash_tokens(array("I", tokens), size, root=self._root)
        for name in names[context.blocks :]:
            context.add_block(kv_of_block(self._spec.digest, name, self._block_bytes))

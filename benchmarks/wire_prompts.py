"""Requests of the wire benchmark: bodies by size and shape, and their KV.

The load generator numbers every prompt. In a prompt of token ids the number ends the last whole
block: the store holds all other blocks, so that each request has a prefill leg, a put and a
landing. In a text the number comes after the whole blocks, and the store holds them all.
"""

import json
import random
from dataclasses import dataclass
from typing import Literal

from benchmarks.wire_text import WORDS, word
from kvrouter.tools.sim.block_cache import Stored
from kvrouter.tools.sim.events import EventPublisher
from kvrouter_store import _core
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.chain import hash_tokens, root_hash
from kvrouter_store.identity.layout import Layout

BLOCK_TOKENS = 16  # vLLM's default on a GPU: the most names per prompt that a router will see
BLOCK_BYTES = 4096  # the router never reads KV; the store's granule is as good as any size
PROMPTS = 32
TAIL = 8  # token ids behind the numbered block, as in mock.c
MARK = "#######"  # what the load generator numbers
SIZES = {"short": 180, "8 KiB": 8 * 1024, "32 KiB": 32 * 1024}

Shape = Literal["ids", "text"]
SHAPES: tuple[Shape, ...] = ("ids", "text")


@dataclass(frozen=True)
class Prompt:
    """A request body with a mark for its number.

    Attributes:
        tokens: of the whole blocks that are always in the store.
        numbered: of the next whole block, without the number that ends it.
        text: the prompt without its mark, empty for token ids.
    """

    body: str
    tokens: list[int]
    numbered: list[int]
    text: str = ""


def whole_blocks(tokens: list[int]) -> list[int]:
    """The tokens without those of a partial last block."""
    return tokens[: len(tokens) - len(tokens) % BLOCK_TOKENS]


def _body(prompt: str, max_tokens: int, stream: bool) -> str:
    streamed = ',"stream":true' if stream else ""
    return f'{{"model":"m","prompt":{prompt},"max_tokens":{max_tokens}{streamed}}}'


def _ids_prompt(rng: random.Random, size: int, max_tokens: int, stream: bool) -> Prompt:
    """Token ids of a vocabulary of 128k: most have five digits."""
    blocks = max(1, (size - 60) // (6 * BLOCK_TOKENS))
    ids = [rng.randrange(10_000, 100_000) for _ in range(blocks * BLOCK_TOKENS - 1)]
    tail = [rng.randrange(10_000, 100_000) for _ in range(TAIL)]
    text = ",".join([*map(str, ids), f"1{MARK}", *map(str, tail)])
    stored = (blocks - 1) * BLOCK_TOKENS
    return Prompt(_body(f"[{text}]", max_tokens, stream), ids[:stored], ids[stored:])


def _text_prompt(rng: random.Random, size: int, max_tokens: int, stream: bool) -> Prompt:
    """Words of one token each; the mark is a word of its own."""
    count = max(BLOCK_TOKENS + TAIL, (size - 60) // 5)
    count -= (count - TAIL) % BLOCK_TOKENS
    tokens = [rng.randrange(WORDS) for _ in range(count)]
    text = " ".join(map(word, tokens))
    body = _body(json.dumps(f"{text} {MARK}"), max_tokens, stream)
    return Prompt(body, whole_blocks(tokens), [], text)


def prompts(
    shape: Shape, size: int, max_tokens: int = 1, stream: bool = False, count: int = PROMPTS
) -> list[Prompt]:
    """`count` bodies of about `size` bytes, equal for equal arguments."""
    rng = random.Random(f"{shape} {size}")
    make = _ids_prompt if shape == "ids" else _text_prompt
    return [make(rng, size, max_tokens, stream) for _ in range(count)]


def manifest() -> Manifest:
    """The manifest of the mock engines: one opaque part."""
    spec = CacheSpec(
        model="m",
        weights_revision="mock",
        kv_dtype="float16",
        block_tokens=BLOCK_TOKENS,
        hash_algo="sha256_cbor",
        root=root_hash().hex(),
    )
    part = Part((0, 1), (0, 1), 0, BLOCK_BYTES, Layout.opaque("mock"))
    return Manifest(spec, (part,))


def chain(tokens: list[int]) -> bytes:
    """The block hashes of a prompt's whole blocks."""
    return hash_tokens(tokens, BLOCK_TOKENS, root=root_hash()).data


def fill_store(url: str, chains: list[list[int]]) -> int:
    """Put the whole blocks of token lists into the store, so that they land at once; how many."""
    blocks = 0
    with StoreClient(url, name="wire benchmark") as store:
        mock = manifest()
        store.register(mock, engine="mock")
        for tokens in chains:
            hashes = chain(tokens)
            count = len(hashes) // 32
            kv = _core.Segments.over(bytearray(count * BLOCK_BYTES), BLOCK_BYTES, writable=False)
            result = store.put(mock, 0, hashes, range(count), kv, range(count))
            if result.refused:
                raise RuntimeError(f"the store refused {result.refused} of {count} blocks")
            blocks += count
    return blocks


class KvEvents:
    """KV events of the mock engines: all prompts at the start, then a trickle of new blocks.

    For the running loop.
    """

    def __init__(self, endpoint: str, engines: list[str]) -> None:
        self._publishers = [
            EventPublisher(endpoint, f"kv@{engine}", BLOCK_TOKENS) for engine in engines
        ]
        self._count = 0

    def announce(self, chains: list[list[int]]) -> None:
        """Publish all prompts, each from one of the engines."""
        for number, tokens in enumerate(chains):
            self._publish(self._publishers[number % len(self._publishers)], tokens)

    def trickle(self) -> None:
        """Publish one new block of every engine."""
        self._count += 1
        for publisher in self._publishers:
            self._publish(publisher, [self._count % 50_000] * BLOCK_TOKENS)

    def close(self) -> None:
        """Close the sockets."""
        for publisher in self._publishers:
            publisher.close()

    @staticmethod
    def _publish(publisher: EventPublisher, tokens: list[int]) -> None:
        hashes = chain(tokens)
        names = tuple(hashes[at : at + 32] for at in range(0, len(hashes), 32))
        publisher.publish([Stored(None, names, tuple(tokens))])

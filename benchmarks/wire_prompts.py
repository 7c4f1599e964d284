"""Requests of the wire benchmark: bodies by size and shape, and their KV.

The load generator numbers every prompt. In a prompt of token ids the number ends the last whole
block: the store holds all other blocks, so that each request has a prefill leg, a put and a
landing. In a text the number comes after the whole blocks, and the store holds them all.

Texts are words of four letters that spell a number in base 26; the mock engines read them in the
same way (benchmarks/native/mock.c).
"""

import json
import random
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from kvrouter.tools.sim.block_cache import Stored
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
WORDS, LETTERS = 20_000, 4  # as in mock.c
RECEIVE_BYTES = 8 << 20
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


def word(token: int) -> str:
    """The word of this token."""
    letters = []
    for _ in range(LETTERS):
        token, letter = divmod(token, 26)
        letters.append(chr(ord("a") + letter))
    return "".join(reversed(letters))


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


def write_bodies(folder: Path, name: str, asked: Sequence[Prompt]) -> Path:
    """A file with the body of each prompt, for the load generator."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(prompt.body + "\n" for prompt in asked))
    return path


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


def stored(tokens: list[int]) -> Stored:
    """The KV event of a prompt's whole blocks."""
    hashes = chain(tokens)
    names = tuple(hashes[at : at + 32] for at in range(0, len(hashes), 32))
    return Stored(None, names, tuple(tokens))


class TextTokenizer:
    """A tokenizer.json in a folder, and what a text costs it: a real one that splits and looks up.

    Raises ImportError without the `tokenizers` package (`kvrouter[tokenizers]`). The router then
    asks the mock engines, whose tokenization a benchmark should not count.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415 - an extra, not a dependency

        words = {word(token): token for token in range(WORDS)}
        model = {"type": "WordLevel", "vocab": words, "unk_token": word(0)}
        self.path = folder / "tokenizer.json"
        file = {"version": "1.0", "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
        self.path.write_text(json.dumps(file))
        self._tokenizer: Any = Tokenizer.from_file(str(self.path))

    def cost_us(self, texts: Sequence[str]) -> float:
        """CPU microseconds per text, once."""
        started = time.thread_time()
        for text in texts:
            self._tokenizer.encode(text)
        return (time.thread_time() - started) / len(texts) * 1e6


class Saver:
    """The mock engines' connector: it puts the numbered block of each prefilled prompt.

    A thread of the benchmark's process, on the core of the load, so that no router pays for it. It
    listens for the mock's datagrams.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._chains: dict[int, tuple[bytes, list[int]]] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread:
            self._socket.sendto(b"", self._socket.getsockname())
            self._thread.join()
        self._socket.close()

    def start(self, url: str, asked: list[Prompt]) -> None:
        """Begin to put blocks of these prompts into the store at `url`."""
        for prompt in asked:
            if prompt.numbered:
                first = (prompt.tokens or prompt.numbered)[0]
                self._chains[first] = chain(prompt.tokens), prompt.numbered
        self._thread = threading.Thread(target=self._run, args=(url,), name="saver")
        self._thread.start()

    def _run(self, url: str) -> None:
        kv = _core.Segments.over(bytearray(BLOCK_BYTES), BLOCK_BYTES, writable=False)
        mock, root = manifest(), root_hash()
        with StoreClient(url, name="mock connector") as store:
            store.register(mock, engine="mock")
            while message := self._socket.recv(64):
                first, number = map(int, message.split())
                if first not in self._chains:
                    continue
                before, numbered = self._chains[first]
                parent = before[-32:] or None
                name = hash_tokens([*numbered, number], BLOCK_TOKENS, root=root, parent=parent)
                count = len(before) // 32
                store.put(mock, 0, before + name.data, range(count, count + 1), kv, [0])

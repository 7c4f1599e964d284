"""Token ids of a prompt, from a local tokenizer or from an engine's /tokenize.

Used only where a policy needs hashes. It never guesses: without an answer the request goes on
without hashes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from sys import getsizeof
from typing import TYPE_CHECKING, Any, Final

import orjson

from kvrouter._native import scan_object
from kvrouter.prefix.byte_cache import ByteCache
from kvrouter.prefix.hash_cache import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvrouter.engines.engine import Engine
    from kvrouter.telemetry.caches import CacheUse

    Post = Callable[[Engine, str, bytes], Awaitable[bytes]]

TOKENIZE_PATH: Final = "/tokenize"
CACHED_BYTES: Final = 64 << 20
"""Memory of the token ids in the cache: 4 bytes each, their JSON about 6."""
ENTRY_BYTES: Final = 512
"""What a cached prompt takes besides these, which bounds the number of short prompts."""
MAX_THREADS: Final = 4
INLINE_CHARACTERS: Final = 4096
"""Longer texts are tokenised in a thread, so that the event loop goes on."""
TRIAL_TEXT: Final = (
    "The quick brown fox: 12,345 jumps\n\tover \u00e9t\u00e9 \u4f60\u597d <|endoftext|> end."
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The ids of a prompt, as native uint32 and as the JSON array that legs carry."""

    ids: bytes
    json: bytes

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids) // ID_BYTES


class TokenizerUnavailable(ValueError):
    """The configured tokenizer cannot be loaded; the message says what to do."""


def tokenizer_file(path: str) -> Path:
    """The `tokenizer.json` of `path`, itself or its directory; TokenizerUnavailable: none."""
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise TokenizerUnavailable(
            f"there is no file {file}: give a tokenizer.json or the directory that holds it"
        )
    return file


class LocalTokenizer:
    """A `tokenizer.json` in this process, for text prompts (chats need the model's template).

    TokenizerUnavailable: the file or the `tokenizers` package is missing.
    """

    def __init__(self, path: str) -> None:
        file = tokenizer_file(path)
        try:
            from tokenizers import Tokenizer  # noqa: PLC0415 - an extra, not a dependency
        except ImportError:
            raise TokenizerUnavailable(
                "--tokenizer needs `pip install kvrouter[tokenizers]`"
            ) from None
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare Exception
            raise TokenizerUnavailable(
                f"--tokenizer {path}: {error}; give a tokenizer.json or its directory"
            ) from None

    def encode(self, text: str) -> array[int]:
        """Token ids of `text`, with the special tokens of the model."""
        return array("I", self._tokenizer.encode(text).ids)


class TokenSource:
    """Finds the token ids of prompts; caches the latest.

    Args:
        post: sends a body to an engine's path and returns the body of its 200; raises OSError,
            TimeoutError or ValueError otherwise.
        local: tokenizer for texts, used once an engine's ids were found to be the same.
        max_bytes: bound of the cache.

    Attributes:
        counts: cache_hits, local, engine, failed; each only grows.
    """

    def __init__(
        self, post: Post, local: LocalTokenizer | None = None, max_bytes: int = CACHED_BYTES
    ) -> None:
        self._post = post
        self._local = local
        self._agrees: dict[str, bool] = {}  # by model: whether the local tokenizer is the engines'
        self._cache: ByteCache[bytes, PromptTokens] = ByteCache(max_bytes, max_bytes // 16, _size)
        self._threads: ThreadPoolExecutor | None = None
        self.counts: Counter[str] = Counter()

    @property
    def use(self) -> CacheUse:
        """Number of cached prompts, and their memory."""
        return self._cache.use

    async def tokens(
        self, engine: Engine, model: str, body: bytes, text: str | None
    ) -> PromptTokens | None:
        """Token ids of a prompt; None: unknown.

        Args:
            engine: one that serves `model`.
            model: its name.
            body: of POST /tokenize, from the engine's family; also the cache's key.
            text: the prompt, if it is plain text with the default special tokens.
        """
        key = blake2b(body, digest_size=16).digest()
        found = self._cache.get(key)
        if found is not None:
            self.counts["cache_hits"] += 1
            return found
        if text is not None and self._local is not None and await self._trusted(engine, model):
            found = await self._encode(self._local, text)
            self.counts["local"] += 1
        else:
            found = await self._ask(engine, body)
        if found is not None:
            self._cache.put(key, found)
        return found

    async def rendered(self, engine: Engine, path: str, body: bytes) -> PromptTokens | None:
        """Token ids of what `engine` renders at `path`; None: unknown, or media are beside them.

        Not cached: what it renders may depend on the date.
        """
        return await self._ask(engine, body, path, "token_ids")

    def close(self) -> None:
        """End the threads; texts that wait for one are given up. Idempotent."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    async def _trusted(self, engine: Engine, model: str) -> bool:
        """Whether the local tokenizer agrees with the engine's on a trial text: asked once."""
        agrees = self._agrees.get(model)
        if agrees is None and self._local is not None:
            theirs = await self._ask(engine, orjson.dumps({"model": model, "prompt": TRIAL_TEXT}))
            if theirs is None:
                return False
            agrees = theirs.ids == self._local.encode(TRIAL_TEXT).tobytes()
            self._agrees[model] = agrees
            if not agrees:
                log.warning(
                    "--tokenizer gives other token ids than %s for model %s: not used for it; "
                    "give the tokenizer of that model",
                    engine.address,
                    model,
                )
        return bool(agrees)

    async def _encode(self, local: LocalTokenizer, text: str) -> PromptTokens:
        if len(text) <= INLINE_CHARACTERS:
            return _encode(local, text)
        if self._threads is None:
            # Fewer than cores, so that the event loop keeps one.
            workers = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) - 1))
            self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenise")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, _encode, local, text)

    async def _ask(
        self, engine: Engine, body: bytes, path: str = TOKENIZE_PATH, member: str = "tokens"
    ) -> PromptTokens | None:
        try:
            found = _read(await self._post(engine, path, body), member)
        except (OSError, TimeoutError, ValueError) as error:
            self.counts["failed"] += 1
            log.debug("%s does not tokenise: %s", engine.address, error)
            return None
        self.counts["engine"] += 1
        return found


def _read(answer: bytes, member: str) -> PromptTokens:
    """The ids in an answer."""
    spans, ids = scan_object(answer, member)
    if ids is None or answer[slice(*spans.get("features", (0, 0)))] not in (b"", b"null"):
        raise ValueError("not token ids, or media beside them")
    start, end = spans[member]
    return PromptTokens(ids, answer[start:end])


def _size(_: bytes, tokens: PromptTokens) -> int:
    """Bytes of memory that a cached prompt takes."""
    return ENTRY_BYTES + getsizeof(tokens.ids) + getsizeof(tokens.json)


def _encode(local: LocalTokenizer, text: str) -> PromptTokens:
    ids = local.encode(text)
    written = orjson.dumps(ids.tolist())
    return PromptTokens(ids.tobytes(), bytes(memoryview(written)))  # orjson's own takes more memory

"""Token ids of a prompt, from a local tokenizer or from an engine's /tokenize.

Used only where a policy needs hashes. It never guesses: without an answer in time the request goes
on without hashes. A late answer is remembered for the next request with that prompt.
"""

from __future__ import annotations

import asyncio
import logging
import os
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from sys import getsizeof
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson

from kvrouter._native import scan_object
from kvrouter.prefix.byte_cache import ByteCache
from kvrouter.prefix.hash_cache import ID_BYTES
from kvrouter.prefix.patience import QuickEngines, patience_s

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from kvrouter.engines.engine import Engine
    from kvrouter.telemetry.caches import CacheUse

    Ids = asyncio.Task["PromptTokens | None"]
    Post = Callable[[Engine, str, bytes], Awaitable[bytes]]

TOKENIZE_PATH: Final = "/tokenize"
CACHED_BYTES: Final = 64 << 20
"""Memory of the token ids in the cache: 4 bytes each, their JSON about 6."""
ENTRY_BYTES: Final = 512
"""What a cached prompt takes besides these, which bounds the number of short prompts."""
MAX_THREADS: Final = 4
INLINE_CHARACTERS: Final = 4096
"""Longer texts are tokenised in a thread, so that the event loop goes on."""
MAX_ENCODING: Final = 32
"""Texts that threads have or that wait for one; further ones go on without ids."""
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


class _Question(NamedTuple):
    path: str
    body: bytes
    member: str  # of the answer, which has the ids
    key: bytes | None  # of the prompt in the cache; None: not to be cached


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
        patience: seconds that a request waits, by the bytes of its prompt.
        quick: remembers which engines answer in time.

    Attributes:
        counts: cache_hits, local, engine, failed, late; each only grows.
    """

    def __init__(
        self,
        post: Post,
        local: LocalTokenizer | None = None,
        max_bytes: int = CACHED_BYTES,
        *,
        patience: Callable[[int], float] = patience_s,
        quick: QuickEngines | None = None,
    ) -> None:
        self._post = post
        self._local = local
        self._patience = patience
        self._quick = quick or QuickEngines()
        self._turn = 0
        self._tasks: set[Ids] = set()
        self._asked: dict[bytes, Ids] = {}  # those of `_tasks` that others may wait for too
        self._agrees: dict[str, bool] = {}  # by model: whether the local tokenizer is the engines'
        self._cache: ByteCache[bytes, PromptTokens] = ByteCache(max_bytes, max_bytes // 16, _size)
        self._threads: ThreadPoolExecutor | None = None
        self.counts: Counter[str] = Counter()

    @property
    def use(self) -> CacheUse:
        """Number of cached prompts, and their memory."""
        return self._cache.use

    async def tokens(
        self, engines: Sequence[Engine], model: str, body: bytes, text: str | None
    ) -> PromptTokens | None:
        """Token ids of a prompt; None: unknown, or not in time.

        Args:
            engines: serve `model`; two of them are asked at most.
            model: its name.
            body: of POST /tokenize, from the engine's family; also the cache's key.
            text: the prompt, if it is plain text with the default special tokens.
        """
        key = blake2b(body, digest_size=16).digest()
        found = self._cache.get(key)
        if found is not None:
            self.counts["cache_hits"] += 1
            return found
        if text is not None and self._local is not None and await self._trusted(engines, model):
            return await self._encode(self._local, key, text)
        return await self._ask(engines, body, key)

    async def rendered(
        self, engines: Sequence[Engine], path: str, body: bytes
    ) -> PromptTokens | None:
        """Token ids of what one of `engines` renders at `path`.

        None: unknown, not in time, or media are beside them. Not cached: what they render may
        depend on the date.
        """
        return await self._ask(engines, body, None, path, "token_ids")

    def close(self) -> None:
        """End questions and threads; texts that wait for one are given up. Idempotent."""
        for task in list(self._tasks):
            task.cancel()
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    async def _trusted(self, engines: Sequence[Engine], model: str) -> bool:
        """Whether the local tokenizer agrees with the engine's on a trial text: asked once."""
        agrees = self._agrees.get(model)
        if agrees is None and self._local is not None:
            trial = orjson.dumps({"model": model, "prompt": TRIAL_TEXT})
            theirs = self._cache.get(trial) or await self._ask(engines, trial, trial)
            if theirs is None:
                return False
            agrees = theirs.ids == self._local.encode(TRIAL_TEXT).tobytes()
            self._agrees[model] = agrees
            if not agrees:
                log.warning(
                    "--tokenizer gives other token ids than an engine for model %s: not used for "
                    "it; give the tokenizer of that model",
                    model,
                )
        return bool(agrees)

    async def _encode(self, local: LocalTokenizer, key: bytes, text: str) -> PromptTokens | None:
        if len(text) <= INLINE_CHARACTERS:
            self.counts["local"] += 1
            return self._remember(key, _encode(local, text))
        task = self._asked.get(key)
        if task is None and len(self._tasks) < MAX_ENCODING:
            task = self._begin(key, self._in_thread(local, key, text))
        found = await _first([task], self._patience(len(text))) if task is not None else None
        self.counts["local" if found is not None else "late"] += 1
        return found

    async def _in_thread(self, local: LocalTokenizer, key: bytes, text: str) -> PromptTokens:
        if self._threads is None:
            # Fewer than cores, so that the event loop keeps one.
            workers = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) - 1))
            self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenise")
        loop = asyncio.get_running_loop()
        return self._remember(key, await loop.run_in_executor(self._threads, _encode, local, text))

    async def _ask(
        self,
        engines: Sequence[Engine],
        body: bytes,
        key: bytes | None,
        path: str = TOKENIZE_PATH,
        member: str = "tokens",
    ) -> PromptTokens | None:
        """The ids that an engine tells in time; where one takes half of it, another is asked too.

        What is asked already, for another request with that prompt, is not asked again.
        """
        wait_s, loop = self._patience(len(body)), asyncio.get_running_loop()
        question = _Question(path, body, member, key)

        def begin(engine: Engine) -> Ids:
            # Noted before this request gives up: the next one is not to wait for it too.
            late = loop.call_later(wait_s, self._was_late, engine, wait_s)
            return self._begin(key, self._answer(engine, question, late))

        task = self._asked.get(key) if key is not None else None
        trial = self._quick.trial(engines)
        if trial is not None:
            begin(trial)
        quick, found = self._quick.of(engines), None
        tasks: list[Ids] = []
        if quick:
            self._turn += 1
            tasks = [task or begin(quick[self._turn % len(quick)])]
            found = await _first(tasks, wait_s / 2)
            if not tasks[0].done():
                tasks += map(begin, quick[(self._turn + 1) % len(quick) :][:1] if quick[1:] else ())
                found = await _first(tasks, wait_s / 2)
        ended = bool(tasks) and all(each.done() for each in tasks)
        self.counts["engine" if found is not None else "failed" if ended else "late"] += 1
        return found

    async def _answer(
        self, engine: Engine, question: _Question, late: asyncio.TimerHandle
    ) -> PromptTokens | None:
        """What one engine answers, to its deadline; notes whether that was in time."""
        try:
            answer = await self._post(engine, question.path, question.body)
            found = _read(answer, question.member)
        except (OSError, TimeoutError, ValueError) as error:
            log.debug("%s does not tokenise: %s", engine.address, error)
            return None
        finally:
            late.cancel()
            in_time = asyncio.get_running_loop().time() < late.when()
            if in_time and self._quick.was_quick(engine):
                log.info("%s tokenises in time again", engine.address)
        return self._remember(question.key, found)

    def _was_late(self, engine: Engine, wait_s: float) -> None:
        if self._quick.was_late(engine):
            log.warning(
                "%s took more than %.1f s to tokenise: requests go on without its answers, and "
                "without the blocks that they would find; it is tried again with growing pauses",
                engine.address,
                wait_s,
            )

    def _begin(self, key: bytes | None, answer: Coroutine[None, None, PromptTokens | None]) -> Ids:
        """Have an answer got, also if nobody waits for it to its end."""
        task = asyncio.create_task(answer, name="tokenise")
        self._tasks.add(task)
        if key is not None:
            self._asked[key] = task
        task.add_done_callback(partial(self._ended, key))
        return task

    def _ended(self, key: bytes | None, task: Ids) -> None:
        self._tasks.discard(task)
        if key is not None and self._asked.get(key) is task:
            del self._asked[key]

    def _remember(self, key: bytes | None, found: PromptTokens) -> PromptTokens:
        if key is not None:
            self._cache.put(key, found)
        return found


async def _first(tasks: Sequence[Ids], wait_s: float) -> PromptTokens | None:
    """The ids that the first task to end has found, if one ends in time."""
    done, _ = await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    return next((task.result() for task in done if task.result() is not None), None)


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

"""Token ids of a prompt, from a local tokenizer or from an engine's /tokenize.

Used only where a policy needs hashes. It never guesses: without an answer in time the request goes
on without hashes. A late answer is remembered for the next request with that prompt.

`QuickEngines`, synchronous over an injected clock, knows which engines tell token ids in time. One
that was late is asked again after a pause, by one request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from array import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from sys import getsizeof
from typing import TYPE_CHECKING, Any, Final, TypeVar

import orjson

from kvrouter._native import scan_object
from kvrouter.prefix.hash_cache import ID_BYTES, ByteCache
from kvrouter_store.connection.reconnect import BackOff

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from kvrouter.engines.engine import Engine
    from kvrouter.telemetry.series import CacheUse

    Post = Callable[[Engine, str, bytes, float], Awaitable[bytes]]

    _Question = tuple[str, bytes, bytes | None, str]

    """Path and body; the key of the prompt in the cache, if it has one; the answer's member."""

LEAST_S: Final = 0.3
MOST_S: Final = 0.8
BYTES_PER_S: Final = 400_000
"""Of a prompt's text, beyond `LEAST_S`: a tenth of the time in which an engine computes it, at
10,000 tokens per second. Token ids are worth a part of what they save, and a busy host needs some
time even for a short prompt."""
FIRST_PAUSE_S: Final = 2.0
LONGEST_PAUSE_S: Final = 60.0
FORGOTTEN_S: Final = 600.0  # after its pause an engine that nobody asks any more is forgotten
T = TypeVar("T")

TOKENIZE_PATH: Final = "/tokenize"
MAX_TRIES: Final = 2  # engines that are asked for one prompt
NEARLY: Final = 0.9
"""An answer that failed after so much of its time was late: timers have ticks, and may be early."""
TRIAL_S: Final = 5.0  # for an answer that no request waits for
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


def patience_s(prompt_bytes: int) -> float:
    """How long a request waits for the token ids of its prompt."""
    return min(MOST_S, LEAST_S + prompt_bytes / BYTES_PER_S)


@dataclass(slots=True)
class _Late:
    pause: BackOff = field(default_factory=lambda: BackOff(FIRST_PAUSE_S, LONGEST_PAUSE_S))
    on_trial: bool = False


class QuickEngines:
    """Remembers who was late. A trial is due after each pause, which doubles while trials fail."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._late: dict[str, _Late] = {}  # by address

    def of(self, engines: Sequence[Engine]) -> Sequence[Engine]:
        """Those of `engines` that can be waited for."""
        if not self._late:
            return engines
        return [engine for engine in engines if engine.address not in self._late]

    def trial(self, engines: Sequence[Engine]) -> Engine | None:
        """One of `engines` whose pause is over: it is to be asked now, and not waited for."""
        for engine in engines if self._late else ():
            late = self._late.get(engine.address)
            if late is not None and not late.on_trial and not late.pause.remaining_s(self._clock()):
                late.on_trial = True
                return engine
        return None

    def was_late(self, engine: Engine) -> bool:
        """It did not answer in time; returns whether it usually did."""
        late, now = self._late.get(engine.address), self._clock()
        if late is not None and not late.on_trial:
            return False  # it was asked before
        if late is None:
            known = self._late.items()
            self._late = {a: o for a, o in known if o.pause.retry_at + FORGOTTEN_S > now}
        new = self._late.setdefault(engine.address, _Late())
        new.on_trial = False
        new.pause.failed(now)
        return late is None

    def was_quick(self, engine: Engine) -> bool:
        """It answered in time, or refused; returns whether it had been late."""
        late = self._late.get(engine.address)
        if late is None or not late.on_trial:
            return False  # its latest word counts: it was late since it was asked this
        del self._late[engine.address]
        return True


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


@dataclass(eq=False)
class TokenSource:
    """Finds the token ids of prompts; caches the latest.

    `post` sends a body to an engine's path and returns the body of its 200, within so many seconds;
    it raises OSError or ValueError otherwise.
    """

    post: Post
    local: LocalTokenizer | None = None  # for texts, once an engine's ids were found to be the same
    max_bytes: int = CACHED_BYTES  # bound of the cache
    patience: Callable[[int], float] = patience_s  # seconds of a request, by its prompt's bytes
    clock: Callable[[], float] = time.monotonic  # seconds, monotonic
    counts: Counter[str] = field(default_factory=Counter, init=False)
    """cache_hits, local, engine, failed, late; each only grows."""

    def __post_init__(self) -> None:
        self._quick = QuickEngines(self.clock)
        self._turn = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._encoding: dict[bytes, asyncio.Task[PromptTokens]] = {}  # by key of the prompt
        self._agrees: dict[str, bool] = {}  # by model: whether the local tokenizer is the engines'
        most = self.max_bytes
        self._cache: ByteCache[bytes, PromptTokens] = ByteCache(most, most // 16, _size)
        self._threads: ThreadPoolExecutor | None = None

    @property
    def use(self) -> CacheUse:
        """Number of cached prompts, and their memory."""
        return self._cache.use

    async def tokens(
        self,
        engines: Sequence[Engine],
        model: str,
        body: bytes,
        text: str | None,
        salt: str | None = None,
    ) -> PromptTokens | None:
        """Token ids of a prompt; None: unknown, or not in time.

        Args:
            engines: serve `model`; `MAX_TRIES` of them are asked at most.
            model: its name.
            body: of POST /tokenize, from the engine's family; also the cache's key.
            text: the prompt, if it is plain text with the default special tokens.
            salt: prompts of other salts are not looked up: the time would tell that they are known.
        """
        name = blake2b(body, digest_size=16)
        if salt is not None:
            name.update(b"\0" + salt.encode())  # no JSON ends so
        key = name.digest()
        found = self._cache.get(key)
        if found is not None:
            self.counts["cache_hits"] += 1
            return found
        if text is not None and self.local is not None and await self._trusted(engines, model):
            return await self._encode(self.local, key, text)
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
        if agrees is None and self.local is not None:
            trial = orjson.dumps({"model": model, "prompt": TRIAL_TEXT})
            theirs = self._cache.get(trial) or await self._ask(engines, trial, trial)
            if theirs is None:
                return False
            agrees = theirs.ids == self.local.encode(TRIAL_TEXT).tobytes()
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
        task = self._encoding.get(key)
        if task is None and len(self._encoding) < MAX_ENCODING:
            task = self._encoding[key] = self._begin(self._in_thread(local, key, text))
        if task is not None:
            await asyncio.wait({task}, timeout=self.patience(len(text)))
        found = task.result() if task is not None and task.done() else None
        self.counts["local" if found is not None else "late"] += 1
        return found

    async def _in_thread(self, local: LocalTokenizer, key: bytes, text: str) -> PromptTokens:
        if self._threads is None:
            # Fewer than cores, so that the event loop keeps one.
            workers = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) - 1))
            self._threads = ThreadPoolExecutor(workers, thread_name_prefix="tokenise")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, _encode, local, text)
        finally:
            del self._encoding[key]
        return self._remember(key, found)

    async def _ask(
        self,
        engines: Sequence[Engine],
        body: bytes,
        key: bytes | None,
        path: str = TOKENIZE_PATH,
        member: str = "tokens",
    ) -> PromptTokens | None:
        """The ids that an engine tells in time, or another one after half of that."""
        wait_s, question = self.patience(len(body)), (path, body, key, member)
        trial = self._quick.trial(engines)
        if trial is not None:
            self._begin(self._try(trial, question, wait_s))
        quick = self._quick.of(engines)
        self._turn += 1
        tries = min(MAX_TRIES, len(quick))
        for at in range(tries):
            engine, begun_s = quick[(self._turn + at) % len(quick)], self.clock()
            found = await self._answer(engine, question, wait_s / tries)
            if found is not None or self.clock() - begun_s < NEARLY * wait_s / tries:
                self.counts["engine" if found is not None else "failed"] += 1
                return found
            self._was_late(engine, question, wait_s / tries)
        self.counts["late"] += 1
        return None

    async def _answer(
        self, engine: Engine, question: _Question, wait_s: float
    ) -> PromptTokens | None:
        """What one engine answers within that time."""
        path, body, key, member = question
        try:
            found = _read(await self.post(engine, path, body, wait_s), member)
        except (OSError, ValueError) as error:
            log.debug("%s does not tokenise: %s", engine.address, error)
            return None
        return self._remember(key, found)

    def _was_late(self, engine: Engine, question: _Question, wait_s: float) -> None:
        if self._quick.was_late(engine):
            log.warning(
                "%s took more than %.1f s to tokenise: requests go on without its answers, and "
                "without the blocks that they would find; it is tried again with growing pauses",
                engine.address,
                wait_s,
            )
            self._begin(self._try(engine, question, wait_s))

    async def _try(self, engine: Engine, question: _Question, wait_s: float) -> None:
        """Ask an engine that was late; its answer is for the next request with that prompt."""
        begun_s = self.clock()
        await self._answer(engine, question, TRIAL_S)
        if self.clock() - begun_s >= wait_s:
            self._quick.was_late(engine)
        elif self._quick.was_quick(engine):
            log.info("%s tokenises in time again", engine.address)

    def _begin(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        """Have something done for which nobody may wait."""
        task = asyncio.create_task(work, name="tokenise")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio complains where nobody waited

    def _remember(self, key: bytes | None, found: PromptTokens) -> PromptTokens:
        if key is not None:
            self._cache.put(key, found)
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

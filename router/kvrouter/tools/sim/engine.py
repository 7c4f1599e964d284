"""One simulated engine: its cache, its memory, its queue. Serves no HTTP.

`admit` looks up the cache, reserves slots, and returns a `Generation`.

`LatencyModel` says how long it takes: it returns seconds, and the engine waits. The model is that
of llm-d-inference-sim (docs/latency-simulation.md): a constant for a prefill or a sum over its
tokens, a separate time for loaded KV, a normal distribution within 70 % of the mean, and a factor
that grows with the number of running requests.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from operator import attrgetter
from random import Random
from typing import TYPE_CHECKING

from kvrouter.errors import ApiError
from kvrouter.tools.sim.answers import SimAnswer
from kvrouter.tools.sim.block_cache import Allocation, BlockCache, Cleared, Event, Removed, Stored
from kvrouter.tools.sim.generation import Generation
from kvrouter.tools.sim.kv_bytes import KVMemory
from kvrouter.tools.sim.metrics import SimMetrics
from kvrouter.tools.sim.store_link import SimStoreLink
from kvrouter.tools.sim.tokenizer import SimTokenizer
from kvrouter_store.identity.chain import hash_tokens

if TYPE_CHECKING:
    from kvrouter.tools.sim.requests import GenerateRequest
    from kvrouter.tools.sim.settings import SimSettings

_WIDEST = 0.7
Publish = Callable[[list[Event]], None]
_COPY_THREADS = 4


class LatencyModel:
    """Times in seconds, from the flags. The random generator is the only state."""

    def __init__(self, settings: SimSettings) -> None:
        self._settings = settings
        self._random = Random(time.time_ns() if settings.seed is None else settings.seed)

    def transfer(self, loaded_tokens: int, running: int) -> float:
        """Seconds that a load of `loaded_tokens` from the store takes."""
        if loaded_tokens == 0:
            return 0.0
        settings = self._settings
        constant_s = settings.kv_cache_transfer_latency
        if constant_s > 0:
            return self._drawn(constant_s, settings.kv_cache_transfer_latency_std_dev, running)
        mean_s = settings.kv_cache_transfer_time_per_token * loaded_tokens
        return self._drawn(mean_s, settings.kv_cache_transfer_time_std_dev, running)

    def prefill(self, computed_tokens: int, loaded_tokens: int, running: int) -> float:
        """Seconds that computing `computed_tokens` takes.

        If KV was loaded, the time of the load replaces a constant --time-to-first-token. A time per
        token counts what is computed nevertheless.
        """
        settings = self._settings
        constant_s = settings.time_to_first_token
        if constant_s > 0:
            spread_s = settings.time_to_first_token_std_dev
            return 0.0 if loaded_tokens else self._drawn(constant_s, spread_s, running)
        mean_s = settings.prefill_overhead + settings.prefill_time_per_token * computed_tokens
        return self._drawn(mean_s, settings.prefill_time_std_dev, running)

    def next_token(self, running: int) -> float:
        """Seconds until the next token of an answer."""
        mean_s = self._settings.inter_token_latency
        return self._drawn(mean_s, self._settings.inter_token_latency_std_dev, running)

    def load_factor(self, running: int) -> float:
        """1 with a single request, --time-factor-under-load with --max-num-seqs requests."""
        most, factor = self._settings.max_num_seqs, self._settings.time_factor_under_load
        if factor == 1.0 or most < 2:
            return 1.0
        share = (min(running, most) - 1) / (most - 1)
        return 1.0 + (factor - 1.0) * max(share, 0.0)

    def _drawn(self, mean_s: float, spread_s: float, running: int) -> float:
        drawn_s = mean_s
        if spread_s > 0 and mean_s > 0:
            drawn_s = self._random.gauss(mean_s, spread_s)
            drawn_s = min(max(drawn_s, mean_s * (1 - _WIDEST)), mean_s * (1 + _WIDEST))
        return drawn_s * self.load_factor(running)


class Steps:
    """Chunks of prompts that are computed one after the other, each in a step, as in vLLM."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[float, float]] = deque()

    def begin(self, now_s: float, seconds: float) -> float:
        """Compute a chunk of so many seconds after the earlier ones; the time when it is done."""
        while self._chunks and self._chunks[0][1] <= now_s:
            self._chunks.popleft()
        begin_s = self._chunks[-1][1] if self._chunks else now_s
        self._chunks.append((begin_s, begin_s + seconds))
        return begin_s + seconds

    def token_at(self, due_s: float) -> float:
        """When a token is ready that is due then: at the end of a chunk that is being computed."""
        for begin_s, end_s in self._chunks:
            if begin_s < due_s < end_s:
                return end_s
        return due_s


@dataclass(eq=False)
class _Waiter:
    hashes: Sequence[bytes]
    blocks: int
    admitted: asyncio.Future[Allocation]
    priority: int


@dataclass(eq=False)
class SimAdmission:
    """Hands out the slots of a cache to at most `max_running` requests at a time."""

    cache: BlockCache
    max_running: int
    max_waiting: int

    def __post_init__(self) -> None:
        self._waiters: list[_Waiter] = []
        self.running = 0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiters)

    async def enter(self, hashes: Sequence[bytes], blocks: int, priority: int = 0) -> Allocation:
        """The slots of a request, once there is room; pair it with `leave`.

        The lowest `priority` is next, and of equals the oldest. ApiError 429, at once: too many
        wait. A cancelled caller leaves the queue.
        """
        admitted = asyncio.get_running_loop().create_future()
        waiter = _Waiter(hashes, blocks, admitted, priority)
        insort(self._waiters, waiter, key=attrgetter("priority"))
        self._pump()
        if not admitted.done() and len(self._waiters) > self.max_waiting:
            self._waiters.remove(waiter)
            full = "Too many requests wait."
            raise ApiError(429, full, kind="TooManyRequestsError", retry_after_s=1)
        try:
            return await waiter.admitted
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._pump()
            elif waiter.admitted.done() and not waiter.admitted.cancelled():
                self.leave(waiter.admitted.result())
            raise

    def leave(self, allocation: Allocation) -> None:
        """End a request: its slots are free for the next ones."""
        self.cache.release(allocation)
        self.running -= 1
        self._pump()

    def _pump(self) -> None:
        while self._waiters and self.running < self.max_running:
            head = self._waiters[0]
            if not head.admitted.cancelled():
                allocation = self.cache.allocate(head.hashes, head.blocks)
                if allocation is None:
                    return
                self.running += 1
                head.admitted.set_result(allocation)
            del self._waiters[0]


class SimEngine:
    """Owns the slots and the threads that copy to and from them. `close` after the last request."""

    def __init__(
        self, settings: SimSettings, *, name: str = "", publish: Publish = lambda events: None
    ) -> None:
        self.settings = settings
        self.saves_prompts = settings.role != "decode"  # as vLLM's kv_producer and kv_both
        self.saves_answers = settings.role == "both"  # as kv_both
        self.root = settings.root
        self.manifest = settings.manifest
        self.spec_digest = self.manifest.spec.digest
        self.tokenizer = SimTokenizer()
        shape = settings.block_size, settings.kv_cache_size
        self.metrics = SimMetrics(settings.served_names[0], *shape)
        self.latency = LatencyModel(settings)
        self.steps = Steps() if settings.shared_steps else None
        self.memory = KVMemory(self.spec_digest, settings.kv_cache_size, settings.block_bytes)
        self.cache = BlockCache(settings.kv_cache_size)
        self.host = BlockCache(int(settings.kv_offloading_size * 2**30) // settings.block_bytes)
        self.executor = ThreadPoolExecutor(_COPY_THREADS, "kvsim-copy")
        self.core = asyncio.Event()  # not set while the engine computes nothing
        self.core.set()
        self.link = SimStoreLink(self, settings.store, name) if settings.store else None
        self.sources = settings.store_sources
        self._publish = publish
        self.admission = SimAdmission(
            self.cache, settings.max_num_seqs, settings.max_waiting_queue_length
        )
        self.metrics.running.set_function(lambda: self.admission.running)
        self.metrics.waiting.set_function(lambda: self.admission.waiting)
        self.metrics.cache_usage.set_function(lambda: self.cache.held_blocks / self.cache.capacity)

    @property
    def running(self) -> int:
        """How many requests run."""
        return self.admission.running

    async def start(self) -> None:
        """Register this engine with the store."""
        if self.link is not None:
            await self.link.register()

    async def admit(self, request: GenerateRequest) -> Generation:
        """Wait for room, then give one choice its slots. The caller closes the generation.

        ApiError 429: too many requests wait.
        """
        arrived_s = time.monotonic()
        form = request.form
        function, text = form.draw(request.prompt, request.seed) if form else ("", "")
        given = self.tokenizer.encode(text) if text else []
        block_tokens = self.settings.block_size
        tokens, salt = array("I", request.prompt), request.cache_salt
        named = partial(hash_tokens, tokens, block_tokens, root=self.root, lora=request.adapter)
        hashes = named(cache_salt=salt)
        contents = hashes if salt is None else named()
        answer_tokens = self._answer_tokens(request, len(given))
        usable = (len(tokens) - 1) // block_tokens
        blocks = -(-(len(tokens) + answer_tokens) // block_tokens)
        priority = request.priority if self.settings.scheduling_policy == "priority" else 0
        allocation = await self.admission.enter(list(hashes[:usable]), blocks, priority)
        answer = SimAnswer(request, allocation.cached_blocks * block_tokens, None)
        answer.function, answer.given = function, given
        by_itself = request.max_tokens is None and not request.ignore_eos
        if answer_tokens == len(given) or (by_itself and not given):
            answer.finish_reason = "stop"
        return Generation(
            self, answer, hashes, contents, allocation, left=answer_tokens, arrived_s=arrived_s
        )

    async def until(self, due_s: float) -> None:
        """Wait until `due_s` of the monotonic clock, and while `core` is not set: then it hangs."""
        await asyncio.sleep(max(due_s - time.monotonic(), 0.0))
        await self.core.wait()

    def publish(self, events: list[Event]) -> None:
        """Publish what the cache gained, and what it evicted for that."""
        removed = self.cache.take_removed()
        if removed:
            events = [Removed(removed), *events]
        if events:
            self._publish(events)

    def offload(self, hashes: Sequence[bytes]) -> None:
        """Copy a request's blocks to host memory, if it has room; vLLM's events only name them."""
        allocation = self.host.allocate(hashes, len(hashes))
        if allocation is not None:
            new = [one for at, one in enumerate(hashes) if self.host.name(allocation, at, one)]
            self.host.release(allocation)
            gone = self.host.take_removed()
            events: list[Event] = [Removed(gone, "CPU")] if gone else []
            self._publish([*events, *(Stored(None, (one,), (), medium="CPU") for one in new)])

    def reset_cache(self) -> None:
        """Forget every block that no request holds."""
        self.cache.clear()
        removed = self.cache.take_removed()
        if self.cache.held_blocks:
            self._publish([Removed(removed)] if removed else [])
        else:
            self._publish([Cleared()])

    async def close(self) -> None:
        """Close the connection to the store and the threads."""
        if self.link is not None:
            await self.link.close()
        self.executor.shutdown()

    def _answer_tokens(self, request: GenerateRequest, given: int) -> int:
        """The number given or asked for; else one that a model which stops by itself might have."""
        room = self.settings.context_tokens - len(request.prompt)
        if given:
            return min(given, room, request.max_tokens or room)
        if request.max_tokens is not None:
            return min(request.max_tokens, room)
        if request.ignore_eos:
            return room
        number = sha256(array("I", request.prompt).tobytes()).digest()[0]
        return min(32 + number % 64, room)

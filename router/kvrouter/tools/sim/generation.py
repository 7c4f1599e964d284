"""One request of a simulated engine, from its slots to its last token. Knows no HTTP.

The order is that of vLLM with a KV connector: use the engine's own blocks, load blocks of the
store, compute the rest in steps and save their blocks, then generate one token after the other.
"""

import time
from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvrouter.tools.sim.block_cache import Allocation, Stored
from kvrouter.tools.sim.kv_bytes import KVContext
from kvrouter.tools.sim.store_link import in_thread
from kvrouter_store.identity.chain import BlockHashes, hash_tokens

if TYPE_CHECKING:
    from kvrouter.tools.sim.answers import SimAnswer
    from kvrouter.tools.sim.engine import SimEngine


@dataclass(eq=False)
class Generation:
    """Call `prefill` once, `next_token` until `done`, and `close` in any case."""

    engine: "SimEngine"
    answer: "SimAnswer"  # to the request; grows with each token
    hashes: BlockHashes  # names of the full blocks: those of the prompt, then of the answer
    contents: BlockHashes  # names without the salt, on which the KV does not depend
    allocation: Allocation  # the slots, until `close`
    left: int  # tokens that are still to be generated
    arrived_s: float

    def __post_init__(self) -> None:
        self._admitted_s = time.monotonic()
        self._first_token_s = 0.0
        self._last_token_s = 0.0
        self._due_s = 0.0
        self._context = KVContext(self.engine.spec_digest)
        self._block_tokens = self.engine.settings.block_size
        self._request, self._tokens = self.answer.request, [*self.answer.request.prompt]
        self._usable = (len(self._tokens) - 1) // self._block_tokens  # one token is computed
        self._stored_blocks = 0
        self._finished = False

    @property
    def done(self) -> bool:
        """Whether the last token was generated."""
        return self.left == 0

    @property
    def _tail(self) -> list[int]:
        """The tokens after the full blocks."""
        return self._tokens[len(self.hashes) * self._block_tokens :]

    async def prefill(self) -> None:
        """Load or compute the KV of the prompt, and save what was computed."""
        engine = self.engine
        local = self.allocation.cached_blocks
        loaded = await self._load_offloaded(local)
        loaded += await self._load(local + loaded)
        held = local + loaded
        self.answer.cached_tokens = held * self._block_tokens
        await self._compute(held, loaded)
        await in_thread(engine.executor, self._attend)
        self._count_prompt(local, loaded)
        if engine.link is not None:
            self.answer.kv_transfer_params = {
                "kvstore": {
                    "manifest": engine.manifest.digest.hex(),
                    "blocks": self._stored_blocks,
                    "block_tokens": self._block_tokens,
                    "root": engine.root.hex(),
                    **({"node": engine.link.node} if engine.link.node else {}),
                }
            }
        engine.metrics.prefill_time.observe(time.monotonic() - self._admitted_s)

    async def next_token(self) -> tuple[int, str]:
        """The next token and its text, when it is due."""
        engine = self.engine
        if self.answer.tokens:
            pause_s = engine.latency.next_token(engine.running)
            due_s = self._due_s + pause_s
            await engine.until(due_s)
            if engine.steps is not None:
                due_s = engine.steps.token_at(due_s)
                await engine.until(due_s)
            now_s = time.monotonic()
            engine.metrics.between_tokens.observe(now_s - self._last_token_s)
            self._due_s = max(due_s, now_s - pause_s)
        else:
            self._first_token_s = self._due_s = now_s = time.monotonic()
            engine.metrics.first_token.observe(now_s - self.arrived_s)
        self._last_token_s = now_s
        number = self._context.next_number(self._tail, self._request.seed)
        given = self.answer.given
        token = given[len(self.answer.tokens)] if given else engine.tokenizer.syllable(number)
        text = engine.tokenizer.decode((token,))
        self.answer.tokens.append(token)
        self.answer.text += text
        self.left -= 1
        engine.metrics.generation_tokens.inc()
        if self.left:
            await self._extend(token)
        else:
            engine.offload(self.hashes)
            self._finish(self.answer.finish_reason)
        return token, text

    def close(self) -> None:
        """Free the slots; counts as aborted if tokens are left."""
        if not self._finished:
            self._finish("abort")
        self.engine.admission.leave(self.allocation)

    async def _load_offloaded(self, local: int) -> int:
        """Load blocks after the `local` ones from host memory; how many."""
        engine, began_s = self.engine, time.monotonic()
        loaded = engine.host.matched(self.hashes[local : self._usable])
        if loaded:
            seconds = engine.latency.transfer(loaded * self._block_tokens, engine.running)
            await engine.until(began_s + seconds)
            await self._compute_blocks(local, local + loaded)  # the same bytes
        return loaded

    async def _load(self, local: int) -> int:
        """Load blocks after the `local` ones from the store; how many.

        First from the engine's own node, then from the one that the request names.
        """
        engine, usable = self.engine, self._usable
        if engine.link is None or not (usable > local or engine.saves_prompts):
            return 0
        engine.metrics.external_queries.inc((usable - local) * self._block_tokens)
        began_s = time.monotonic()
        stored, loaded = await self._load_from("", local)
        self._stored_blocks = min(stored, local + loaded)
        source = engine.sources.url(self._request.source)
        if source and local + loaded < usable:
            loaded += (await self._load_from(source, local + loaded))[1]
        if not loaded:
            return 0
        seconds = engine.latency.transfer(loaded * self._block_tokens, engine.running)
        await engine.until(began_s + seconds)
        self._name(local, local + loaded)
        return loaded

    async def _load_from(self, node: str, first: int) -> tuple[int, int]:
        """Load blocks from `first` on; how many leading ones the node has, and how many came."""
        link, usable = self.engine.link, self._usable
        assert link is not None
        hashes, contents = self.hashes[:usable], self.contents[:usable]
        there = min(await link.match(hashes, node), usable)
        if there <= first:
            return there, 0
        slots = self.allocation.slots[first:there]
        return there, await link.load(hashes, first, slots, contents, node)

    async def _compute(self, held: int, loaded: int) -> None:
        """Compute the prompt from block `held` on, step by step, and save each step's blocks.

        Also saves blocks that the engine held and the store did not.
        """
        engine, size = self.engine, self._block_tokens
        first, end = held * size, len(self._tokens)
        seconds = engine.latency.prefill(end - first, loaded * size, engine.running)
        began_s = time.monotonic()
        step = max(engine.settings.max_num_batched_tokens, size)
        done, saving = held, engine.saves_prompts
        for begin in range(first, end, step):
            stop = min(begin + step, end)
            ready = stop // size
            if ready > done:
                await self._compute_blocks(done, ready)
                done = ready
            if saving and done > self._stored_blocks:
                saving = await self._save(done)
            if engine.steps is None:
                await engine.until(began_s + seconds * (stop - first) / (end - first))
            else:
                chunk_s = seconds * (stop - begin) / (end - first)
                await engine.until(engine.steps.begin(time.monotonic(), chunk_s))

    async def _compute_blocks(self, first: int, end: int) -> None:
        slots = self.allocation.slots[first:end]
        contents = list(self.contents[first:end])
        engine = self.engine
        await in_thread(engine.executor, lambda: engine.memory.compute(slots, contents))
        self._name(first, end)

    async def _save(self, end: int) -> bool:
        """Put what the store lacks of the first `end` blocks; False if it did not take all.

        Blocks after a gap would be useless.
        """
        link, first = self.engine.link, self._stored_blocks
        if link is None:
            return False
        slots = self.allocation.slots[first:end]
        self._stored_blocks += await link.save(self.hashes, first, slots)
        return self._stored_blocks == end

    def _name(self, first: int, end: int) -> None:
        """Let later requests use blocks first..end, and publish them."""
        size, names = self._block_tokens, list(self.hashes[first:end])
        new = [
            self.engine.cache.name(self.allocation, first + at, one) for at, one in enumerate(names)
        ]
        if any(new):
            parent = self.hashes[first - 1] if first else None
            tokens = tuple(self._tokens[first * size : end * size])
            salt, adapter = self._request.cache_salt, self._request.adapter
            self.engine.publish([Stored(parent, tuple(names), tokens, salt, adapter)])

    def _attend(self) -> None:
        """Read the KV of every full block of the prompt as the engine holds it."""
        for slot in self.allocation.slots[: len(self.hashes)]:
            self._context.add_block(self.engine.memory.slot(slot))

    async def _extend(self, token: int) -> None:
        """Add a token of the answer; computes the KV of a block when that is full."""
        self._tokens.append(token)
        if len(self._tokens) % self._block_tokens:
            return
        engine, index, lora = self.engine, len(self.hashes), self._request.adapter
        tail, size = array("I", self._tail), self._block_tokens
        named = partial(hash_tokens, tail, size, root=engine.root, lora=lora)
        if index:
            name, content = named(parent=self.hashes[-1]), named(parent=self.contents[-1])
        else:
            name, content = named(cache_salt=self._request.cache_salt), named()
        self.hashes = BlockHashes(self.hashes.data + name.data)
        self.contents = BlockHashes(self.contents.data + content.data)
        slot = self.allocation.slots[index]
        engine.memory.compute([slot], [self.contents[index]])
        self._name(index, index + 1)
        self._context.add_block(engine.memory.slot(slot))
        if engine.link is not None and engine.saves_answers:
            await engine.link.save(self.hashes, index, [slot])

    def _count_prompt(self, local: int, loaded: int) -> None:
        metrics, size, whole = self.engine.metrics, self._block_tokens, len(self._tokens)
        metrics.prompt_tokens.inc(whole)
        metrics.prefix_queries.inc(whole)
        metrics.prefix_hits.inc(local * size)
        metrics.external_hits.inc(loaded * size)
        metrics.local_tokens.inc(local * size)
        metrics.loaded_tokens.inc(loaded * size)
        metrics.computed_tokens.inc(whole - (local + loaded) * size)
        metrics.queue_time.observe(self._admitted_s - self.arrived_s)

    def _finish(self, reason: str) -> None:
        self._finished = True
        metrics = self.engine.metrics
        metrics.finished[reason].inc()
        now_s = time.monotonic()
        metrics.whole_request.observe(now_s - self.arrived_s)
        if self.answer.tokens:
            metrics.decode_time.observe(now_s - self._first_token_s)

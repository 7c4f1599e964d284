"""The router's index after a million blocks of faulty KV events, compared with the engines' caches.

    python -m benchmarks.kv_events [--quick] [--blocks N] [--json FILE]

Engines behave like vLLM's scheduler: prompts share prefixes, the cache has a fixed size, the oldest
leaves are evicted first; messages have vLLM's format. Messages get lost, are repeated, and overtake
each other; engines and the router restart; replays have gaps. At the end the index must hold
exactly the blocks of the engines. A router that restarted after more messages than publishers keep
reports "late", because it cannot know these; it is right once the older blocks are evicted. Then
the same messages are sent without faults, to measure the speed. Exit status 1 if the index is
wrong.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections import Counter, OrderedDict, deque
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.arguments import parser_of
from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.engines.pool import EnginePool
from kvrouter.prefix.events.confidence import Reason
from kvrouter.prefix.events.tracker import CacheTracker
from kvrouter.prefix.index import PrefixIndex, block_ids
from kvrouter_store.identity.chain import hash_tokens, root_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 16
ENGINES = 4
KEPT = 10_000
"""vLLM's buffer_steps."""

Message = tuple[int, bytes]


class SimEngine:
    """One engine's cache and its publisher."""

    def __init__(self, number: int, capacity: int, random: Random) -> None:
        self.address = f"127.0.0.1:{number + 1}"
        self._capacity = capacity
        self._random = random
        self._encoder = msgspec.msgpack.Encoder()
        self._clock = 0.0
        self.latest: list[int] = []
        self.stored = self.removed = 0
        self.restart()

    def restart(self) -> None:
        """Lose all blocks, and count messages from 0."""
        self.held: OrderedDict[int, None] = OrderedDict()
        self.kept: deque[Message] = deque(maxlen=KEPT)
        self._next = 0

    def step(self) -> Message:
        """Compute a prompt: store its blocks, evict others."""
        prefix = self._random.randrange(64)
        tokens = [prefix] * BLOCK_TOKENS + [
            self._random.randrange(1 << 17) for _ in range((PROMPT_BLOCKS - 1) * BLOCK_TOKENS)
        ]
        hashes = hash_tokens(tokens, BLOCK_TOKENS, root=root_hash(None)).data
        ids = list(block_ids(hashes))
        new = [each for each in ids if each not in self.held]
        self.latest = ids
        events: list[dict[str, Any]] = []
        surplus = len(self.held) + len(new) - self._capacity
        gone = [self.held.popitem(last=False)[0] for _ in range(max(surplus, 0))]
        if gone:
            events.append(
                {"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU", "group_idx": 0}
            )
        first = len(ids) - len(new)
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": new,
                "parent_block_hash": ids[first - 1] if first else None,
                "token_ids": tokens[first * BLOCK_TOKENS :],
                "block_size": BLOCK_TOKENS,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * len(new),
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
        self.held.update(dict.fromkeys(new))
        self.stored, self.removed = self.stored + len(new), self.removed + len(gone)
        return self._message(events)

    def _message(self, events: Sequence[dict[str, Any]]) -> Message:
        self._clock += 1.0
        message = (self._next, self._encoder.encode([self._clock, events, 0]))
        self._next += 1
        self.kept.append(message)
        return message


class Replays:
    """Answers like a publisher; sometimes ZMQ drops some of many answers."""

    def __init__(self, engines: dict[str, SimEngine], random: Random) -> None:
        self._engines = engines
        self._random = random
        self._asked: dict[str, tuple[Engine, int]] = {}
        self.asked = 0

    def ask(self, server: Engine, rank: int, start: int) -> bool:
        """Remember a request for a replay; it replaces an earlier one."""
        del rank
        self._asked[server.address] = (server, start)
        self.asked += 1
        return True

    def answer(self, tracker: CacheTracker) -> None:
        """Answer all requests."""
        while self._asked:
            address, (server, start) = self._asked.popitem()
            messages = [each for each in self._engines[address].kept if each[0] >= start]
            hole = self._random.randrange(1, 50) if self._random.random() < 0.2 else 0
            for place, (number, payload) in enumerate(messages):
                if not hole or place % 50 != hole or place == len(messages) - 1:
                    tracker.replayed(server, 0, number, payload)
                if address in self._asked:
                    break
            else:
                tracker.replay_ended(server, 0)


class Router:
    """The part of a router that is measured."""

    def __init__(self, engines: dict[str, SimEngine], blocks: int, random: Random) -> None:
        self.now = 0.0
        self.pool = EnginePool(lambda: self.now)
        self.index = PrefixIndex(blocks)
        self.replays = Replays(engines, random)
        self.tracker = CacheTracker(
            self.index, self.pool.find, self.pool.domain_of, clock=lambda: self.now
        )
        self.tracker.replay_with(self.replays)
        self.pool.on_leave(self.index.clear)
        self.pool.on_join(self.tracker.engine_joined)
        self.pool.on_leave(self.tracker.engine_left)
        for address in engines:
            engine = self.pool.add(address, Role.PREFILL)
            self.pool.join(engine, Identity(("m",), None, BLOCK_TOKENS))
        self.replays.answer(self.tracker)

    def receive(self, engine: SimEngine, message: Message) -> None:
        """Receive a message, as from the socket."""
        number, payload = message
        self.tracker.receive([b"kv@" + engine.address.encode(), struct.pack(">Q", number), payload])

    def tick(self) -> None:
        """Let a tenth of a second pass."""
        self.now += 0.1
        self.tracker.tick()
        self.replays.answer(self.tracker)
        self.index.sweep()


def wrong(router: Router, engines: dict[str, SimEngine], ever: Sequence[int]) -> int:
    """Blocks that only the index has, and blocks that only an engine has."""
    found = 0
    held = {router.pool.find(a): engine.held for a, engine in engines.items()}
    for block in ever:
        claimed = router.index.match(bytes(24) + block.to_bytes(8, "big"))
        found += sum((e in claimed) != (block in blocks) for e, blocks in held.items())
    return found


def on_the_way(waiting: list[Message], happened: dict[str, int], random: Random) -> bool:
    """Apply faults to the waiting messages; whether they arrive now."""
    chance = random.random()
    if chance < 0.02:
        waiting.pop()
        happened["lost"] += 1
    elif chance < 0.04:
        waiting.append(waiting[-1])
        happened["repeated"] += 1
    elif chance < 0.06:
        happened["overtaken"] += 1
        return False
    return True


def storm(blocks: int, random: Random) -> dict[str, Any]:
    """Store `blocks` blocks with all faults, then compare."""
    capacity = blocks // ENGINES // 5
    made = [SimEngine(number, capacity, random) for number in range(ENGINES)]
    engines = {engine.address: engine for engine in made}
    router = Router(engines, blocks, random)
    counts: Counter[str] = Counter()
    kept: dict[str, list[Message]] = {address: [] for address in engines}
    ever: set[int] = set()
    happened = dict.fromkeys(("messages", "lost", "repeated", "overtaken", "restarts"), 0)
    happened["router_restarts"] = 0
    listed = list(engines.values())
    while sum(engine.stored for engine in listed) < blocks:
        happened["messages"] += 1
        engine = random.choice(listed)
        waiting = kept[engine.address]
        waiting.append(engine.step())
        ever.update(engine.latest)
        if not on_the_way(waiting, happened, random):
            continue  # overtaken by the next one
        for message in reversed(waiting):
            router.receive(engine, message)
        waiting.clear()
        if happened["messages"] % 50 == 0:
            router.tick()
        chance = random.random()
        if chance > 1 - 4 * ENGINES / (blocks / PROMPT_BLOCKS):
            engine.restart()
            happened["restarts"] += 1
        elif chance > 1 - 6 * ENGINES / (blocks / PROMPT_BLOCKS):
            happened["router_restarts"] += 1
            counts += router.tracker.counts
            router = Router(engines, blocks, random)
    for engine in listed * 2:  # what was lost last is noticed by what follows
        message = engine.step()
        ever.update(engine.held)
        router.receive(engine, message)
        router.tick()
    counts += router.tracker.counts
    states = {str(router.tracker.confidence(engine)) for engine in router.pool.all()}
    return {
        **happened,
        **{kind: counts[kind] for kind in ("gaps", "replayed", "duplicates")},
        "stored": sum(engine.stored for engine in listed),
        "removed": sum(engine.removed for engine in listed),
        "held": sum(len(engine.held) for engine in listed),
        "states": sorted(states),
        "wrong": wrong(router, engines, sorted(ever)),
    }


def pace(blocks: int, random: Random) -> dict[str, Any]:
    """Messages per second on one core, and bytes per block of a full index."""
    engine = SimEngine(0, blocks // 2, random)
    router = Router({engine.address: engine}, blocks, random)
    messages: list[Message] = []
    while engine.stored < blocks:
        messages.append(engine.step())
    frames = [
        [b"kv@" + engine.address.encode(), struct.pack(">Q", n), payload] for n, payload in messages
    ]
    begun = time.perf_counter()
    for each in frames:
        router.tracker.receive(each)
    took_s = time.perf_counter() - begun
    moved = engine.stored + engine.removed
    return {
        "messages_per_s": round(len(frames) / took_s),
        "events_per_s": round(router.tracker.counts["events"] / took_s),
        "blocks_per_s": round(moved / took_s),
        "us_per_message": round(took_s / len(frames) * 1e6, 2),
        "bytes_per_block": round(router.index.memory_bytes / blocks, 1),
        "exact": router.tracker.confidence(router.pool.all()[0]) is Reason.COMPLETE,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run, print, compare."""
    parser = parser_of("benchmarks.kv_events", __doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="100,000 blocks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    blocks = 100_000 if options.quick else options.blocks
    figures = {"storm": storm(blocks, Random(options.seed)), "pace": pace(blocks, Random(2))}
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    good = figures["storm"]["wrong"] == 0
    print("the index is equal to the truth" if good else "THE INDEX IS NOT EQUAL TO THE TRUTH")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""vLLM's real TieringOffloadingSpec over one secondary tier; run by the vLLM environment's python.

tiering.py SOCKET: forks a process for each connection there, since importing vLLM takes long. Its
first line is a JSON list, the process's arguments TIER_JSON STORY...: the tier's entry of
"secondary_tiers", and what to do with it, in order. The process prints a JSON object of story to
finding into the connection; the test that runs this says what each must be.
There is no device: the stories write to and read from vLLM's host memory as its workers would.
Where it is told "pause", it waits for the end of what the connection brings. "STORY URL" tells a
story in which each request names the store node that has its KV; with tcp:// by a KV hint.
"""

import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    get_offload_block_hash,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvrouter_store.connectors.vllm_tier import tier as tier_module

TOKENS = 16
BLOCK_BYTES = 64 << 10
CHUNKS = 8  # of vLLM's own memory: fewer than a story's chain has
PATIENCE_S = 30.0
tier_module.PIECE_BYTES = 2 * BLOCK_BYTES  # several threads move what a story moves


def config_of(tier: dict[str, Any], engine: str) -> OffloadingConfig:
    """An engine of one rank and two cache groups."""
    groups = tuple(
        OffloadingGroupConfig(TOKENS, (f"layer.{k}.a", f"layer.{k}.b"), k) for k in range(2)
    )
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)
    return OffloadingConfig(
        groups,
        BLOCK_BYTES,
        False,
        {"cpu_bytes_to_use": CHUNKS * BLOCK_BYTES, "secondary_tiers": [tier]},
        engine,
        OffloadingModelConfig("tiny", "float32"),
        OffloadingCacheConfig(TOKENS, 1),
        parallel,
    )


def key_of(seed: str, index: int, group: int = 0) -> OffloadKey:
    """The name of a chunk, as vLLM makes it of a block hash."""
    return make_offload_key(sha256(f"{seed}/{index}".encode()).digest(), group)


def content_of(key: OffloadKey) -> bytes:
    """What the chunk of this name holds."""
    return sha256(key).digest() * (BLOCK_BYTES // 32)


def fetch_hints(source: str, keys: Sequence[OffloadKey]) -> KvHintsEnvelope:
    """An envelope as Dynamo's router builds it."""
    hashes = [int.from_bytes(get_offload_block_hash(key)[-8:]) for key in keys]
    payload = {"source_control_endpoint": source, "block_hashes": hashes}
    return KvHintsEnvelope("0.1", "m", [KvHintAction("a", "kv.fetch", "1.0", payload)])


class Engine:
    """The scheduler's side of an engine, and the bytes that its worker would move."""

    def __init__(self, tier: dict[str, Any]) -> None:
        self.spec = TieringOffloadingSpec(config_of(dict(tier), f"engine-{os.getpid()}"))
        self.manager: Any = self.spec.get_manager()
        self.memory = self.manager.primary_tier.get_kv_memoryview()
        self.tier = self.manager.secondary_tiers[0]
        self.requests = 0
        self.told: dict[str, Any] = {}  # by a router, with every request
        self.source = ""  # what a hint names to every request
        self.fetched: list[dict[str, int] | None] = []  # what became of the hints

    def request(self, keys: Sequence[OffloadKey]) -> ReqContext:
        """A new request of these chunks, in order."""
        self.requests += 1
        params = {"kvstore": self.told} if self.told else None
        hints = fetch_hints(self.source, keys) if self.source else None
        context = ReqContext(f"request-{self.requests}", params, hints)
        for index, key in enumerate(keys):
            context.set_offload_key_position(key, (index + 1) * TOKENS)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        """The end of one scheduler step."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> bool:
        """Steps until nothing is under way; whether that came."""
        until = time.monotonic() + PATIENCE_S
        while self.manager.has_pending_work() and time.monotonic() < until:
            self.step()
            time.sleep(0.001)
        return not self.manager.has_pending_work()

    def offload(self, keys: Sequence[OffloadKey]) -> bool:
        """Compute these chunks and offload them; whether vLLM took all of them."""
        context = self.request(keys)
        prepared = self.manager.prepare_store(keys, context)
        if prepared is None or list(prepared.keys_to_store) != list(keys):
            return False
        for key, chunk in zip(keys, prepared.store_spec.chunk_ids, strict=True):
            self.bytes_of(chunk)[:] = content_of(key)
        self.manager.complete_store(keys, context)
        settled = self.settle()
        self.manager.on_request_finished(context)
        return settled

    def look(self, keys: Sequence[OffloadKey], context: ReqContext) -> list[LookupResult]:
        """What vLLM finds at last, in its own memory or brought there."""
        until = time.monotonic() + PATIENCE_S
        waiting = (LookupResult.RETRY, LookupResult.HIT_PENDING)
        while True:
            found = [self.manager.lookup(key, context) for key in keys]
            if not any(each in waiting for each in found) or time.monotonic() > until:
                return found
            self.step()
            time.sleep(0.001)

    def read(self, keys: Sequence[OffloadKey]) -> list[bytes | None]:
        """The chunks' bytes as a request gets them; None for what is missing."""
        context = self.request(keys)
        found = self.look(keys, context)
        hits = [key for key, each in zip(keys, found, strict=True) if each is LookupResult.HIT]
        chunks: dict[OffloadKey, bytes] = {}
        if hits:
            loaded = self.manager.prepare_load(hits, context)
            for key, chunk in zip(hits, loaded.chunk_ids, strict=True):
                chunks[key] = bytes(self.bytes_of(chunk))
            self.manager.complete_load(hits, context)
        if self.source:
            self.fetched.append(self.tier.arrivals.fetched(context))
        self.manager.on_request_finished(context)
        return [chunks.get(key) for key in keys]

    def bytes_of(self, chunk: int) -> memoryview:
        """A chunk of vLLM's own memory, to write and read."""
        at = int(chunk) * BLOCK_BYTES
        memory: memoryview = self.memory.cast("B")
        return memory[at : at + BLOCK_BYTES]

    def close(self) -> None:
        """As vLLM does at its end: the memory must not be held by anybody."""
        self.memory = None
        self.manager.shutdown()


def whole(seed: str, count: int = 4, group: int = 0) -> list[OffloadKey]:
    return [key_of(seed, index, group) for index in range(count)]


def offload(engine: Engine) -> object:
    """Chunks of two groups, and more chains than vLLM's own memory holds."""
    chains = [whole("a"), whole("b", group=1), whole("c"), whole("d")]
    return [engine.offload(chain) for chain in chains]


def read(engine: Engine) -> object:
    """What was offloaded, by this process or another."""
    chains = [whole("a"), whole("b", group=1), whole("c"), whole("d")]
    return [engine.read(chain) == [content_of(key) for key in chain] for chain in chains]


def fetched(engine: Engine) -> object:
    """What became of the hints of the requests so far."""
    return engine.fetched


def groups(engine: Engine) -> object:
    """Chunks of the other group have the same hashes and are others."""
    return engine.read(whole("a", group=1)) == [None] * 4


def unknown(engine: Engine) -> object:
    """The first answer is that nobody knows yet, the last one that there is nothing."""
    keys = whole("nowhere")
    context = engine.request(keys)
    first = engine.manager.lookup(keys[0], context)
    last = engine.look(keys, context)
    engine.manager.on_request_finished(context)
    return [first.name, *(each.name for each in last)]


def gap(engine: Engine) -> object:
    """A chain of which only the even chunks were offloaded."""
    keys = whole("gap", 6)
    offloaded = [engine.offload([key]) for key in keys[::2]]
    for chain in (whole("x", 4), whole("y", 4)):  # push them out of vLLM's own memory
        engine.offload(chain)
    came = engine.read(keys)
    return [
        all(offloaded),
        *(
            None if data is None else data == content_of(k)
            for k, data in zip(keys, came, strict=True)
        ),
    ]


def lost(engine: Engine) -> object:
    """A chain that nobody offloaded, and one more step: nothing is under way for ever."""
    return [engine.read(whole("lost")) == [None] * 4, engine.settle()]


def fresh(engine: Engine) -> object:
    """A chain is offloaded into vLLM's own memory, whatever its tier does with it."""
    chain = whole(f"fresh-{engine.requests}")
    return [engine.offload(chain), engine.read(chain) == [content_of(key) for key in chain]]


def drain(engine: Engine) -> object:
    """After a drain, every job has been told of once."""
    keys = whole("drain")
    context = engine.request(keys)
    prepared = engine.manager.prepare_store(keys, context)
    for key, chunk in zip(keys, prepared.store_spec.chunk_ids, strict=True):
        engine.bytes_of(chunk)[:] = content_of(key)
    engine.manager.complete_store(keys, context)
    engine.tier.drain_jobs()
    told = [job.job_id for job in engine.tier.get_finished_jobs()]
    again = list(engine.tier.get_finished_jobs())
    expected = list(engine.manager._transfer_jobs)
    return [told == expected, again == []]


def half(engine: Engine) -> object:
    """Only the beginning of a chain."""
    return engine.offload(whole("a")[:2])


def await_landing(engine: Engine) -> object:
    """A chain of four chunks that will be there."""
    engine.tier.arrivals.await_groups({0: None, 1: None})
    engine.told |= {"coming_blocks": 4, "wait_s": PATIENCE_S}
    return read(engine)


def renew(engine: Engine) -> object:
    """The weights change in place."""
    engine.tier.renew()
    return True


TOLD = (
    offload,
    read,
    fetched,
    groups,
    unknown,
    gap,
    lost,
    fresh,
    drain,
    half,
    await_landing,
    renew,
)
STORIES = {each.__name__: each for each in TOLD}


def main(tier: str, *stories: str) -> int:
    """Tell the stories; the last line of the output says how they ended."""
    engine = Engine(json.loads(tier))
    found: dict[str, object] = {}
    for number, story in enumerate(stories):
        if story == "pause":
            print("paused", flush=True)
            sys.stdin.readline()
            continue
        name, _, source = story.partition(" ")
        hinted = source.startswith("tcp://")
        engine.told = {"source": source} if source and not hinted else {}
        engine.source = source if hinted else ""
        found[f"{number} {name}"] = STORIES[name](engine)
    engine.close()
    print("\n" + json.dumps(found), flush=True)
    return 0


def forked(path: str) -> list[str]:
    """Listens, and returns in a new process for every connection, with its arguments.

    The connection is that process's standard input, output and error; the last line there, from
    its parent, says how it exited.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("listening", flush=True)
        gc.freeze()  # what all of them share is neither searched nor copied for garbage
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if teller := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(teller, 0)[1])
        connection.sendall(f"\nexited {code}\n".encode())
        os._exit(0)
    for standard in range(3):
        os.dup2(connection.fileno(), standard)
    connection.close()
    arguments: list[str] = json.loads(sys.stdin.readline())
    return arguments


if __name__ == "__main__":
    sys.exit(main(*forked(sys.argv[1])))

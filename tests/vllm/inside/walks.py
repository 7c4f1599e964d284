"""Random walks of two engines and a store over hand-made cache groups; run by vLLM's python.

walks.py MODEL STEPS SEED VERIFY ROAD [KIND...]: prints a JSON object of kind to what happened, by
name. MODEL is any small model: only its configuration is read. VERIFY: 1, or 0 for engines that do
not check digests. ROAD: here for engines that load from the store's own memory, late for copies of
it that are, or away; hosts, or hosts-away, for engines with a node each, which hints name. A wrong
byte, a leak or a request that does not end is an AssertionError.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from tests.vllm.inside.groups import BLOCK, KINDS, PAGE, Kind
from tests.vllm.inside.late_copies import use_late_copies
from tests.vllm.inside.scheduled import Engine

from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.vllm.leases import Leases
from kvrouter_store.connectors.vllm_tier.announced import fetch_hint
from kvrouter_store.errors import KVStoreError

POOL_BYTES = 32 << 20
END_S = 120.0  # within which all requests end on a crowded machine; none waits for a second
DEADLINE_S = 0.1  # of an engine's questions to the store
NEW_WEIGHTS = 0.3  # share of the resets
SCHEDULER_FIRST = 0.2  # share of engines whose scheduler begins before the worker
STORE = """
import signal, sys
from kvrouter_store._core import StoreServer
path = sys.argv[3] or None
node = StoreServer(port=int(sys.argv[1]), pool_bytes=int(sys.argv[2]), unix_path=path)
node.start()
print(node.port, flush=True)
signal.pause()
"""
HOST_CHUNKS = 24  # of an engine's host memory: less than its requests hold
LONGEST = 12 * BLOCK  # tokens of a prompt
MOST_REQUESTS = 6
NOWHERE = "127.0.0.1:9"  # no engine may read from there


class Store:
    """A process with a node; with a path, engines load from its memory. Its owner must kill it."""

    def __init__(self, port: int, unix_path: str = "") -> None:
        command = [sys.executable, "-c", STORE, str(port), str(POOL_BYTES), unix_path]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self.url = f"kv://127.0.0.1:{self.port}"

    def overwrite(self) -> None:
        """Fill its pool with zeros behind its back."""
        for link in Path(f"/proc/{self._process.pid}/fd").iterdir():
            if os.readlink(link).startswith("/memfd:"):
                with link.open("r+b", buffering=0) as pool:
                    pool.write(bytes(POOL_BYTES))
                return
        raise AssertionError("the store has no pool")

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


class Walk:
    """What happens, one action after another. Its owner must close it."""

    def __init__(self, name: str, model: str, seed: int, *, verify: bool, road: str) -> None:
        self.kind: Kind = KINDS[name]
        self.seen: Counter[str] = Counter(groups=len(self.kind.specs))
        self._name, self._model, self._verify = name.replace(",", ""), model, verify
        self._random = Random(f"{name} {seed}")
        self._prompts = [[self._random.randrange(1000) for _ in range(LONGEST)] for _ in range(5)]
        self._folder = TemporaryDirectory(prefix="walk-")
        self._maps, self._late = not road.endswith("away"), road == "late"
        nodes = range(2 if road.startswith("hosts") else 1)
        self._paths = [f"{self._folder.name}/{each}" if self._maps else "" for each in nodes]
        self._stores = [Store(0, path) for path in self._paths]
        self._clients = [StoreClient(store.url) for store in self._stores]
        self.engines = [self._engine(number) for number in range(2)]

    def act(self) -> None:
        """One random action, or mostly a step of an engine."""
        actions = {
            self.step: 300,
            self.ask: 40,
            self.ask_many: 6,
            self.abort: 6,
            self.forget: 8,
            self.preempt: 4,
            self.lose_blocks: 10,
            self.overwrite_pool: 0 if self._late else 2,  # a digest is read beside the copy
            self.kill_store: 2,
            self.stall_store: 2,
            self.replace_engine: 2,
        }
        (action,) = self._random.choices(list(actions), list(actions.values()))
        action()

    def step(self) -> None:
        """A step of one engine."""
        self._step(self._random.choice(self.engines))

    def ask_many(self) -> None:
        """Hits that come at once, to an engine whose host memory they fill several times over."""
        self.forget()
        for _ in range(MOST_REQUESTS):
            self.ask()
        for _ in range(3):
            self.step()

    def ask(self) -> None:
        """A prompt that begins as others do, and perhaps goes on otherwise."""
        number = self._random.randrange(2)
        engine = self.engines[number]
        if len(engine.requests) >= MOST_REQUESTS:
            return
        prompt = self._random.choice(self._prompts)
        tokens = prompt[: self._random.randrange(1, LONGEST)]
        if self._random.random() < 0.4:
            others = self._random.randrange(1, 2 * BLOCK)
            tokens = tokens[: LONGEST - others] + [self._random.randrange(1000)] * others
        salt = "salt" if self._random.random() < 0.1 else None
        coming = None
        if self._random.random() < 0.3:
            coming = self._random.randint(1, LONGEST // BLOCK), self._random.choice((0.01, 0.1, 1))
            self.seen["announced"] += 1
            for other in self.engines:
                if other is not engine and self._random.random() < 0.8:
                    other.ask(tokens, 1, salt)
        told = self._told(number, len(tokens) // BLOCK)
        engine.ask(tokens, self._random.choice((1, 1, 3, 70, 200)), salt, coming, **told)
        self.seen["requests"] += 1

    def _told(self, number: int, blocks: int) -> dict[str, Any]:
        """With two nodes, mostly a hint to fetch from the other one; some are lies."""
        if len(self._stores) == 1 or not blocks or self._random.random() < 0.3:
            return {}
        lie = self._random.random() < 0.1
        where = NOWHERE if lie else f"127.0.0.1:{self._stores[1 - number].port}"
        self.seen["lies told" if lie else "hints told"] += 1
        hashes = [self._random.randrange(1 << 64) for _ in range(blocks)]
        return {"kv_hint": fetch_hint("walk", f"tcp://{where}", hashes)}

    def abort(self) -> None:
        """A client leaves."""
        engine = self._random.choice(self.engines)
        if engine.requests:
            left = self._random.choice(engine.requests)
            self.seen[f"left while {engine.scheduler.requests[left].status.name.lower()}"] += 1
            self._note_pins("a request left", engine)
            engine.abort(left)

    def forget(self) -> None:
        """An engine loses its own cache, if no request runs."""
        self._random.choice(self.engines).forget()

    def preempt(self) -> None:
        """All requests of an engine begin again, perhaps with new weights."""
        weights = self._random.random() < NEW_WEIGHTS
        engine = self._random.choice(self.engines)
        pins = pins_of(engine)
        try:
            engine.forget(running=True, weights=weights)
            self.seen["pins held when all began again"] += pins
            self.seen["new weights" if weights else "reset"] += 1
        except RuntimeError:  # a load is under way
            self.seen["reset refused"] += 1

    def lose_blocks(self) -> None:
        """The store evicts some blocks of one group, anywhere in a chain."""
        engine = self._random.choice(self.engines)
        requests = list(engine.scheduler.requests.values())
        chains = [each.block_hashes for each in requests if each.block_hashes]
        if not chains:
            return
        hashes = self._random.choice(chains)
        lost = self._random.sample(hashes, self._random.randint(1, min(3, len(hashes))))
        link = self._random.choice(list(tier_of(engine).links.values()))
        client = self._random.choice(self._clients)
        try:
            self.seen["blocks lost"] += client.delete(link.manifest, b"".join(lost))
        except KVStoreError:  # it does not know the manifest yet, or was restarted
            self.seen["blocks not lost"] += 1

    def overwrite_pool(self) -> None:
        """The store's memory decays."""
        self._random.choice(self._stores).overwrite()
        self.seen["pool overwritten"] += 1

    def kill_store(self) -> None:
        """The store dies with all that it holds; engines make some steps without it.

        Now and then they have mapped the new one's memory before anything else happens.
        """
        self._note_pins("the store died", *self.engines)
        epochs = [leases_of(engine).epoch for engine in self.engines]
        number = self._random.randrange(len(self._stores))
        self._stores[number].kill()
        for _ in range(self._random.randrange(40)):
            self.step()
        self._stores[number] = Store(self._stores[number].port, self._paths[number])
        self.seen["store killed"] += 1
        if self._random.random() < 0.5:
            for of, engine in enumerate(self.engines):
                if self._node(of) == number:
                    self._until_mapped(engine, epochs[of])

    def stall_store(self) -> None:
        """The store hangs while engines make some steps."""
        self._note_pins("the store hung", *self.engines)
        store = self._random.choice(self._stores)
        store.signal(signal.SIGSTOP)
        for _ in range(self._random.randrange(40)):
            self.step()
        store.signal(signal.SIGCONT)
        self.seen["store stalled"] += 1

    def replace_engine(self) -> None:
        """An engine ends with its requests; another one takes its place."""
        number = self._random.randrange(len(self.engines))
        self.engines[number].close()
        self.engines[number] = self._engine(number)
        self.seen["engine replaced"] += 1

    def _note_pins(self, when: str, *engines: Engine) -> None:
        self.seen[f"pins held when {when}"] += sum(map(pins_of, engines))

    def end(self) -> None:
        """All requests end, and nothing is held any more."""
        for engine in self.engines:
            until = time.monotonic() + END_S
            while not engine.idle:
                self._step(engine)
                assert time.monotonic() < until, engine.waiting()
            assert not engine.leaks(), engine.leaks()
            self._until_mapped(engine)

    def close(self) -> None:
        """End engines and store."""
        for engine in self.engines:
            engine.close()
        for client in self._clients:
            client.close()
        for store in self._stores:
            store.kill()
        self._folder.cleanup()

    def _node(self, number: int) -> int:
        """The node of an engine."""
        return number % len(self._stores)

    def _engine(self, number: int) -> Engine:
        own = self._stores[self._node(number)]
        settings = {
            "url": own.url,
            "neighbours": ",".join(each.url for each in self._stores if each is not own),
            "deadline_s": DEADLINE_S,
            "verify": self._verify,
            "name": f"engine-{number}",
            "model": self._name,
            "weights_revision": "none",
            "cpu_bytes_to_use": HOST_CHUNKS * 2 * PAGE,
            "canonical_layout": self.kind.ranks != (1, 1),
        }
        blocks = len(self.kind.specs) * (LONGEST // BLOCK + 8)
        first = self._random.random() < SCHEDULER_FIRST
        ranks = self.kind.ranks[number]
        return Engine(self.kind, self._model, blocks, settings, ranks=ranks, scheduler_first=first)

    def _until_mapped(self, engine: Engine, epoch: int = 0) -> None:
        """All ranks map the store's memory again, after the life `epoch` of a node.

        The steps until then are none of the walk's.
        """
        steps, until = self.seen["steps"], time.monotonic() + END_S
        while self._maps and leases_of(engine).epoch in (0, epoch):
            self._step(engine)
            assert time.monotonic() < until, "a rank did not tell that it has mapped the store"
        self.seen["steps"] = steps

    def _step(self, engine: Engine) -> None:
        before = Counter(counts_of(engine))
        engine.step()
        self.seen["steps"] += 1
        self.seen.update(Counter(counts_of(engine)) - before)


def counts_of(engine: Engine) -> dict[str, int]:
    """What an engine did so far, by name."""
    requests = engine.scheduler.requests.values()
    return {
        "tokens computed": engine.computed,
        "blocks compared": engine.compared,
        "loads from the store's memory": engine.from_pool,
        "of these failed": engine.failed,
        "blocks of the other node": engine.honoured,
        "preemptions": sum(each.num_preemptions for each in requests),
        **{f"blocks loaded of group {group}": n for group, n in engine.loaded.items()},
    }


def leases_of(engine: Engine) -> Leases:
    """What its requests hold of the store's own memory."""
    leases: Leases = engine.connector.scheduler.manager.leases
    return leases


def pins_of(engine: Engine) -> int:
    """Chunks that requests hold which wait."""
    return int(engine.connector.scheduler.manager.room.pinned())


def tier_of(engine: Engine) -> Any:
    """The store as the engine's offloading sees it."""
    return engine.connector.scheduler.manager.secondary_tiers[0]


def walk(
    name: str, model: str, steps: int, seed: int, *, verify: bool, road: str
) -> dict[str, int]:
    """One walk; what happened."""
    walking = Walk(name, model, seed, verify=verify, road=road)
    try:
        one, other = ([*tier_of(engine).links.values()] for engine in walking.engines)
        assert [link.manifest for link in one] == [link.manifest for link in other]
        while walking.seen["steps"] < steps:
            walking.act()
        walking.end()
    except BaseException:
        print(f"{name}, seed {seed}, after {walking.seen['steps']} steps", file=sys.stderr)
        raise
    finally:
        walking.close()
    return dict(walking.seen)


if __name__ == "__main__":
    model, steps, seed, verify, road, *names = sys.argv[1:]
    if road == "late":
        use_late_copies()
    found = {
        name: walk(name, model, int(steps), int(seed), verify=verify == "1", road=road)
        for name in names or KINDS
    }
    print("\n" + json.dumps(found))

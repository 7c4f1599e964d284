"""Requests that are asked before their KV has landed, over hand-made groups; run by vLLM's python.

announced.py MODEL [PATH]: prints a JSON object of kind to what a decode engine computed and
fetched. MODEL is any small model: only its configuration is read. PATH: of the store's socket, for
engines that load from its own memory.
"""

import json
import sys
import time
from contextlib import ExitStack
from typing import Any

from tests.vllm.inside.groups import BLOCK, KINDS, PAGE
from tests.vllm.inside.scheduled import Engine
from tests.vllm.inside.walks import Store

from kvrouter_store.client.blocking import StoreClient

BLOCKS = 20
PROMPT = list(range(BLOCKS * BLOCK + 10))
LONG_S, SHORT_S = 60.0, 0.2
END_S = 60.0  # within which everything must have ended
FIRST_STEPS = 3  # of the prefill engine: it has stored some blocks, and computes yet


class Pair:
    """A prefill and a decode engine of one kind, with a store between them. close() ends them."""

    def __init__(self, name: str, model: str, path: str) -> None:
        self._cleanup = ExitStack()
        self.store = Store(0, path)
        self._cleanup.callback(self.store.kill)
        self.client = self._cleanup.enter_context(StoreClient(self.store.url))
        settings: dict[str, Any] = {
            "url": self.store.url,
            "model": name.replace(",", ""),
            "weights_revision": "none",
            "cpu_bytes_to_use": 4 * BLOCKS * 2 * PAGE,
        }
        self.prefill, self.decode = (
            Engine(KINDS[name], model, 8 * BLOCKS, {**settings, "name": role})
            for role in ("prefill", "decode")
        )
        self._cleanup.callback(self.decode.close)
        self._cleanup.callback(self.prefill.close)

    def close(self) -> None:
        """End engines and store."""
        self._cleanup.close()

    def wait_at_the_store(self, wait_s: float) -> str:
        """Ask the decode engine, and step it until the store knows that it waits; the request."""
        request = self.decode.ask(PROMPT, coming=(BLOCKS, wait_s))
        until = time.monotonic() + END_S
        while not self.client.stats()["waits"]:
            assert time.monotonic() < until, "nobody waits"
            self.decode.step()
        return request

    def end(self, *engines: Engine) -> None:
        """Step the engines in turns until all are idle and hold nothing."""
        until = time.monotonic() + END_S
        while not all(each.idle for each in engines):
            assert time.monotonic() < until, "an engine does not end"
            for each in engines:
                each.step()
        for each in engines:
            assert not each.leaks(), each.leaks()


def fetched(engine: Engine) -> int:
    """Chunks in the engine's host memory, or on their way into it, or held in the store's."""
    manager = engine.connector.scheduler.manager
    leased = sum(len(each.found.places) for each in manager.leases._holding.values())
    return int(manager.primary_tier.table.there) + leased


def landing(pair: Pair) -> dict[str, Any]:
    """The prefill engine computes what is awaited."""
    pair.wait_at_the_store(LONG_S)
    waited = {"held": pair.decode.leaks().get("blocks", 0), "computed": pair.decode.computed}
    pair.prefill.ask(PROMPT)
    for _ in range(FIRST_STEPS):
        pair.prefill.step()
    assert pair.prefill.requests
    until = time.monotonic() + END_S
    while not fetched(pair.decode):
        assert time.monotonic() < until, "nothing is fetched before all has landed"
        pair.decode.step()
    pair.end(pair.prefill, pair.decode)
    loaded = [number for _, number in sorted(pair.decode.loaded.items())]
    return {"waited": waited, "computed": pair.decode.computed, "loaded": loaded}


def broken(pair: Pair) -> dict[str, Any]:
    """What landed first cannot be used, and the rest is computed yet."""
    pair.wait_at_the_store(LONG_S)
    pair.prefill.ask(PROMPT)
    for _ in range(FIRST_STEPS):
        pair.prefill.step()
    until = time.monotonic() + END_S
    while not pair.client.stats()["commits_total"]:
        assert time.monotonic() < until, "nothing lands"
    pair.store.overwrite()
    return outcome(pair)


def leaving(pair: Pair) -> dict[str, Any]:
    """The client leaves while its KV is awaited."""
    pair.decode.abort(pair.wait_at_the_store(LONG_S))
    return outcome(pair)


def late(pair: Pair) -> dict[str, Any]:
    """Nothing lands within the time that the router named."""
    pair.wait_at_the_store(SHORT_S)
    return outcome(pair)


def orphaned(pair: Pair) -> dict[str, Any]:
    """The store dies."""
    pair.wait_at_the_store(LONG_S)
    pair.store.kill()
    pair.end(pair.decode)
    return {"computed": pair.decode.computed}


def outcome(pair: Pair) -> dict[str, Any]:
    """What was computed in the end, when nobody waits any more."""
    pair.end(pair.decode)
    until = time.monotonic() + END_S
    while pair.client.stats()["waits"]:
        assert time.monotonic() < until, "the store still has a wait"
    return {"computed": pair.decode.computed}


def told(name: str, model: str, path: str) -> dict[str, Any]:
    """All that may happen with one kind of cache groups.

    Blocks in the store's memory are examined when they are loaded, with all of the rest.
    """
    found = {}
    for happens in (landing, *(() if path else (broken,)), leaving, late, orphaned):
        pair = Pair(name, model, path)
        try:
            found[happens.__name__] = happens(pair)
        finally:
            pair.close()
    return found


if __name__ == "__main__":
    model, path = [*sys.argv[1:], ""][:2]
    print("\n" + json.dumps({name: told(name, model, path) for name in KINDS}))

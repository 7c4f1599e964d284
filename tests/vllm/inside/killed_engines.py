"""Engines that are killed amid puts and loads, beside one that reads the same; vLLM's python.

killed_engines.py MODEL KILLS: prints a JSON object: how often an engine was killed, what the one
beside it loaded and compared, and what the store still holds of the dead.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from tests.vllm.inside.groups import BLOCK, KINDS, LAYERS, PAGE
from tests.vllm.inside.scheduled import Engine
from tests.vllm.inside.walks import LONGEST, Store

from kvrouter_store.client.blocking import StoreClient

KIND = "latents, window, state"
PROMPTS, REQUESTS = 24, 4
MOST_S = 0.3  # that an engine lives once it has begun
FREED_S = 10.0  # within which the store must notice
HELD = ("leases", "pinned_blocks", "reserved_blocks", "lent_bytes", "fenced_bytes")


def engine(model: str, url: str, number: int) -> Engine:
    """An engine with room for little: it puts and loads all the time."""
    settings = {
        "url": url,
        "model": "killed",
        "weights_revision": "none",
        "name": f"engine-{number}",
        "cpu_bytes_to_use": 48 * (LAYERS * PAGE + 4096),
    }
    return Engine(KINDS[KIND], model, 3 * (LONGEST // BLOCK + 8), settings)


def works(model: str, url: str, number: int, told: int, ends: Callable[[], bool]) -> None:
    """Asks for prompts that all engines have in common until `ends`; says what it compared."""
    draw, running = Random(number), engine(model, url, number)
    prompts = [[1000 * number + token for token in range(LONGEST)] for number in range(PROMPTS)]
    os.write(told, b"!")
    while not ends():
        while len(running.requests) < REQUESTS:
            running.ask(draw.choice(prompts)[: draw.randrange(BLOCK, LONGEST)])
        running.step()
        if draw.random() < 0.05:
            running.forget()
    while not running.idle:
        running.step()
    assert not running.leaks(), running.leaks()
    found = {"compared": running.compared, "loaded": running.loaded[0]}
    os.write(told, json.dumps(found).encode())
    running.close()


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """A process that does the work: its id, and from where to read what it tells."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        work(write)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def held(client: StoreClient) -> dict[str, int]:
    """What the store holds for connections, once it has noticed that they ended."""
    until = time.monotonic() + FREED_S
    while time.monotonic() < until:
        stats = client.stats()
        found = {name: stats[name] for name in HELD}
        if not any(found.values()):
            break
        time.sleep(0.05)
    return found


def killed(model: str, kills: int, folder: Path) -> dict[str, Any]:
    """Kill so many engines, one after the other, at random moments of their work."""
    draw, store, flag = Random(7), Store(0, str(folder / "store")), folder / "enough"
    names = set(Path("/dev/shm").glob("vllm_offload*"))
    beside, told = forked(partial(works, model, store.url, 0, ends=flag.exists))
    assert os.read(told, 1) == b"!"
    for number in range(1, kills + 1):
        pid, begun = forked(partial(works, model, store.url, number, ends=lambda: False))
        assert os.read(begun, 1) == b"!"
        time.sleep(draw.uniform(0.0, MOST_S))
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status), f"engine {number} ended by itself: {status}"
        os.close(begun)
    flag.touch()
    found = json.loads(os.read(told, 1000))
    assert os.waitpid(beside, 0)[1] == 0
    with StoreClient(store.url) as client:
        left = held(client)
    store.kill()
    files = len(set(Path("/dev/shm").glob("vllm_offload*")) - names)
    return {"kills": kills, **found, **left, "files": files}


if __name__ == "__main__":
    model, kills = sys.argv[1:]
    with TemporaryDirectory(prefix="killed-") as name:
        print("\n" + json.dumps(killed(model, int(kills), Path(name))), flush=True)

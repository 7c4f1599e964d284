"""Small clusters of simulated engines in which something is wrong, and what the router says."""

import asyncio
import contextlib
import os
import random
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from kvrouter.tools.demo.children import KVROUTER, Child, Children, free_port

MODEL, BLOCK = "m", 16
PATIENCE_S = 60
Flags = Sequence[str]
STORE = ("store", "--port", "0", "--http-port", "0")
ROOMY = ("--memory", "64MiB")


async def kvrouter(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, output and complaints of a command."""
    done = await asyncio.to_thread(
        subprocess.run,
        [*KVROUTER, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout, done.stderr


@dataclass
class Cluster:
    """A router before engines, perhaps with a store."""

    children: Children
    router: Child
    page: str
    store: Child | None
    http: aiohttp.ClientSession

    async def ask(self, prompt: list[int], **more: Any) -> None:
        """One completion; it must be answered."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, **more}
        async with self.http.post(f"{self.router.http}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def why(self, *arguments: str) -> str:
        """What `kvrouter why` prints."""
        code, out, err = await kvrouter("why", *arguments, "--url", self.page)
        assert code == 0, err
        return out


@contextlib.asynccontextmanager
async def cluster(
    folder: Path,
    *,
    decode: Sequence[Flags],
    prefill: Sequence[Flags] = (),
    store: Flags | None = ROOMY,
    router: Flags = (),
) -> AsyncIterator[Cluster]:
    """Start it on loopback; ends it.

    Args:
        folder: for logs.
        decode, prefill: flags of the engines; without `prefill`, the others do all themselves.
        store: flags of the store; None: there is none.
        router: flags of the router.
    """
    async with Children(folder) as children, aiohttp.ClientSession() as http:
        node = None
        if store is not None:
            node = await children.start("store", *STORE, *store)
        role = "decode" if prefill else "both"
        url = ("--store", node.urls["kv"]) if node is not None else ()
        engines = [
            await children.start(
                f"{kind}-{number}",
                *("sim", "--model", MODEL, "--port", "0", "--role", kind, *url),
                *("--block-size", str(BLOCK), *flags),
            )
            for kind, each in (("prefill", prefill), (role, decode))
            for number, flags in enumerate(each)
        ]
        port, split = free_port(), len(prefill)
        started = await children.start(
            "router",
            *("serve", "--port", "0", "--control-port", str(port), *url, *router),
            *(word for each in engines[:split] for word in ("--prefill", each.http)),
            *(word for each in engines[split:] for word in ("--decode", each.http)),
        )
        yield Cluster(children, started, f"http://127.0.0.1:{port}", node, http)


def prompts(count: int, tokens: int, seed: int = 1) -> list[list[int]]:
    """Prompts of random token ids, which have nothing in common."""
    draw = random.Random(seed)
    return [[draw.randrange(1, 30000) for _ in range(tokens)] for _ in range(count)]

"""What stands behind each kind of foreign store: a fake, or the real one, told what to hold."""

import asyncio
import os
import signal
import sys
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp
import pytest
from tests.fakes.foreign_stores import FakeCoordinator, FakeMaster
from tests.fakes.mooncake import MooncakeStore
from tests.fakes.stall import stall
from tests.lmcache.server import own_environment, start_coordinator
from tests.vllm.engines import free_port

from kvrouter.engines.engine import Identity
from kvrouter.prefix.stores.base import Origin
from kvrouter_store.identity.chain import hash_tokens, root_hash

if TYPE_CHECKING:
    from tests.vllm.services import Service

BLOCK_TOKENS = 16
CHUNK_BLOCKS = 2  # of LMCache
BLOCKS = 8
RANKS = 2
MODEL = "/models/model-tiny"
IDENTITY = Identity(("m",), block_tokens=BLOCK_TOKENS, family="store", model_path=MODEL)
KINDS = (
    "fake master",
    "fake coordinator",
    pytest.param("mooncake", marks=[pytest.mark.foreign, pytest.mark.timeout(300)]),
    pytest.param("lmcache", marks=[pytest.mark.foreign, pytest.mark.timeout(300)]),
)


class Prompt:
    """A prompt of `BLOCKS` blocks, by every name."""

    def __init__(self, salt: str | None = None, adapter: tuple[str, str] | None = None) -> None:
        self.ids = list(range(100, 100 + BLOCKS * BLOCK_TOKENS + 1))
        tokens, root = array("I", self.ids), root_hash(None)
        chain = hash_tokens(tokens, BLOCK_TOKENS, root=root, cache_salt=salt, lora=adapter)
        self.hashes = bytes(chain.data)
        self.origin = Origin(tokens.tobytes(), BLOCK_TOKENS, salt, adapter)
        self.salt = salt

    def names(self, blocks: Iterable[int], ranks: Iterable[int]) -> list[str]:
        """Of vLLM's MooncakeStoreConnector (store/data.py, `PoolKey`)."""
        return [
            f"model-tiny@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0@"
            + self.hashes[32 * block : 32 * block + 32].hex()
            for block in blocks
            for rank in ranks
        ]


class Backend(Protocol):
    """The same few things for every kind. Blocks come in pairs, for LMCache's chunks."""

    @property
    def url(self) -> str: ...

    async def hold(
        self, prompt: Prompt, blocks: Iterable[int], ranks: Iterable[int] = range(RANKS)
    ) -> None:
        """From now on it holds these blocks too."""

    async def begin(self, prompt: Prompt, blocks: Iterable[int]) -> None:
        """Puts of these blocks begin, which `hold` ends."""

    async def kill(self) -> None:
        """What it held is gone."""

    async def mend(self) -> None:
        """It is there again, after `kill` or `stall`."""

    async def stall(self) -> None:
        """It takes questions, and does not answer."""

    async def close(self) -> None: ...


class FakeMasterBackend:
    def __init__(self) -> None:
        self.store = FakeMaster(f"?tp={RANKS}")

    @property
    def url(self) -> str:
        return self.store.url

    async def hold(
        self, prompt: Prompt, blocks: Iterable[int], ranks: Iterable[int] = range(RANKS)
    ) -> None:
        self.store.keys.update(prompt.names(blocks, ranks))

    async def begin(self, prompt: Prompt, blocks: Iterable[int]) -> None:
        """The real one answers as if there were nothing."""

    async def kill(self) -> None:
        self.store.keys.clear()
        await self.store.stop()

    async def mend(self) -> None:
        self.store.answers.set()
        await self.store.start()

    async def stall(self) -> None:
        self.store.answers.clear()

    async def close(self) -> None:
        await self.store.stop()


class FakeCoordinatorBackend(FakeMasterBackend):
    def __init__(self) -> None:
        chunk_tokens = CHUNK_BLOCKS * BLOCK_TOKENS
        options = f"?world_size={RANKS}&chunk_size={chunk_tokens}"
        self.coordinator = FakeCoordinator(options, chunk_tokens)
        self.store = self.coordinator  # type: ignore[assignment]

    async def hold(
        self, prompt: Prompt, blocks: Iterable[int], ranks: Iterable[int] = range(RANKS)
    ) -> None:
        keys = self.coordinator.keys_of(question_of(prompt))
        wanted = {(block // CHUNK_BLOCKS, rank) for block in blocks for rank in ranks}
        for at, key in enumerate(keys):
            if (at // RANKS, key["kv_rank"]) in wanted:
                self.coordinator.hold(key)


def question_of(prompt: Prompt) -> dict[str, Any]:
    return {
        "model_name": MODEL,
        "world_size": RANKS,
        "token_ids": prompt.ids,
        "cache_salt": prompt.salt or "",
    }


class MooncakeBackend:
    """A real master, and a client of Mooncake's that lends it memory and puts keys."""

    def __init__(self, folder: Path) -> None:
        python = os.environ.get("KVROUTER_LMCACHE_PYTHON", sys.executable)
        self.store = MooncakeStore(folder, Path(os.environ["KVROUTER_MOONCAKE"]), python=python)
        self.stalled = False

    @property
    def url(self) -> str:
        return f"mooncake://{self.store.master.admin_address}?tp={RANKS}"

    async def start(self) -> None:
        await asyncio.to_thread(self.store.start)

    async def hold(
        self, prompt: Prompt, blocks: Iterable[int], ranks: Iterable[int] = range(RANKS)
    ) -> None:
        await asyncio.to_thread(self.store.nodes[0].put, prompt.names(blocks, ranks))

    async def begin(self, prompt: Prompt, blocks: Iterable[int]) -> None:
        names = prompt.names(blocks, range(RANKS))
        await asyncio.to_thread(self.store.nodes[0].put, names, begin=True)

    async def kill(self) -> None:
        self.store.kill()

    async def mend(self) -> None:
        if self.stalled:
            self.store.resume()
        else:
            await self.start()
        self.stalled = False

    async def stall(self) -> None:
        self.store.stall()
        self.stalled = True

    async def close(self) -> None:
        await self.kill()


class LmcacheBackend:
    """A real coordinator, which gets the events that a multiprocess server would send it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.running: Service | None = None
        self.sequence = 0

    @property
    def url(self) -> str:
        tokens = CHUNK_BLOCKS * BLOCK_TOKENS
        return f"lmcache://127.0.0.1:{self.port}?world_size={RANKS}&chunk_size={tokens}"

    async def start(self) -> None:
        python, tokens = Path(os.environ["KVROUTER_LMCACHE_PYTHON"]), CHUNK_BLOCKS * BLOCK_TOKENS
        given = python, own_environment(), self.folder, tokens, self.port
        self.running = service = start_coordinator(*given)
        await asyncio.to_thread(service.wait_http, service.http, "/healthz")
        self.sequence = 0

    async def hold(
        self, prompt: Prompt, blocks: Iterable[int], ranks: Iterable[int] = range(RANKS)
    ) -> None:
        found = await self._post("/directory/lookup", question_of(prompt))
        wanted = {(block // CHUNK_BLOCKS, rank) for block in blocks for rank in ranks}
        keys = [each["key"] for each in found["results"]]
        entries = [
            {"key": key, "size_bytes": 1 << 16}
            for at, key in enumerate(keys)
            if (at // RANKS, at % RANKS) in wanted
        ]
        self.sequence += 1
        batch = {
            "instance_id": "a",
            "incarnation": 1,
            "seq": self.sequence,
            "event_type": "store",
            "tier": "l1",
            "backend": "dram",
            "entries": entries,
        }
        assert (await self._post("/events", {"batches": [batch]}))["applied"] == 1

    async def begin(self, prompt: Prompt, blocks: Iterable[int]) -> None:
        """Servers report what is stored."""

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.port}{path}"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            found: dict[str, Any] = await answer.json()
            return found

    async def kill(self) -> None:
        service, self.running = self.running, None
        if service is not None:
            service.kill()

    async def mend(self) -> None:
        if self.running is None:
            await self.start()
        else:
            self.running.process.send_signal(signal.SIGCONT)

    async def stall(self) -> None:
        assert self.running is not None
        stall(self.running.process.pid)

    async def close(self) -> None:
        await self.kill()


async def started(kind: str, folder: Path) -> Backend:
    """One of that kind; a real one needs its environment."""
    if kind == "fake master":
        backend: Any = FakeMasterBackend()
    elif kind == "fake coordinator":
        backend = FakeCoordinatorBackend()
    else:
        variable = "KVROUTER_MOONCAKE" if kind == "mooncake" else "KVROUTER_LMCACHE_PYTHON"
        if not os.environ.get(variable):
            pytest.skip(f"{variable} is not set: see .ci/stages/foreign.sh")
        backend = MooncakeBackend(folder) if kind == "mooncake" else LmcacheBackend(folder)
        await backend.start()
        return backend  # type: ignore[no-any-return]
    await backend.store.start()
    return backend  # type: ignore[no-any-return]

"""What tests of decode legs ahead of their landing share: one prompt, its KV, its requests."""

import asyncio
from array import array
from typing import TYPE_CHECKING, Any

from tests.fakes.engine import BLOCK_TOKENS, FakeEngine
from tests.fakes.patience import eventually
from tests.fakes.store import StoreProcess, manifest_of, put_chain

from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.identity.chain import hash_tokens, root_hash

if TYPE_CHECKING:
    from tests.integration.router.conftest import Json, Site

MANIFEST = manifest_of()
IDS = list(range(100, 100 + 5 * BLOCK_TOKENS + 5))
BLOCKS = 5
AHEAD = ("at-once", "chunk")


def hashes_of(ids: list[int]) -> bytes:
    return hash_tokens(array("I", ids), BLOCK_TOKENS, root=root_hash(None)).data


def waiting(engines: list[FakeEngine]) -> None:
    """Engines whose connectors wait for KV, and which answer when a test says so."""
    for engine in engines:
        engine.manifest = MANIFEST.digest.hex()
        engine.waits = True
        engine.mode = "held"


async def land(node: StoreProcess, blocks: int = BLOCKS, ids: list[int] = IDS) -> None:
    """The prompt's first blocks come into the store."""

    def put() -> None:
        with StoreClient(node.url) as client:
            client.register(MANIFEST)
            put_chain(client, MANIFEST, hashes_of(ids)[: 32 * blocks])

    await asyncio.to_thread(put)


def await_stat(node: StoreProcess, name: str, value: int) -> None:
    with StoreClient(node.url) as client:
        assert eventually(lambda: client.stats()[name] == value)


def ask(here: "Site", **more: Any) -> "asyncio.Task[tuple[int, dict[str, str], bytes]]":
    body = {"model": "m", "prompt": IDS, "max_tokens": 4, **more}
    return asyncio.create_task(here.post(body))


def told(body: "Json") -> "Json":
    """What the decode leg tells its engine."""
    about: Json = body["kv_transfer_params"]["kvstore"]
    return about


async def both_began(here: "Site", node: StoreProcess, mode: str) -> "Json":
    """Both legs are under way, the prefill leg's KV is not there; the decode leg's body."""
    await here.prefill[0].next_began()
    if mode == "chunk":
        await land(node, 1)
    return await here.decode[0].next_began()

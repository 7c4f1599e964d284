"""From the prefill leg to the decode leg through a real node of the store."""

import asyncio
import json
from array import array
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import BLOCK_TOKENS, FakeEngine
from tests.fakes.patience import eventually
from tests.fakes.store import StoreProcess, manifest_of, put_chain
from tests.integration.router.conftest import Json, Open, chat, metric, text

from kvrouter.prefix.stores.base import StoreMatch
from kvrouter.prefix.stores.node import NodesView
from kvrouter.telemetry.request_log import RequestLog
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.identity.chain import hash_tokens, root_hash

MANIFEST = manifest_of()
IDS = list(range(100, 100 + 3 * BLOCK_TOKENS + 5))
HASHES = hash_tokens(array("I", IDS), BLOCK_TOKENS, root=root_hash(None)).data
MISSING = "kvrouter:handoff_missing_total"
Prepare = Callable[[list[FakeEngine]], None]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StoreProcess]:
    with StoreProcess(tmp_path) as started:
        yield started


def announce(engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.manifest = MANIFEST.digest.hex()


def store_blocks(node: StoreProcess, blocks: int) -> None:
    with StoreClient(node.url) as client:
        client.register(MANIFEST)
        if blocks:
            put_chain(client, MANIFEST, HASHES[: 32 * blocks])


def replace_second_by_third(node: StoreProcess) -> None:
    with StoreClient(node.url) as client:
        client.register(MANIFEST)
        assert client.delete(MANIFEST, HASHES[32:64]) == 1
        put_chain(client, MANIFEST, HASHES[64:])
        assert client.stats()["waits"] == 1


def await_stat(node: StoreProcess, name: str, value: int) -> None:
    with StoreClient(node.url) as client:
        assert eventually(lambda: client.stats()[name] == value)


async def test_only_an_engine_with_a_connector_that_names_no_kv_misses_a_hand_off(
    site: Open, node: StoreProcess
) -> None:
    await asyncio.to_thread(store_blocks, node, 0)
    here = await site(store=node.url)
    assert (await here.post(text(prompt=IDS)))[0] == 200
    assert await metric(here, MISSING) == 0
    here = await site(store=node.url, prepare=announce)
    here.prefill[0].manifest = None
    assert (await here.post(text(prompt=IDS)))[0] == 200
    assert await metric(here, f'{MISSING}{{cause="not_named"}}') == 1


def put_none(engines: list[FakeEngine], cause: str | None) -> None:
    announce(engines)
    for engine in engines:
        engine.connector = {"blocks": 0, "cause": cause}


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


@pytest.mark.parametrize(
    ("cause", "body", "prepare"),
    [
        ("not_put", text(prompt=IDS), lambda engines: put_none(engines, None)),
        ("host_memory", text(prompt=IDS), lambda engines: put_none(engines, "host_memory")),
        ("not_put", text(prompt=IDS), lambda engines: put_none(engines, "a new one")),
        ("short_prompt", text(prompt="Hello"), lambda engines: put_none(engines, None)),
        ("unknown_tokens", chat(messages=[{"role": "user", "content": [PICTURE]}]), announce),
        ("timeout", text(prompt=IDS), announce),
    ],
)
async def test_a_prefill_leg_after_which_nothing_landed_is_counted_and_logged_with_its_cause(
    site: Open, node: StoreProcess, cause: str, body: Json, prepare: Prepare
) -> None:
    await asyncio.to_thread(store_blocks, node, 0)
    written = BytesIO()
    here = await site(
        store=node.url,
        landing_timeout_s=0.05,
        prepare=prepare,
        lines=RequestLog(written, plain=False),
    )
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    assert (await here.post(body, path))[0] == 200
    assert await metric(here, f'{MISSING}{{cause="{cause}"}}') == 1
    await here.app.close()
    assert json.loads(written.getvalue())["nothing_landed"] == cause


async def test_what_the_store_had_and_lost_since_is_told_apart(
    site: Open, node: StoreProcess
) -> None:
    def lose() -> None:
        with StoreClient(node.url) as client:
            assert client.delete(MANIFEST, HASHES[:64]) == 2

    await asyncio.to_thread(store_blocks, node, 2)
    here = await site(store=node.url, policy="prefix", landing_timeout_s=0.05, prepare=announce)
    here.prefill[0].mode = "held"
    task = asyncio.create_task(here.post(text(prompt=IDS)))
    await here.prefill[0].next_began()
    await asyncio.to_thread(lose)
    here.prefill[0].go.set()
    assert (await task)[0] == 200
    assert await metric(here, f'{MISSING}{{cause="evicted"}}') == 1


async def test_decode_waits_for_the_landing_and_the_lease_is_given_back(
    site: Open, node: StoreProcess
) -> None:
    await asyncio.to_thread(store_blocks, node, 0)
    here = await site(store=node.url, landing_timeout_s=30, prepare=announce)
    task = asyncio.create_task(here.post(text(prompt=IDS)))
    await here.prefill[0].next_began()
    assert here.decode[0].requests == []
    await asyncio.to_thread(store_blocks, node, 3)
    status, _, _ = await task
    assert status == 200
    assert len(here.decode[0].requests) == 1
    _, body = await here.get("/metrics")
    assert b'kvrouter:landings_total{outcome="landed"} 1.0' in body
    assert b"kvrouter:recompute_tokens 0.0" in body
    assert b"kvrouter:recompute_max_tokens 131072.0" in body
    await asyncio.to_thread(await_stat, node, "leases", 0)


async def test_the_store_is_asked_for_several_manifests_at_once(
    site: Open, node: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differ(engines: list[FakeEngine]) -> None:
        for number, engine in enumerate(engines):
            engine.manifest = manifest_of(4096 << number).digest.hex()

    here = await site(0, 2, store=node.url, policy="prefix", prepare=differ)
    together, match = asyncio.Barrier(2), NodesView.match

    async def meeting(*asked: Any) -> StoreMatch:
        async with asyncio.timeout(5):
            await together.wait()
        return await match(*asked)

    monkeypatch.setattr(NodesView, "match", meeting)
    assert (await here.post(text(prompt=IDS)))[0] == 200


async def test_a_landing_waits_only_for_what_the_store_did_not_hold(
    site: Open, node: StoreProcess
) -> None:
    await asyncio.to_thread(store_blocks, node, 2)
    here = await site(store=node.url, policy="prefix", landing_timeout_s=30, prepare=announce)
    task = asyncio.create_task(here.post(text(prompt=IDS)))
    await here.prefill[0].next_began()
    await asyncio.to_thread(await_stat, node, "waits", 1)
    assert here.decode[0].requests == []
    await asyncio.to_thread(store_blocks, node, 3)
    assert (await task)[0] == 200
    _, body = await here.get("/metrics")
    assert b'kvrouter:landings_total{outcome="landed"} 1.0' in body
    assert b"kvrouter:recompute_tokens 0.0" in body


async def test_a_prefix_that_goes_meanwhile_is_missed(site: Open, node: StoreProcess) -> None:
    await asyncio.to_thread(store_blocks, node, 2)
    here = await site(
        store=node.url,
        policy="prefix",
        landing_timeout_s=30,
        recompute_budget_tokens=0,
        prepare=announce,
    )
    task = asyncio.create_task(here.post(text(prompt=IDS)))
    await here.prefill[0].next_began()
    await asyncio.to_thread(await_stat, node, "waits", 1)
    await asyncio.to_thread(replace_second_by_third, node)
    assert here.decode[0].requests == []
    await asyncio.to_thread(store_blocks, node, 3)
    assert (await task)[0] == 200


async def test_what_the_store_holds_already_takes_no_prefill_leg(
    site: Open, node: StoreProcess
) -> None:
    await asyncio.to_thread(store_blocks, node, 3)
    here = await site(store=node.url, policy="prefix", prepare=announce)
    assert (await here.post(text(prompt=IDS)))[0] == 200
    assert here.prefill[0].requests == []
    _, body = await here.get("/metrics")
    assert b'kvrouter:prefix_hit_tokens_total{model="m",source="store"} 48.0' in body


async def test_what_does_not_land_is_recomputed_within_the_budget(
    site: Open, node: StoreProcess
) -> None:
    await asyncio.to_thread(store_blocks, node, 1)
    here = await site(store=node.url, landing_timeout_s=0.1, prepare=announce)
    assert (await here.post(text(prompt=IDS)))[0] == 200
    assert len(here.decode[0].requests) == 1


async def test_what_does_not_land_and_has_no_budget_waits(site: Open, node: StoreProcess) -> None:
    await asyncio.to_thread(store_blocks, node, 1)
    here = await site(
        store=node.url, landing_timeout_s=0.1, recompute_budget_tokens=0, prepare=announce
    )
    status, headers, _ = await here.post(text(prompt=IDS))
    assert (status, headers["retry-after"]) == (429, "1")
    assert here.decode[0].requests == []


async def test_a_store_that_dies_fails_no_request(site: Open, node: StoreProcess) -> None:
    await asyncio.to_thread(store_blocks, node, 3)
    here = await site(store=node.url, prepare=announce)
    assert (await here.post(text(prompt=IDS)))[0] == 200
    node.kill()
    for _ in range(3):
        assert (await here.post(text(prompt=IDS)))[0] == 200
    assert len(here.decode[0].requests) == 4


async def test_a_client_that_leaves_during_the_landing_ends_the_wait(
    site: Open, node: StoreProcess
) -> None:
    await asyncio.to_thread(store_blocks, node, 0)
    here = await site(store=node.url, landing_timeout_s=60, prepare=announce)
    task = asyncio.create_task(here.post(text(prompt=IDS)))
    await here.prefill[0].next_began()
    await asyncio.to_thread(await_stat, node, "waits", 1)
    task.cancel()
    await asyncio.to_thread(await_stat, node, "waits", 0)
    assert here.decode[0].requests == []

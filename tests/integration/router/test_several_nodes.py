"""Several nodes of the store, one per host: where KV lands, and where a leg may read it."""

import asyncio
import json
import re
import signal
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from time import monotonic, time
from typing import Any

import msgspec
import pytest
from tests.fakes.engine import BLOCK_TOKENS, FakeEngine
from tests.fakes.mooncake import free_ports
from tests.fakes.patience import eventually, until
from tests.fakes.store import StoreProcess, put_chain
from tests.integration.router.ahead import AHEAD, MANIFEST
from tests.integration.router.conftest import Json, Open, Site, metric, text

from kvrouter.app.core import STORE_DEADLINE_S
from kvrouter.engines.engine import Role
from kvrouter.prefix.index import block_ids
from kvrouter.tools.sim.serve import SimServer
from kvrouter.tools.sim.settings import SimSettings
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.connectors.vllm_tier.announced import Announced, announced
from kvrouter_store.events.publisher import EventSockets
from kvrouter_store.identity.chain import hash_tokens, root_hash

BLOCKS = 3


def ids(of: int) -> list[int]:
    """One of several prompts, each of BLOCKS blocks and a few tokens."""
    return list(range(of * 1000, of * 1000 + BLOCKS * BLOCK_TOKENS + 5))


def land(node: StoreProcess, of: int = 1, blocks: int = BLOCKS) -> None:
    with StoreClient(node.url) as client:
        client.register(MANIFEST)
        chain = hash_tokens(array("I", ids(of)), BLOCK_TOKENS, root=root_hash(None)).data
        put_chain(client, MANIFEST, chain[: 32 * blocks])


def stat(node: StoreProcess, name: str) -> int:
    with StoreClient(node.url) as client:
        return client.stats()[name]


def source(body: Json) -> Any:
    """The node that a leg's body names, with the blocks that it has and the own one lacks."""
    told = body.get("kv_transfer_params", {})
    node = told.get("kvstore", {}).get("source")
    assert (announced(told) or Announced(None, 0)).source == (node or "")
    return node


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[StoreProcess]]:
    """Two nodes that know the manifest."""
    with ExitStack() as stack:
        made = []
        for name in "ab":
            (tmp_path / name).mkdir()
            made.append(stack.enter_context(StoreProcess(tmp_path / name)))
            with StoreClient(made[-1].url) as client:
                client.register(MANIFEST)
        yield made


Two = Callable[..., Awaitable[Site]]


@pytest.fixture
def two(site: Open, nodes: list[StoreProcess]) -> Two:
    """Opens a site before both nodes: prefill at the first, decode at the second.

    `homes` of the engines, if they are others; None: an engine does not say.
    """

    async def opened(*counts: int, homes: list[str | None] | None = None, **settings: Any) -> Site:
        places = [node.url for node in nodes] if homes is None else homes

        def prepare(engines: list[FakeEngine]) -> None:
            for engine, home in zip(engines, places, strict=True):
                engine.manifest, engine.node, engine.waits = MANIFEST.digest.hex(), home, True

        settings = {"landing_timeout_s": 30, "prepare": prepare, **settings}
        return await site(*counts, store=[node.url for node in nodes], **settings)

    return opened


def ask(here: Site, of: int = 1, **more: Any) -> "asyncio.Task[tuple[int, dict[str, str], bytes]]":
    return asyncio.create_task(here.post(text(prompt=ids(of), **more)))


async def test_decode_reads_from_the_node_where_the_prompt_has_landed(
    two: Two, nodes: list[StoreProcess]
) -> None:
    here = await two()
    task = ask(here)
    sent = await here.prefill[0].next_began()
    await asyncio.to_thread(eventually, lambda: stat(nodes[0], "waits") == 1)
    assert (stat(nodes[1], "waits"), here.decode[0].requests) == (0, [])
    await asyncio.to_thread(land, nodes[0])
    assert (await task)[0] == 200
    assert (source(sent), source(here.decode[0].requests[0])) == (None, nodes[0].url)
    assert await metric(here, 'kvrouter:landings_total{outcome="landed"}') == 1
    assert await asyncio.to_thread(eventually, lambda: stat(nodes[0], "leases") == 0)


async def test_an_engine_at_the_node_of_the_landing_is_told_of_no_other(
    two: Two, nodes: list[StoreProcess]
) -> None:
    here = await two(homes=[nodes[1].url, nodes[1].url.replace("kv:", "KV:") + "/"])
    await asyncio.to_thread(land, nodes[1])
    assert (await ask(here))[0] == 200
    assert "kv_transfer_params" not in here.decode[0].requests[0]


@pytest.mark.parametrize("at", [0, 1])
async def test_where_no_engine_names_its_node_the_landing_is_found_at_any(
    two: Two, nodes: list[StoreProcess], at: int
) -> None:
    here = await two(homes=[None, None])
    await asyncio.to_thread(land, nodes[at])
    assert (await ask(here))[0] == 200
    assert source(here.decode[0].requests[0]) == nodes[at].url


async def test_what_another_node_holds_takes_no_prefill_leg(
    two: Two, nodes: list[StoreProcess]
) -> None:
    await asyncio.to_thread(land, nodes[0])
    here = await two(policy="prefix")
    assert (await ask(here))[0] == 200
    assert here.prefill[0].requests == []
    assert source(here.decode[0].requests[0]) == nodes[0].url
    assert await metric(here, 'kvrouter:prefix_hit_tokens_total{model="m",source="store"}') == 48


async def test_a_prefill_leg_reads_what_another_node_has_more_of_the_prefix(
    two: Two, nodes: list[StoreProcess]
) -> None:
    await asyncio.to_thread(land, nodes[0], 1, 1)
    await asyncio.to_thread(land, nodes[1], 1, 2)
    here = await two(policy="prefix")
    task = ask(here)
    sent = await here.prefill[0].next_began()
    await asyncio.to_thread(land, nodes[0])
    assert (await task)[0] == 200
    assert source(sent) == nodes[1].url
    assert source(here.decode[0].requests[0]) == nodes[0].url


async def test_a_chat_names_its_source_beside_its_token_ids(
    two: Two, nodes: list[StoreProcess]
) -> None:
    here = await two(policy="prefix", landing_timeout_s=0.05)
    content = [{"role": "user", "content": "x" * 100}]
    body = {"model": "m", "messages": content, "max_tokens": 4}
    task = asyncio.create_task(here.post(body, "/v1/chat/completions"))
    sent = await here.prefill[0].next_began()
    tokens = sent["kv_transfer_params"]["prompt_token_ids"]
    assert (await task)[0] == 200
    chain = hash_tokens(array("I", tokens), BLOCK_TOKENS, root=root_hash(None)).data

    def put() -> None:
        with StoreClient(nodes[0].url) as client:
            client.register(MANIFEST)
            put_chain(client, MANIFEST, chain)

    await asyncio.to_thread(put)
    assert (await here.post(body, "/v1/chat/completions"))[0] == 200
    params = here.decode[0].requests[-1]["kv_transfer_params"]
    assert params["prompt_token_ids"] == tokens
    payload = params["kv_hint"]["actions"][0]["payload"]
    assert payload == {
        "source_control_endpoint": nodes[0].url,
        "block_hashes": block_ids(chain).tolist(),
    }


@pytest.mark.parametrize("mode", AHEAD)
async def test_a_leg_that_is_sent_ahead_waits_at_the_node_of_the_prefill_engine(
    two: Two, nodes: list[StoreProcess], mode: str
) -> None:
    here = await two(decode_dispatch=mode)
    here.prefill[0].mode = here.decode[0].mode = "held"
    task = ask(here)
    await here.prefill[0].next_began()
    if mode == "chunk":
        await asyncio.to_thread(land, nodes[0], 1, 1)
    body = await here.decode[0].next_began()
    told = body["kv_transfer_params"]["kvstore"]
    assert (told["coming_blocks"], told["source"]) == (BLOCKS, nodes[0].url)
    here.prefill[0].go.set()
    await asyncio.to_thread(land, nodes[0])
    here.decode[0].go.set()
    assert (await task)[0] == 200


async def test_nothing_is_sent_ahead_where_nobody_knows_the_node(
    two: Two, nodes: list[StoreProcess]
) -> None:
    here = await two(decode_dispatch="at-once", homes=[None, nodes[1].url])
    await asyncio.to_thread(land, nodes[0])
    assert (await ask(here))[0] == 200
    assert "coming_blocks" not in json.dumps(here.decode[0].requests[0])


async def test_a_leg_that_another_prefill_engine_takes_lands_at_its_node(
    two: Two, nodes: list[StoreProcess]
) -> None:
    homes = [nodes[0].url, nodes[1].url, nodes[0].url]
    settings: Json = {"decode_dispatch": "at-once", "health_interval_s": 60}
    here = await two(2, 1, homes=homes, **settings)
    here.decode[0].mode = "held"
    await here.prefill[0].stop()
    await asyncio.to_thread(land, nodes[1])
    before = []
    for _ in range(2):  # the prefill engines take turns
        here.decode[0].go.clear()
        task = ask(here)
        while (told := source(await here.decode[0].next_began())) != nodes[1].url:
            before.append(told)
        here.decode[0].go.set()
        assert (await task)[0] == 200
    assert before == [nodes[0].url]


async def test_nodes_are_found_by_discovery_and_left_when_it_names_them_no_longer(
    site: Open, nodes: list[StoreProcess], tmp_path: Path
) -> None:
    named = tmp_path / "members.yaml"
    for node, of in zip(nodes, (1, 2), strict=True):
        await asyncio.to_thread(land, node, of)
    named.write_text(f"store: [{nodes[0].url}]\n")

    def prepare(engines: list[FakeEngine]) -> None:
        for engine in engines:
            engine.manifest = MANIFEST.digest.hex()

    here = await site(
        policy="prefix",
        store_discovery=True,
        discovery=[str(named)],
        prepare=prepare,
        landing_timeout_s=0.1,
    )
    view = here.app.core.nodes
    assert view is not None

    async def known(count: int) -> None:
        await until(lambda: len(view.clients) == count and not view.away)

    await known(1)
    assert (await ask(here, 1))[0] == 200
    assert here.prefill[0].requests == []
    named.write_text("store:\n" + "".join(f"- {node.url}\n" for node in nodes))
    await known(2)
    assert (await ask(here, 2))[0] == 200
    assert here.prefill[0].requests == []
    assert source(here.decode[0].requests[-1]) == nodes[1].url
    named.write_text(f"store: [{nodes[1].url}]\n")
    await known(1)
    assert [(await ask(here, of))[0] for of in (1, 2)] == [200, 200]
    assert [body["prompt"] for body in here.prefill[0].requests] == [ids(1)]
    named.write_text("decode: []\n")
    await known(0)
    assert (await ask(here, 2))[0] == 200


async def test_a_router_without_a_store_says_that_it_uses_no_node_of_discovery(
    site: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = tmp_path / "members.yaml"
    named.write_text("store: [kv://127.0.0.1:1]\n")
    here = await site(discovery=[str(named)])
    assert (await here.post(text()))[0] == 200
    assert "kv://127.0.0.1:1: store nodes are not used until the router starts" in caplog.text


async def test_a_node_that_dies_costs_hits_and_no_request(
    two: Two, nodes: list[StoreProcess], caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(land, nodes[0], 1)
    await asyncio.to_thread(land, nodes[1], 2)
    here = await two(policy="prefix", landing_timeout_s=0.1)
    assert [(await ask(here, of))[0] for of in (1, 2)] == [200, 200]
    assert here.prefill[0].requests == []
    nodes[1].kill()
    await until(lambda: here.app.core.nodes is not None and here.app.core.nodes.away)
    assert [(await ask(here, of))[0] for of in (1, 2)] == [200, 200]
    assert [body["prompt"] for body in here.prefill[0].requests] == [ids(2)]
    _, health = await here.get("/health")
    assert json.loads(health)["lacking"] == [f"the store node {nodes[1].url} is not connected"]
    up = [f'kvrouter:store_connected{{node="{node.url}"}}' for node in nodes]
    assert [await metric(here, line) for line in up] == [1, 0]
    nodes[1].start()
    await until(lambda: here.app.core.nodes is not None and not here.app.core.nodes.away)
    assert f"store node {nodes[1].url} is away: it ended the connection" in caplog.text
    await asyncio.to_thread(land, nodes[1], 3)
    assert (await ask(here, 3))[0] == 200
    assert len(here.prefill[0].requests) == 1


async def test_engines_whose_node_is_away_get_no_prefill_leg_and_no_decode_leg_before_others(
    two: Two, nodes: list[StoreProcess]
) -> None:
    homes: list[str | None] = [*(node.url for node in nodes)] * 2
    here = await two(2, 2, homes=homes, policy="prefix", landing_timeout_s=0.1)
    nodes[1].kill()
    await until(lambda: here.app.core.nodes is not None and here.app.core.nodes.away)
    assert [(await ask(here, of))[0] for of in (1, 2, 3, 4)] == [200] * 4
    assert [len(each.requests) for each in (*here.prefill, *here.decode)] == [4, 0, 4, 0]
    await here.prefill[0].stop()
    await until(lambda: len(here.app.core.pool.engines(Role.PREFILL)) == 1)
    assert (await ask(here, 5))[0] == 200
    assert here.prefill[1].requests == []
    assert await metric(here, 'kvrouter:plans_total{why="no prefill engine"}') == 1


async def test_a_node_that_hangs_holds_a_request_up_within_its_deadline_once(
    two: Two, nodes: list[StoreProcess], caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(land, nodes[0], 1)
    await asyncio.to_thread(land, nodes[1], 2)
    here = await two(policy="prefix", landing_timeout_s=0.1)
    nodes[1].send(signal.SIGSTOP)
    try:
        begun_s = monotonic()
        assert [(await ask(here, of))[0] for of in (1, 2, 1)] == [200, 200, 200]
        assert monotonic() - begun_s < STORE_DEADLINE_S + 5
        assert [body["prompt"] for body in here.prefill[0].requests] == [ids(2)]
        assert source(here.decode[0].requests[0]) == nodes[0].url
        assert "is away: it did not answer within the deadline" in caplog.text
    finally:
        nodes[1].send(signal.SIGCONT)
    await until(lambda: here.app.core.nodes is not None and not here.app.core.nodes.away)
    assert (await ask(here, 2))[0] == 200
    assert len(here.prefill[0].requests) == 1


@asynccontextmanager
async def simulated(
    nodes: list[StoreProcess],
) -> AsyncIterator[tuple[list[list[str]], Callable[[Site, int], Awaitable[None]]]]:
    """Addresses of engines, prefill at the first node and decode at the second, and a check.

    It asks for one of the prompts: the answer must be that of an engine alone.
    """
    common: Json = {"model": "tiny", "port": 0, "block_size": 16, "seed": 1}
    common |= {"kv_bytes_per_token": 256, "store_deadline": "500ms"}
    common["store_neighbours"] = ",".join(node.url for node in nodes)
    made: list[Json] = [
        {"role": "prefill", "store": nodes[0].url},
        {"role": "decode", "store": nodes[1].url},
        {},
    ]
    sims = [SimServer(SimSettings(**common, **own)) for own in made]
    try:
        ports = [await sim.start() for sim in sims]

        async def agree(here: Site, of: int) -> None:
            body: Json = {"model": "tiny", "prompt": ids(of), "max_tokens": 20, "ignore_eos": True}
            alone = f"http://127.0.0.1:{ports[2]}/v1/completions"
            async with here.http.post(alone, json=body) as answer:
                wanted = (await answer.json())["choices"]
            status, _, answered = await here.post(body)
            assert (status, json.loads(answered)["choices"]) == (200, wanted)

        yield [[f"127.0.0.1:{port}"] for port in ports[:2]], agree
    finally:
        await asyncio.gather(*(sim.close() for sim in sims))


class Claims:
    """A publisher that says in the name of a node what a test wants."""

    def __init__(self) -> None:
        endpoints = [f"tcp://127.0.0.1:{port}" for port in free_ports(2)]
        self.sockets = EventSockets(endpoints[0], endpoints[1])
        self.port, self.replay_port = (int(each.rpartition(":")[2]) for each in endpoints)
        self._numbers = count()
        self.say({"type": "AllBlocksCleared"})

    def hold(self, of: int, manifest: bytes = MANIFEST.digest) -> None:
        chain = hash_tokens(array("I", ids(of)), BLOCK_TOKENS, root=root_hash(None)).data
        stored: Json = {"type": "BlockStored", "parent_block_hash": None, "token_ids": []}
        stored |= {"block_hashes": [chain[at : at + 32] for at in range(0, len(chain), 32)]}
        self.say(stored | {"block_size": BLOCK_TOKENS, "manifest": manifest})

    def say(self, event: Json) -> None:
        number = next(self._numbers).to_bytes(8, "big")
        message = [b"", number, msgspec.msgpack.encode([time(), [event], 0])]
        self.sockets.kept.append(message)
        self.sockets.send(message)


@pytest.fixture
async def claims(nodes: list[StoreProcess]) -> AsyncIterator[tuple[list[Claims], Json]]:
    """What is claimed of both nodes, and the settings of a router that hears it."""
    made = [Claims() for _ in nodes]
    places = [node.url.partition("://")[2] for node in nodes]
    pairs = list(zip(places, made, strict=True))
    heard = [f"{place}={each.port}" for place, each in pairs]
    replays = [f"{place}={each.replay_port}" for place, each in pairs]
    yield made, {"store_events_connect": heard, "store_events_replay": replays}
    for each in made:
        each.sockets.close()


async def known(here: Site, reason: str = "complete") -> None:
    """Wait until the router hears both nodes."""
    view = here.app.core.nodes
    assert view is not None
    index = view.index
    assert index is not None
    await until(lambda: [each.value for _, each in index.states()] == [reason] * 2)


async def test_of_nodes_that_publish_one_is_asked_for_each_prompt(
    two: Two, nodes: list[StoreProcess], claims: tuple[list[Claims], Json]
) -> None:
    said, settings = claims
    await asyncio.to_thread(land, nodes[0], 1)
    said[0].hold(1)
    here = await two(policy="prefix", **settings)
    await known(here)
    assert [(await ask(here))[0] for _ in range(3)] == [200] * 3
    for name, hits in (("hits_total.memory", 3 * BLOCKS), ("misses_total.memory", 0)):
        assert [await asyncio.to_thread(stat, node, name) for node in nodes] == [hits, 0]
    assert here.prefill[0].requests == []
    state = f'kvrouter:store_index_state{{node="{nodes[0].url}",reason="complete",state="exact"}}'
    assert await metric(here, state) == 1


async def test_blocks_that_an_index_has_and_no_node_cost_hits_and_no_request(
    site: Open, nodes: list[StoreProcess], claims: tuple[list[Claims], Json]
) -> None:
    said, settings = claims
    async with simulated(nodes) as (addresses, agree):
        urls = [node.url for node in nodes]
        here = await site(0, 0, addresses=addresses, store=urls, policy="prefix", **settings)
        await known(here)
        with StoreClient(nodes[0].url) as client:
            digests = {each.digest for each in client.manifests()} - {MANIFEST.digest}
        for of in (1, 2):
            for each in said[:of]:  # of the second prompt also the node that is not asked
                each.hold(of, *digests)
            await agree(here, of)


async def test_simulated_engines_at_two_nodes_answer_as_one_alone_whatever_befalls_a_node(
    site: Open, nodes: list[StoreProcess]
) -> None:
    async with simulated(nodes) as (addresses, agree):
        urls = [node.url for node in nodes]
        here = await site(0, 0, addresses=addresses, store=urls, policy="prefix")
        for of in (1, 2, 1):
            await agree(here, of)
        assert await metric(here, 'kvrouter:landings_total{outcome="landed"}') == 2
        loaded = re.compile(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", re.M)
        async with here.http.get(f"http://{addresses[1][0]}/metrics") as answer:
            (tokens,) = loaded.findall(await answer.text())
        assert float(tokens) == 2 * BLOCKS * BLOCK_TOKENS  # the third prompt is in its own cache
        nodes[1].send(signal.SIGSTOP)
        try:
            await agree(here, 3)
        finally:
            nodes[1].send(signal.SIGCONT)
        nodes[0].kill()
        await agree(here, 1)
        await agree(here, 4)

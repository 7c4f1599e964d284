"""Data-parallel ranks of one engine: each is chosen, asked, counted and believed by itself."""

import asyncio
import logging
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from itertools import count

import msgspec
import pytest
import zmq
from tests.contract.families.conftest import Open, Site, ids, text
from tests.contract.families.test_contract import EITHER, EVERY_PAIR, PINNING, leave
from tests.contract.families.test_detection import detected
from tests.fakes.patience import until
from tests.fakes.pd import Network, PdEngine
from tests.fakes.pd_mooncake import MooncakeEngine
from tests.fakes.pd_sglang import SglangEngine

from kvrouter_store.identity.chain import hash_tokens, root_hash

pytestmark = [
    pytest.mark.tested("vllm", "data-parallel ranks", "double"),
    pytest.mark.tested("sglang", "data-parallel ranks", "double"),
]
RANKED = EVERY_PAIR
Prepare = Callable[[list[PdEngine]], None]


def ranks(count: int, first: int = 0) -> Prepare:
    """Gives every engine that many data-parallel ranks."""

    def prepare(engines: list[PdEngine]) -> None:
        for engine in engines:
            engine.ranks, engine.first_rank = count, first

    return prepare


def served(engines: list[PdEngine]) -> list[Counter[int]]:
    """Requests of each rank of each engine."""
    return [Counter(engine.ranks_of) for engine in engines]


@EITHER
@RANKED
async def test_each_rank_is_asked_in_its_turn_whatever_rank_the_client_names(
    open_site: Open, family: str, stream: bool
) -> None:
    here = await open_site(family, 2, 2, prepare=ranks(3))
    for first in range(12):
        body, header = ids(300 + first, stream=stream), {"x-data-parallel-rank": "1"}
        status, _ = await here.post(body, headers=header)
        assert status == 200
    for first in range(6):
        await here.same(ids(300 + first, stream=stream))
    for engines in (here.prefill, here.decode):
        assert served(engines) == [{0: 3, 1: 3, 2: 3}] * 2


@RANKED
async def test_samples_and_prompts_of_one_request_are_spread_over_ranks(
    open_site: Open, family: str
) -> None:
    here = await open_site(family, 1, 1, prepare=ranks(2))
    prompts = [list(range(first, first + 40)) for first in (300, 400, 500, 600)]
    status, _ = await here.post({"model": "m", "prompt": prompts, "max_tokens": 3})
    assert status == 200
    assert served(here.engines) == [{0: 2, 1: 2}] * 2


@RANKED
async def test_ranks_have_names_of_their_own_in_metrics(open_site: Open, family: str) -> None:
    here = await open_site(family, prepare=ranks(2))
    for engine, role in ((here.prefill[0], "prefill"), (here.decode[0], "decode")):
        for rank in (0, 1):
            name = f'engine="{engine.address}@{rank}",role="{role}"'
            assert await here.metric(f"kvrouter:worker_up{{{name}}}") == 1
        assert await here.metric(f'kvrouter:worker_up{{engine="{engine.address}",') == 0


@RANKED
async def test_an_engine_that_is_gone_takes_its_ranks_with_it(open_site: Open, family: str) -> None:
    here = await open_site(family, 2, 2, prepare=ranks(3))
    await here.prefill[0].stop()
    await here.decode[0].stop()
    for first in range(8):
        await here.same(ids(300 + first))
    assert [len(engine.requests) for engine in (*here.prefill, *here.decode)] == [0, 8, 0, 8]
    gone = [t for t in here.app.core.pool.targets() if t.identity is None]
    assert len(gone) == 6


@RANKED
async def test_an_engine_that_is_removed_by_force_takes_the_legs_of_all_its_ranks(
    open_site: Open, family: str
) -> None:
    here = await open_site(family, 1, 2, prepare=ranks(2), admin=True)
    leaving = here.decode[0]
    leaving.mode = "hang"
    asked = [asyncio.create_task(here.same(ids(300 + first))) for first in range(4)]
    for _ in range(2):
        await leaving.next_began()
    url = f"http://127.0.0.1:{here.port}/workers/{leaving.address}?force=true"
    async with here.http.delete(url) as answer:
        assert (answer.status, (await answer.json())["cut"]) == (200, 2)
    await asyncio.gather(*asked)
    assert here.app.core.pool.find(leaving.address) is None
    assert len(here.decode[1].requests) == 4


@RANKED
async def test_after_one_rank_has_failed_another_engine_is_asked_before_its_siblings(
    open_site: Open, family: str
) -> None:
    here = await open_site(family, 1, 2, prepare=ranks(4))
    here.decode[0].mode = "drop"
    for first in range(4):
        await here.same(ids(300 + first))
    assert len(here.decode[1].requests) == 4
    assert len(here.decode[0].requests) <= 4


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@RANKED
async def test_an_engine_with_fewer_ranks_than_it_reported_is_identified_again(
    open_site: Open, family: str, leg: str
) -> None:
    """As vLLM's /scale_elastic_ep leaves one behind: it refuses a rank that is no more."""
    here = await open_site(family, prepare=ranks(4), engine_wait_s=10.0)
    (shrunk,) = here.prefill if leg == "prefill" else here.decode
    shrunk.ranks = 2
    for first in range(4):
        await here.same(ids(300 + first))
    known = here.app.core.pool.find(shrunk.address)
    assert known is not None
    await until(lambda: known.identity is not None and len(known.ranks) == 2)
    for first in range(4):
        await here.same(ids(300 + first))


@RANKED
async def test_with_a_size_of_one_the_engine_spreads_requests_itself(
    open_site: Open, family: str
) -> None:
    here = await open_site(family, prepare=ranks(2), data_parallel_size=["1"])
    for first in range(4):
        await here.same(ids(300 + first))
    told = [h.get("x-data-parallel-rank") for engine in here.decode for h in engine.headers]
    assert told == [None] * 4
    divided = [bool(engine.ranks) for engine in here.app.core.pool.all()]
    assert divided == [family in ("mooncake", "p2p"), False]  # whose decode legs must name a rank


@pytest.mark.parametrize("family", PINNING)
async def test_kv_that_ranks_keep_in_vain_is_released_at_once(open_site: Open, family: str) -> None:
    here = await open_site(family, 1, 1, prepare=ranks(2))
    here.decode[0].mode = "held"
    asked = [asyncio.create_task(here.post(ids(300 + i))) for i in range(4)]
    for _ in range(4):
        await here.decode[0].next_began()
    for task in asked:
        task.cancel()
    await here.quiet()
    assert await here.metric('kvrouter:stranded_release_total{outcome="released"}') == 4


@RANKED
async def test_a_client_that_leaves_frees_the_rank(open_site: Open, family: str) -> None:
    here = await open_site(family, prepare=ranks(2))
    here.decode[0].mode = "hang"
    await leave(here, here.decode[0], stream=True)
    await here.quiet()


async def test_an_engine_drains_when_the_last_of_its_ranks_is_idle(open_site: Open) -> None:
    here = await open_site("store", 1, 2, prepare=ranks(2), admin=True)
    leaving = here.decode[0]
    leaving.mode = "held"
    asked = [asyncio.create_task(here.post(ids(300 + i))) for i in range(4)]
    for _ in range(2):
        await leaving.next_began()
    url = f"http://127.0.0.1:{here.port}/workers/{leaving.address}"
    async with here.http.delete(url) as answer:
        card = await answer.json()
    assert (answer.status, card["load"], card["removed"]) == (202, 2, False)
    assert [(rank["id"], rank["load"]) for rank in card["ranks"]] == [
        (f"{leaving.address}@{rank}", 1) for rank in (0, 1)
    ]
    leaving.go.set()
    for task in asked:
        assert (await task)[0] == 200
    await until(lambda: here.app.core.pool.find(leaving.address) is None)
    async with here.http.get(f"http://127.0.0.1:{here.port}/metrics") as page:
        assert leaving.address not in await page.text()


# -- where the ranks are known from


async def test_ranks_of_a_hybrid_load_balancer_are_asked_from_zero_and_numbered_otherwise(
    open_site: Open,
) -> None:
    here = await open_site("store", prepare=ranks(2, first=4))
    assert [target.event_rank for target in here.app.core.pool.targets()] == [4, 5, 4, 5]
    for first in range(4):
        await here.same(ids(300 + first))
    assert served(here.engines) == [{0: 2, 1: 2}] * 2


async def test_a_size_that_an_engine_contradicts_keeps_it_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = PdEngine(Network(), "decode")
    engine.ranks = 2
    with caplog.at_level(logging.WARNING):
        (found,) = await detected(engine, data_parallel_size=["4"])
    assert found.identity is None
    assert "it reports 2 data-parallel ranks, not 4, as --data-parallel-size says" in caplog.text


async def test_the_configured_size_counts_if_an_engine_reports_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As vLLM with --disable-log-stats."""
    monkeypatch.setattr(PdEngine, "metrics", lambda self: b"")
    one, two = PdEngine(Network(), "decode"), PdEngine(Network(), "decode")
    await one.start()
    found = await detected(two, data_parallel_size=["3", f"{one.address}=2"])
    assert [len(engine.ranks) for engine in found] == [3]
    await one.stop()


async def test_mooncake_does_not_join_before_its_bootstrap_server_knows_every_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = Network()
    prefill, decode = MooncakeEngine(network, "prefill"), MooncakeEngine(network, "decode")
    prefill.ranks, prefill.registered, prefill.bootstrap_port = 2, 1, free_ports(1)
    port = [str(prefill.bootstrap_port)]
    with caplog.at_level(logging.WARNING):
        found, _ = await detected(prefill, decode, kv_connector="mooncake", bootstrap_port=port)
    assert found.identity is None
    assert "not all are there yet" in caplog.text


async def test_the_room_and_the_hint_name_the_rank(open_site: Open) -> None:
    here = await open_site("sglang", 1, 1, prepare=ranks(3))
    for first in range(9):
        await here.same(ids(300 + first))
    (prefill,) = here.prefill
    assert isinstance(prefill, SglangEngine)
    told = [
        (body["bootstrap_room"] % 3, body["disagg_prefill_dp_rank"]) for body in prefill.requests
    ]
    assert told == [(rank, rank) for rank in prefill.ranks_of]
    assert len({body["bootstrap_room"] for body in prefill.requests}) == 9


# -- KV events


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for first in range(40000 + time.monotonic_ns() % 10000, 60000, count):
        held = [socket.socket() for _ in range(count)]
        try:
            for port, one in enumerate(held, first):
                one.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for one in held:
                one.close()
    raise OSError("no free ports in a row")


async def publish(here: Site, engine: PdEngine, port: int, number: int, prompt: list[int]) -> None:
    """As a rank's publisher does: it holds the blocks of `prompt` from now on."""
    hashes = hash_tokens(prompt, 16, root=root_hash(None)).data
    names = [int.from_bytes(hashes[at + 24 : at + 32], "big") for at in range(0, len(hashes), 32)]
    event = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": prompt[: 16 * len(names)],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
    }
    known = here.app.core.pool.find(engine.address)
    assert known is not None
    target = known.rank_of_events(number)
    assert target is not None
    context = zmq.Context()
    try:
        publisher = context.socket(zmq.PUB)
        publisher.connect(f"tcp://127.0.0.1:{port + number}")
        topic = f"kv@{engine.address}".encode()
        payload = msgspec.msgpack.encode([0.0, [event], number])
        sequence = count()

        def publish() -> None:  # again and again: a PUB drops early ones
            publisher.send_multipart([topic, struct.pack(">Q", next(sequence)), payload])

        index = here.app.core.index
        await until(lambda: index.match(hashes).get(target), meanwhile=publish)
    finally:
        context.destroy(linger=0)


async def test_a_prompt_goes_to_the_rank_whose_events_say_that_it_holds_it(open_site: Open) -> None:
    port = free_ports(6)
    bind = f"tcp://127.0.0.1:{port}"
    here = await open_site(
        "store", 1, 1, prepare=ranks(3, first=3), policy="prefix", kv_events_bind=bind
    )
    (decode,) = here.decode
    held = {rank: list(range(1000 * rank, 1000 * rank + 80)) for rank in (0, 1, 2)}
    for rank, prompt in held.items():
        await publish(here, decode, port, 3 + rank, prompt)
    for rank in (2, 0, 1, 1, 2, 0):
        body = {"model": "m", "prompt": [*held[rank], 7], "max_tokens": 2}
        await here.same(body)
        assert decode.ranks_of[-1] == rank
    assert here.prefill[0].requests == []
    assert await here.metric('kvrouter:plans_total{why="little missing"}') == 6


async def test_events_of_a_rank_that_an_engine_has_not_are_counted(
    open_site: Open, caplog: pytest.LogCaptureFixture
) -> None:
    bind = f"tcp://127.0.0.1:{free_ports(2)}"
    here = await open_site("store", prepare=ranks(2), policy="prefix", kv_events_bind=bind)
    payload = msgspec.msgpack.encode([0.0, [], 9])
    context = zmq.Context()
    try:
        publisher = context.socket(zmq.PUB)
        publisher.connect(bind)
        with caplog.at_level(logging.WARNING):
            topic = f"kv@{here.decode[0].address}".encode()
            await until(
                lambda: here.metric('kvrouter:kv_event_total{kind="unknown_rank"}'),
                meanwhile=lambda: publisher.send_multipart([topic, bytes(8), payload]),
                look_s=0.01,
            )
    finally:
        context.destroy(linger=0)
    assert "it has no data-parallel rank 9" in caplog.text


async def test_a_port_in_use_is_logged_and_costs_only_events(
    open_site: Open, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_ports(2)
    with socket.socket() as other, caplog.at_level(logging.ERROR):
        other.bind(("127.0.0.1", port + 1))
        other.listen()
        bind = f"tcp://127.0.0.1:{port}"
        here = await open_site("store", prepare=ranks(2), kv_events_bind=bind)
        assert f"cannot be taken at tcp://127.0.0.1:{port + 1}" in caplog.text
        await here.same(text())

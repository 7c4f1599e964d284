"""Decode legs that are sent before their KV has landed, through a real node of the store."""

import asyncio

import pytest
from tests.fakes.engine import BLOCK_TOKENS, FakeEngine
from tests.fakes.store import StoreProcess, manifest_of
from tests.integration.router.ahead import AHEAD, BLOCKS, IDS, ask, await_stat, land, told, waiting
from tests.integration.router.conftest import Open, metric, text

MODES = ("landing", *AHEAD)


@pytest.mark.parametrize("stream", [False, True])
async def test_at_once_both_legs_go_together_and_decode_is_told_what_comes(
    ahead: Open, node: StoreProcess, stream: bool
) -> None:
    here = await ahead("at-once")
    task = ask(here, stream=stream)
    await here.prefill[0].next_began()
    body = await here.decode[0].next_began()
    assert told(body) == {"coming_blocks": BLOCKS, "wait_s": 630}
    assert body["prompt"] == IDS
    await land(node)
    here.decode[0].go.set()
    status, _, answer = await task
    assert status == 200
    assert b" t3" in answer
    assert len(here.decode[0].requests) == 1
    assert await metric(here, 'kvrouter:decode_ahead_total{outcome="answered"}') == 1


async def test_with_chunk_the_decode_leg_goes_when_the_first_blocks_landed(
    ahead: Open, node: StoreProcess
) -> None:
    here = await ahead("chunk", dispatch_chunk_blocks=2)
    task = ask(here)
    await here.prefill[0].next_began()
    await asyncio.to_thread(await_stat, node, "waits", 2)
    await land(node, 1)
    assert here.decode[0].requests == []
    await land(node, 2)
    assert told(await here.decode[0].next_began())["coming_blocks"] == BLOCKS
    await land(node)
    here.prefill[0].go.set()
    here.decode[0].go.set()
    assert (await task)[0] == 200


async def test_with_chunk_what_the_store_held_before_sends_nothing(
    ahead: Open, node: StoreProcess
) -> None:
    await land(node, 2)
    here = await ahead("chunk", policy="prefix")
    task = ask(here)
    await here.prefill[0].next_began()
    await asyncio.to_thread(await_stat, node, "waits", 2)
    assert here.decode[0].requests == []
    await land(node, 3)
    await here.decode[0].next_began()
    await land(node)
    here.decode[0].go.set()
    assert (await task)[0] == 200


async def test_with_landing_nothing_is_sent_ahead(ahead: Open, node: StoreProcess) -> None:
    here = await ahead("landing")
    task = ask(here)
    await here.prefill[0].next_began()
    here.prefill[0].go.set()
    here.decode[0].go.set()
    await land(node)
    assert (await task)[0] == 200
    assert "kv_transfer_params" not in here.decode[0].requests[0]


def says_nothing(engines: list[FakeEngine]) -> None:
    waiting(engines)
    engines[-1].waits = False


def needs_other_kv(engines: list[FakeEngine]) -> None:
    waiting(engines)
    engines[-1].manifest = manifest_of(8192).digest.hex()


@pytest.mark.parametrize("mode", AHEAD)
async def test_an_engine_that_would_not_wait_gets_its_leg_after_the_landing(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode, prepare=says_nothing)
    task = ask(here)
    await here.prefill[0].next_began()
    await land(node)
    assert here.decode[0].requests == []
    here.prefill[0].go.set()
    here.decode[0].go.set()
    assert (await task)[0] == 200
    assert "kv_transfer_params" not in here.decode[0].requests[0]


@pytest.mark.parametrize("mode", AHEAD)
async def test_a_text_whose_tokens_nobody_knows_goes_after_the_landing(
    ahead: Open, mode: str
) -> None:
    here = await ahead(mode, landing_timeout_s=0.1)
    here.prefill[0].mode = here.decode[0].mode = "ok"
    assert (await here.post(text()))[0] == 200
    assert "kv_transfer_params" not in here.decode[0].requests[0]


@pytest.mark.parametrize("mode", AHEAD)
async def test_a_chat_that_is_tokenised_first_is_sent_ahead_with_its_ids(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode, policy="prefix")
    here.decode[0].mode = "ok"
    messages = [{"role": "user", "content": "x" * 100}]
    body = {"model": "m", "messages": messages, "max_tokens": 4}
    task = asyncio.create_task(here.post(body, "/v1/chat/completions"))
    sent = await here.prefill[0].next_began()
    ids = sent["kv_transfer_params"]["prompt_token_ids"]
    await land(node, len(ids) // BLOCK_TOKENS, ids)
    got = await here.decode[0].next_began()
    assert got["kv_transfer_params"]["prompt_token_ids"] == ids
    assert told(got)["coming_blocks"] == (len(ids) - 1) // BLOCK_TOKENS
    assert (await task)[0] == 200


@pytest.mark.parametrize("mode", MODES)
async def test_many_requests_at_once_leave_nothing_behind(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode, 2, 2)
    for engine in (*here.prefill, *here.decode):
        engine.mode = "ok"
    tasks = [ask(here, stream=number % 2 == 0) for number in range(20)]
    await land(node)
    assert [answer[0] for answer in await asyncio.gather(*tasks)] == [200] * 20

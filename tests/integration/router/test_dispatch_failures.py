"""Decode legs ahead of a landing that does not come: withdrawn, bounded, never left behind."""

import asyncio

import pytest
from tests.fakes.patience import until
from tests.fakes.store import StoreProcess
from tests.integration.router.ahead import AHEAD, ask, await_stat, both_began, land
from tests.integration.router.conftest import Open, metric

from kvrouter_store.client.blocking import StoreClient


@pytest.mark.parametrize("mode", AHEAD)
async def test_a_prefill_engine_that_dies_withdraws_the_decode_leg_and_decode_computes(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode)
    task = ask(here)
    await both_began(here, node, mode)
    await here.prefill[0].stop()
    await here.decode[0].next_left()
    here.decode[0].go.set()
    assert (await task)[0] == 200
    first, second = here.decode[0].requests
    assert "kv_transfer_params" in first
    assert "kv_transfer_params" not in second
    assert await metric(here, 'kvrouter:decode_ahead_total{outcome="withdrawn"}') == 1
    assert await metric(here, "kvrouter:recompute_tokens") == 0


@pytest.mark.parametrize("mode", AHEAD)
async def test_beyond_the_budget_a_decode_leg_is_withdrawn_and_the_client_asked_to_wait(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode, recompute_budget_tokens=0)
    task = ask(here)
    await both_began(here, node, mode)
    await here.prefill[0].stop()
    await here.decode[0].next_left()
    status, headers, _ = await task
    assert (status, headers["retry-after"]) == (429, "1")
    assert len(here.decode[0].requests) == 1


@pytest.mark.parametrize("mode", AHEAD)
async def test_a_prefill_engine_that_dies_after_the_landing_changes_nothing(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode, recompute_budget_tokens=0)
    task = ask(here)
    await both_began(here, node, mode)
    await land(node)
    await asyncio.to_thread(await_stat, node, "leases", 1)
    await here.prefill[0].stop()
    await until(lambda: not here.app.core.pool.all()[0].requests)
    here.decode[0].go.set()
    assert (await task)[0] == 200
    assert len(here.decode[0].requests) == 1


@pytest.mark.parametrize("mode", AHEAD)
async def test_another_prefill_engine_takes_the_leg_while_decode_waits(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode, 2, 1)
    gone, stays = here.prefill
    await gone.stop()
    for _ in range(2):  # the turn of either
        stays.go.clear()
        here.decode[0].go.clear()
        task = ask(here)
        await stays.next_began()
        await land(node)
        await here.decode[0].next_began()
        here.decode[0].go.set()
        assert (await task)[0] == 200
        with StoreClient(node.url) as client:
            await asyncio.to_thread(client.purge)
    assert len(here.decode[0].requests) == 2


@pytest.mark.parametrize("mode", AHEAD)
async def test_a_landing_that_never_comes_withdraws_the_decode_leg(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode, landing_timeout_s=0.2)
    task = ask(here)
    await both_began(here, node, mode)
    here.prefill[0].go.set()
    await here.decode[0].next_left()
    here.decode[0].go.set()
    assert (await task)[0] == 200
    assert "kv_transfer_params" not in here.decode[0].requests[1]
    assert await metric(here, 'kvrouter:landings_total{outcome="timeout"}') == 1


@pytest.mark.parametrize("mode", AHEAD)
async def test_a_prefill_leg_that_never_ends_is_bounded_with_both_legs(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(
        mode, landing_timeout_s=0.1, request_timeout_s=0.5, recompute_budget_tokens=0
    )
    task = ask(here)
    await both_began(here, node, mode)
    assert (await task)[0] == 504
    await here.decode[0].next_left()
    await here.prefill[0].next_left()


@pytest.mark.parametrize("mode", AHEAD)
async def test_a_store_that_dies_withdraws_the_decode_leg_at_once(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode, recompute_budget_tokens=0)
    task = ask(here)
    await both_began(here, node, mode)
    node.kill()
    await here.decode[0].next_left()
    assert here.prefill[0].left.empty()
    here.prefill[0].go.set()
    assert (await task)[0] == 429
    assert len(here.decode[0].requests) == 1
    node.start()


@pytest.mark.parametrize("mode", AHEAD)
async def test_without_a_store_nothing_is_sent_ahead(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode)
    node.kill()
    await until(lambda: not here.app.core.nodes or here.app.core.nodes.away)
    task = ask(here)
    await here.prefill[0].next_began()
    here.prefill[0].go.set()
    here.decode[0].go.set()
    assert (await task)[0] == 200
    assert ["kv_transfer_params" in body for body in here.decode[0].requests] == [False]
    node.start()


@pytest.mark.parametrize("mode", AHEAD)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_both_legs_and_the_waits(
    ahead: Open, node: StoreProcess, mode: str, stream: bool
) -> None:
    here = await ahead(mode)
    task = ask(here, stream=stream)
    await both_began(here, node, mode)
    task.cancel()
    await here.prefill[0].next_left()
    await here.decode[0].next_left()
    await until(lambda: here.app.core.metrics.running == 0)
    assert await metric(here, 'kvrouter:request_errors_total{code="499",') == 1


@pytest.mark.parametrize("mode", AHEAD)
async def test_a_client_that_leaves_within_the_stream_ends_it_at_the_engine(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode)
    here.decode[0].mode = "hang_mid"
    task = ask(here, stream=True)
    await both_began(here, node, mode)
    metrics = here.app.core.metrics
    await until(lambda: metrics.of("m").ttft.count or metrics.running)
    task.cancel()
    await here.decode[0].next_left()
    await here.prefill[0].next_left()


@pytest.mark.parametrize("mode", AHEAD)
async def test_a_decode_engine_that_dies_while_it_waits_is_replaced_after_the_landing(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode, 1, 2)
    for engine in here.decode:
        engine.mode = "drop"
    task = ask(here)
    await here.prefill[0].next_began()
    if mode == "chunk":
        await land(node, 1)
    await until(lambda: here.decode[0].requests or here.decode[1].requests)
    for engine in here.decode:
        engine.mode = "ok"
    await land(node)
    here.prefill[0].go.set()
    assert (await task)[0] == 200
    bodies = [*here.decode[0].requests, *here.decode[1].requests]
    assert sorted("kv_transfer_params" in body for body in bodies) == [False, True]
    assert len(here.prefill[0].requests) == 1


@pytest.mark.parametrize("mode", AHEAD)
async def test_an_engine_that_does_not_answer_after_the_landing_is_a_504(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode, request_timeout_s=0.5)
    task = ask(here)
    await both_began(here, node, mode)
    await land(node)
    assert (await task)[0] == 504
    await here.decode[0].next_left()


@pytest.mark.parametrize("mode", AHEAD)
async def test_a_refusal_of_the_decode_engine_is_the_clients_answer(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode)
    here.decode[0].go.set()
    task = ask(here, temperature=3)
    await both_began(here, node, mode)
    assert (await task)[0] == 400
    await here.prefill[0].next_left()

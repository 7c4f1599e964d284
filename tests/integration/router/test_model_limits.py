"""Limits and thresholds of one model, which leave the others alone."""

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.fakes.patience import until
from tests.integration.router.conftest import Open, Site, metric, text
from tests.integration.router.test_aliases import versions
from tests.integration.router.test_keys import Keys

Task = asyncio.Task[Any]


def ask(here: Site, model: str, **more: Any) -> Task:
    return asyncio.create_task(here.post(text(model=model, **more)))


async def held(here: Site, place: int, model: str, **more: Any) -> Task:
    """A request that its decode engine holds until `go`."""
    here.decode[place].mode = "held"
    task = ask(here, model, **more)
    await here.decode[place].next_began()
    return task


async def waiting(here: Site, count: int) -> None:
    await until(lambda: here.app.core.gates.waiting == count)


async def test_a_model_over_its_limit_keeps_no_other_model_waiting(site: Open) -> None:
    here = await site(
        0,
        2,
        prepare=versions,
        model_max_concurrent_requests=["a=1"],
        max_concurrent_requests=2,
        queue_size=3,
    )
    first = await held(here, 0, "a")
    more = [ask(here, "a") for _ in range(3)]
    await waiting(here, 3)
    assert await metric(here, 'kvrouter:num_requests_waiting_by_reason{reason="capacity"}') == 3
    assert await metric(here, "kvrouter:num_requests_running ") == 1
    assert (await here.post(text(model="a")))[0] == 429
    assert [(await here.post(text(model="b")))[0] for _ in range(3)] == [200] * 3
    assert len(here.decode[0].requests) == 1
    here.decode[0].go.set()
    assert [(await task)[0] for task in (first, *more)] == [200] * 4


async def test_requests_for_an_alias_count_for_alias_and_model(site: Open) -> None:
    limits = ["chat=2", "b=1"]
    aliases = ["chat=a,b"]
    here = await site(
        0, 2, prepare=versions, model_alias=aliases, model_max_concurrent_requests=limits
    )
    first = await held(here, 1, "b")
    for place in range(2):
        here.decode[place].mode = "held"
    tasks = [
        asyncio.create_task(here.post(text(model="chat"), **{"x-session-id": f"s{each}"}))
        for each in range(10)
    ]
    of_a = here.decode[0].requests  # those that wait for b have places of the alias too
    await until(lambda: here.app.core.gates.waiting + len(of_a) == 10)
    assert (len(of_a) <= 2, len(here.decode[1].requests)) == (True, 1)
    assert [gate.requests for gate in here.app.core.gates.of("b", "chat")] == [2, 1]
    for engine in here.decode:
        engine.go.set()
    assert [(await task)[0] for task in (first, *tasks)] == [200] * 11
    assert {gate.requests for gate in here.app.core.gates.of("b", "chat")} == {0}


async def test_each_prompt_of_a_list_counts_as_a_request_of_its_model(site: Open) -> None:
    here = await site(0, 2, prepare=versions, model_max_concurrent_requests=["a=3"])
    first = await held(here, 0, "a", prompt=["one", "two", "three"])
    later = ask(here, "a")
    await waiting(here, 1)
    here.decode[0].go.set()
    assert [(await task)[0] for task in (first, later)] == [200] * 2
    assert here.app.core.gates.of("a", None)[0].requests == 0


async def test_a_client_that_leaves_gives_its_place_in_both_queues_back(site: Open) -> None:
    here = await site(0, 2, prepare=versions, model_max_concurrent_requests=["a=1"])
    first = await held(here, 0, "a")
    later = ask(here, "a")
    await waiting(here, 1)
    later.cancel()
    await waiting(here, 0)
    first.cancel()
    await until(lambda: here.app.core.gates.of("a", None)[0].requests == 0)
    assert here.app.core.queue_wait.requests == 0


async def test_who_may_not_use_a_model_takes_no_place_of_its_queue(
    site: Open, tmp_path: Path
) -> None:
    keys = Keys(tmp_path)
    here = await site(
        0,
        2,
        prepare=versions,
        api_key_file=keys.write(all="", some="models: [b]"),
        model_max_concurrent_requests=["a=1"],
    )
    here.decode[0].mode = "held"
    task = asyncio.create_task(here.post(text(model="a"), **keys.bearer("all")))
    await here.decode[0].next_began()
    status, _, answer = await here.post(text(model="a"), **keys.bearer("some"))
    assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")
    assert (await here.post(text(model="zz"), **keys.bearer("all")))[0] == 404
    here.decode[0].go.set()
    assert (await task)[0] == 200


async def test_the_threshold_of_an_alias_or_a_model_goes_before_the_fleets(site: Open) -> None:
    here = await site(
        2,
        2,
        prepare=versions,
        policy="prefix",
        model_alias=["all=a", "none=a"],
        model_prefill_threshold=["a=10000", "none=0"],
    )
    for model, legs in (("a", 0), ("all", 0), ("none", 1), ("b", 1)):
        before = sum(len(engine.requests) for engine in here.prefill)
        assert (await here.post(text(model=model)))[0] == 200
        assert sum(len(engine.requests) for engine in here.prefill) - before == legs
    before = len(here.prefill[0].requests)
    assert (await here.post(text(model="none", prompt=["one two", "three"])))[0] == 200
    assert len(here.prefill[0].requests) == before + 2

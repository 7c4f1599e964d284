"""Answers and errors that are too long to be kept."""

import json

import pytest
from tests.fakes.descriptors import no_descriptor_left
from tests.fakes.engine import FakeEngine
from tests.fakes.patience import until
from tests.integration.router.conftest import Open, Site, text
from tests.integration.router.test_failures import answering

from kvrouter.engines.breaker import BreakerState
from kvrouter.engines.engine import Role
from kvrouter.http.server.exchange import Exchange
from kvrouter.serving.legs.leg import KEPT_BYTES

LONG = 3 * KEPT_BYTES


def all_closed(here: Site) -> bool:
    pool = here.app.core.pool
    return {pool.state(engine) for engine in pool.all()} == {BreakerState.CLOSED}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/responses"])
async def test_a_long_answer_is_passed_on_once_without_what_is_the_routers_own(
    site: Open, path: str
) -> None:
    here = await site(0, 3, cb_failure_threshold=1)
    choice = {"index": 0, "text": "y" * LONG, "finish_reason": "stop"}
    answer = {"id": "a", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}
    said = json.dumps({**answer, "kv_transfer_params": {"secret": 1}}).encode()
    for engine in here.decode:
        engine.pages[path] = answering(said, "application/json")
    status, headers, body = await here.post({**text(), "input": "a"}, path)
    assert (status, headers["content-type"]) == (200, "application/json")
    assert body == said.replace(b', "kv_transfer_params": {"secret": 1}', b"")
    assert sum(len(engine.posted) for engine in here.decode) == 1
    assert all_closed(here)


async def test_a_long_answer_that_breaks_off_is_cut_off(site: Open) -> None:
    here = await site(0, 1)

    async def half(exchange: Exchange) -> None:
        exchange.start(200, [("content-type", "application/json")])
        exchange.write(b'{"id": "' + b"y" * LONG)
        await exchange.drain()
        exchange.abort()

    here.decode[0].pages["/v1/completions"] = half
    with pytest.raises(Exception, match=r"payload|closed|completed|reset"):
        await here.post(text())


@pytest.mark.parametrize("status", [400, 422, 500])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_long_error_is_told_by_its_beginning_and_blames_nobody(
    site: Open, path: str, status: int
) -> None:
    here = await site(0, 2, cb_failure_threshold=1)
    said = json.dumps({"error": {"message": "too long: " + "x" * LONG, "code": status}}).encode()
    for engine in here.decode:
        engine.pages[path] = answering(said, "application/json", status)
    got, _, body = await here.post({**text(), "input": "a"}, path)
    error = json.loads(body)["error"]
    assert (got, error["code"]) == (status, status)
    assert error["message"].startswith("too long: xxx")
    assert len(body) < 2000
    assert sum(len(engine.posted) for engine in here.decode) == (2 if status == 500 else 1)
    assert all_closed(here)


async def test_a_router_without_descriptors_keeps_its_engines(site: Open) -> None:
    here = await site(1, 1)
    probed = here.decode[0]
    with no_descriptor_left():
        for engine in here.app.core.pool.all():
            for _ in range(5):
                assert await here.app.members.prober.check(engine) is None
    assert here.app.core.pool.engines(Role.DECODE)
    assert isinstance(probed, FakeEngine)
    await until(lambda: here.app.core.pool.engines(Role.PREFILL) != ())
    assert (await here.post(text()))[0] == 200

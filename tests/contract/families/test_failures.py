"""The table of failures, row by row: every family, both legs, and endpoints of one engine."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.contract.families.conftest import Open, Site, ids
from tests.fakes.descriptors import no_descriptor_left
from tests.fakes.pd import Json, PdEngine

from kvrouter.engines.breaker import BreakerState
from kvrouter.engines.engine import Role
from kvrouter.engines.families import FAMILIES
from kvrouter.engines.families.base import LegOrder
from kvrouter.http.failure import Failure
from kvrouter.http.server.exchange import Exchange
from kvrouter.serving.legs import leg
from kvrouter.serving.legs.failures import ROWS, TABLE, Counted

Say = Callable[[Exchange], Awaitable[None]]
NAMES = sorted(FAMILIES)
PAIRED = [name for name in NAMES if FAMILIES[name].order is not LegOrder.SINGLE]
NEEDS_PREFILL = "sglang"
PINNING = ("mooncake", "nixl")
EVERY = pytest.mark.parametrize("family", NAMES)
EVERY_PAIR = pytest.mark.parametrize("family", PAIRED)


def saying(status: int, body: object, **headers: str) -> Say:
    fields = [(name.replace("_", "-"), value) for name, value in headers.items()]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def say(exchange: Exchange) -> None:
        exchange.respond(status, content, headers=fields)

    return say


def error(code: int, message: str = "its own words") -> Json:
    return {"error": {"message": message, "type": "Of the engine", "param": None, "code": code}}


def ended(reason: object) -> Json:
    choice = {"index": 0, "text": "garbage", "finish_reason": reason}
    return {"id": "c", "object": "text_completion", "choices": [choice], "usage": {}}


@dataclass(frozen=True)
class Case:
    """How an engine comes to fail as a row says."""

    name: str
    failure: Failure
    mode: str = "says"
    says: Say | None = None
    status: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


ABORT = {"type": "abort", "message": "too long", "status_code": 400, "err_type": "BadRequestError"}
BROKEN_PROXY = saying(502, b"<html>bad gateway</html>")
CASES = (
    Case("gone", Failure.REFUSED, mode="stopped"),
    Case("unreachable", Failure.CONNECT, mode="unreachable"),
    Case("breaks", Failure.BROKEN, mode="drop"),
    Case("hangs", Failure.TIMEOUT, mode="hang", settings={"request_timeout_s": 0.3}),
    Case("its gateway waits no longer", Failure.TIMEOUT, says=saying(504, b"")),
    Case("429", Failure.FULL, says=saying(429, error(429), retry_after="17"), status=429),
    Case("429 without words", Failure.FULL, says=saying(429, b"", retry_after="17"), status=429),
    Case("503", Failure.FULL, says=saying(503, error(503), retry_after="17"), status=503),
    Case("500", Failure.ERROR, says=saying(500, error(500)), status=500),
    Case("500 in plain text", Failure.ERROR, says=saying(500, b"Internal Error"), status=500),
    Case("502", Failure.STATUS, says=BROKEN_PROXY),
    Case("html", Failure.ANSWER, says=saying(200, b"<html>")),
    Case("abort", Failure.ABORTED, says=saying(200, ended("abort"))),
    Case("error", Failure.ABORTED, says=saying(200, ended("error"))),
    Case("abort as an object", Failure.ABORTED, says=saying(200, ended({"type": "abort"}))),
    Case("499", Failure.ABORTED, says=saying(499, error(499))),
    Case("400", Failure.REQUEST, says=saying(400, error(400)), status=400),
    Case("400 in a 200", Failure.REQUEST, says=saying(200, error(400)), status=400),
    Case("501", Failure.REQUEST, says=saying(501, error(501)), status=501),
    Case("abort with a 400", Failure.REQUEST, says=saying(200, ended(ABORT)), status=400),
)
ELSEWHERE = {Failure.TOO_LARGE, Failure.LOCAL, Failure.DEAD}
"""Rows with tests of their own; an engine is declared dead by what watches its life."""
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_every_row_is_walked() -> None:
    assert {case.failure for case in CASES} | ELSEWHERE == set(Failure) == {r.failure for r in ROWS}


async def fail(here: Site, engine: PdEngine, case: Case) -> None:
    if case.mode == "stopped":
        await engine.stop()
    elif case.mode == "unreachable":
        found = here.app.core.pool.find(engine.address)
        assert found is not None
        found.host = "255.255.255.255"  # no network leads there
        here.app.core.client.forget(found)  # which may know where it was
    else:
        engine.mode = case.mode
        engine.says = case.says or engine.says


async def open_with(open_site: Open, family: str, case: Case, *counts: int) -> Site:
    settings = {"cb_failure_threshold": 1, "health_interval_s": 60.0, **case.settings}
    return await open_site(family, *counts, **settings)


def check_counted(here: Site, engine: PdEngine, counted: Counted) -> None:
    pool = here.app.core.pool
    known = pool.find(engine.address)
    assert known is not None
    if counted is Counted.LEAVES:
        assert known.identity is None
    else:
        opened = counted in (Counted.YES, Counted.LATER)
        assert pool.state(known) is (BreakerState.OPEN if opened else BreakerState.CLOSED)


def check_told(
    case: Case, status: int, raw: bytes, headers: dict[str, str], leg: Role = Role.DECODE
) -> None:
    row = TABLE[case.failure]
    assert status == (row.answer.status or case.status)
    told = json.loads(raw)["error"]
    assert told["code"] == status
    if row.answer.message:
        assert told["message"] == row.answer.message.format(leg=leg)
    usual = None if row.answer.retry_after_s is None else str(row.answer.retry_after_s)
    assert headers.get("retry-after") == ("17" if case.failure is Failure.FULL else usual)


async def ask(here: Site, path: str = "/v1/completions") -> tuple[int, bytes, dict[str, str]]:
    body = ids(300) if path == "/v1/completions" else {"model": "m", "input": "a"}
    async with here.http.post(f"http://127.0.0.1:{here.port}{path}", json=body) as answer:
        fields = {name.lower(): value for name, value in answer.headers.items()}
        return answer.status, await answer.read(), fields


def counted_here(
    here: Site, engine: PdEngine, case: Case, *, proven: bool, fetched: bool = False
) -> None:
    """`fetched`: it was to fetch KV, so that what is counted later counts for the pair."""
    counted = TABLE[case.failure].counted
    pairs = {decode.address for _, decode, _ in here.app.core.pool.pairs}
    assert (engine.address in pairs) is (counted is Counted.LATER and proven and fetched)
    if counted is Counted.LATER and (fetched or not proven):
        counted = Counted.NO
    check_counted(here, engine, counted)


@EACH
@EVERY
async def test_a_decode_leg_goes_on_elsewhere_or_not(
    open_site: Open, family: str, case: Case
) -> None:
    here = await open_with(open_site, family, case, 1, 2)
    await fail(here, here.decode[0], case)
    row, answers = TABLE[case.failure], [await ask(here) for _ in range(2)]
    failed = [answer for answer in answers if answer[0] != 200]
    assert len(failed) == (0 if row.again else 1)
    for answer in failed:
        check_told(case, *answer)
    assert len(here.decode[1].requests) == (2 if row.again else 1)
    fetched = FAMILIES[family].order.fetches_once
    counted_here(here, here.decode[0], case, proven=True, fetched=fetched)
    counted_here(here, here.decode[1], CASES[-1], proven=True)


@EACH
@EVERY
async def test_the_client_of_decode_legs_that_all_fail_is_told_why(
    open_site: Open, family: str, case: Case
) -> None:
    stranded = family in PINNING and case.mode in ("stopped", "unreachable")  # till a lease ends
    here = await open_with(open_site, family, case, 0 if stranded else 1, 2)
    for engine in here.decode:
        await fail(here, engine, case)
    check_told(case, *await ask(here))
    for engine in here.decode if TABLE[case.failure].again else ():
        counted_here(here, engine, case, proven=False)


@EACH
@EVERY_PAIR
async def test_a_prefill_leg_goes_on_elsewhere_or_not(
    open_site: Open, family: str, case: Case
) -> None:
    here = await open_with(open_site, family, case, 2, 1)
    await fail(here, here.prefill[0], case)
    answers = [await ask(here) for _ in range(2)]
    # Decode alone may take what a prefill engine refuses, but not where a time-out has passed.
    alone = case.failure is Failure.REQUEST and family != NEEDS_PREFILL
    failed = [answer for answer in answers if answer[0] != 200]
    assert len(failed) == (0 if TABLE[case.failure].again or alone else 1)
    for answer in failed:
        check_told(case, *answer, Role.PREFILL)
    counted_here(here, here.prefill[0], case, proven=True)


@EACH
@EVERY_PAIR
async def test_decode_does_without_prefill_engines_that_all_fail_where_it_can(
    open_site: Open, family: str, case: Case
) -> None:
    here = await open_with(open_site, family, case, 2, 1)
    for engine in here.prefill:
        await fail(here, engine, case)
    status, raw, headers = await ask(here)
    if family == NEEDS_PREFILL or case.failure is Failure.TIMEOUT:
        if case.failure is not Failure.REFUSED:  # then none is left to ask
            check_told(case, status, raw, headers, Role.PREFILL)
        assert status != 200
    else:
        assert status == 200
        assert here.decode[0].computed


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
@EACH
@EVERY
async def test_what_one_engine_answers_goes_on_elsewhere_where_that_is_safe(
    open_site: Open, family: str, case: Case, path: str
) -> None:
    here = await open_with(open_site, family, case, 0 if family == NEEDS_PREFILL else 1, 2)
    await fail(here, here.decode[0], case)
    row = TABLE[case.failure]
    safe = row.again and (path == "/v1/embeddings" or not row.begun)
    answers = [await ask(here, path) for _ in range(2)]
    aborted_here = case.failure is Failure.ABORTED and case.says is not None
    failed = [answer for answer in answers if answer[0] != 200]
    assert len(failed) == (0 if safe else 1)
    for answer in failed:
        check_told(case, *answer)
    assert aborted_here or here.decode[1].passed == (2 if safe else 1)


@EVERY
async def test_a_router_without_descriptors_blames_no_engine(open_site: Open, family: str) -> None:
    here = await open_site(family, 1, 2, cb_failure_threshold=1)
    assert (await here.http.get(f"http://127.0.0.1:{here.port}/health")).status == 200
    with no_descriptor_left():
        check_told(Case("local", Failure.LOCAL), *await ask(here))
        check_told(Case("local", Failure.LOCAL), *await ask(here, "/v1/embeddings"))
        await asyncio.sleep(0)
    for engine in here.engines:
        check_counted(here, engine, Counted.NO)
    assert await here.metric("kvrouter:upstream_errors_total") >= 2
    await here.same(ids())


@EVERY
async def test_an_answer_that_cannot_be_joined_for_its_size_blames_no_engine(
    open_site: Open, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leg, "MAX_ANSWER_BYTES", 1 << 16)
    here = await open_site(family, cb_failure_threshold=1)
    here.decode[0].mode = "says"
    here.decode[0].says = saying(200, ended("stop") | {"more": "x" * (1 << 17)})
    status, raw = await here.post(ids() | {"prompt": [[7] * 20, [8] * 30]})
    message = TABLE[Failure.TOO_LARGE].answer.message
    assert (status, json.loads(raw)["error"]["message"]) == (502, message)
    check_counted(here, here.decode[0], Counted.NO)

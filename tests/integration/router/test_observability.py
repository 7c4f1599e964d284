"""What is to be seen of requests: parts of the time to the first token, hits, headers, lines."""

import asyncio
import itertools
import json
import re
from io import BytesIO
from operator import attrgetter
from pathlib import Path
from time import monotonic, time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fakes.engine import FakeEngine
from tests.fakes.patience import until
from tests.fakes.store import StoreProcess
from tests.integration.router.ahead import IDS, MANIFEST, land
from tests.integration.router.conftest import Json, Open, Site, chat, metric, text

from kvrouter.access.callers import Caller
from kvrouter.app.reload import follow
from kvrouter.credentials.caller_keys import Key
from kvrouter.engines.families.base import Handoff
from kvrouter.errors import FAILED
from kvrouter.fates.split import Evidence
from kvrouter.serving.legs.orchestrator import Orchestrator
from kvrouter.serving.request.context import RequestContext, Timing
from kvrouter.serving.settle import Settler
from kvrouter.serving.streaming.relay import Relay
from kvrouter.telemetry.metrics import PARTS, Metrics
from kvrouter.telemetry.request_log import RequestLine, RequestLog

PAGE = Path(__file__).resolve().parents[3] / "docs" / "observability.md"
PART = "kvrouter:time_to_first_token_part_seconds"


def announce(engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.manifest = MANIFEST.digest.hex()


async def part_sums(here: Site) -> dict[str, float]:
    return {part: await metric(here, f'{PART}_sum{{part="{part}"}}') for part in PARTS}


NAMED = SimpleNamespace(
    exchange=SimpleNamespace(
        principal=Caller(Key("a key", ()), monotonic), path="/p", peer="h:1", status=200
    ),
    context={
        "trace": SimpleNamespace(hex_id="t"),
        "outcome.reason": "stop",
        "model": "v",
        "alias": "m",
        "request": SimpleNamespace(model="m", stream=True, prompt_tokens=1),
        "route.plan": SimpleNamespace(why="w", predicted_s=0.006),
        "route.hit_engine": 2,
        "route.hit_lower": 9,
        "route.hit_store": 3,
        "route.handoff": Handoff(cached_tokens=4),
        "outcome.generated": 5,
        "route.prefill_engine": "pe",
        "route.decode_engine": "de",
        "route.attempts": 6,
        "shares": [SimpleNamespace(route=SimpleNamespace(plan=SimpleNamespace(why="w")))] * 7,
        "route.landed_blocks": 8,
        "route.nothing_landed": "timeout",
        "timing.waited_s": 0.001,
        "timing.tokenising_s": 0.002,
        "timing.planned_s": 10.006,
        "timing.prefilled_s": 10.010,
        "timing.landed_s": 10.015,
        "timing.first_s": 10.25,
        "outcome.error": "e",
    },
    line={
        "request_id": "id",
        "key": "a key",
        "trace_id": "t",
        "status": 200,
        "outcome": "stop",
        "path": "/p",
        "client": "h:1",
        "model": "m",
        "version": "v",
        "stream": True,
        "prompt_tokens": 1,
        "hit_engine_tokens": 2,
        "hit_lower_tokens": 9,
        "hit_store_tokens": 3,
        "cached_tokens": 4,
        "fates": {"tail": 7},
        "generated": 5,
        "plan": "w",
        "predicted_ms": 6.0,
        "prefill": "pe",
        "decode": "de",
        "attempts": 6,
        "shares": 7,
        "landed_blocks": 8,
        "nothing_landed": "timeout",
        "queue_ms": 1.0,
        "tokenise_ms": 2.0,
        "plan_ms": 3.0,
        "prefill_ms": 4.0,
        "landing_ms": 5.0,
        "decode_ms": 235.0,
        "ttft_ms": 250.0,
        "error": "e",
    },
)
"""A request with a value of its own for all that a line tells, and that line."""


async def lines_of(here: Site, written: BytesIO) -> list[Json]:
    await here.app.close()
    return [json.loads(line) for line in written.getvalue().splitlines()]


def dur(header: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(\w+);dur=([\d.]+)", header)}


async def test_the_parts_of_the_time_to_the_first_token_add_up_to_it(
    site: Open, node: StoreProcess
) -> None:
    here = await site(store=node.url, policy="prefix", landing_timeout_s=30, prepare=announce)
    held = asyncio.create_task(here.post(text(prompt=IDS, stream=True)))
    await here.prefill[0].next_began()
    await land(node)
    assert (await held)[0] == 200
    follow(here.app, here.app.settings.model_copy(update={"landing_timeout_s": 0.05}))
    assert (await here.post(text()))[0] == 200  # their blocks do not land
    assert (await here.post(chat(stream=True), "/v1/chat/completions"))[0] == 200
    sums = await part_sums(here)
    whole = await metric(here, "kvrouter:time_to_first_token_seconds_sum")
    assert sum(sums.values()) == pytest.approx(whole, rel=1e-9)
    assert min(sums.values()) >= 0
    assert sums["queue"] == 0
    assert sums["tokenise"] > 0
    assert sums["landing"] > 0
    for part in PARTS:
        assert await metric(here, f'{PART}_count{{part="{part}"}}') == 3


async def test_a_wait_for_its_turn_is_a_part(site: Open) -> None:
    here = await site(max_concurrent_requests=1)
    here.prefill[0].mode = "held"
    first = asyncio.create_task(here.post(text()))
    await here.prefill[0].next_began()
    second = asyncio.create_task(here.post(text()))
    await until(lambda: here.app.core.queue_wait.waiting == 1)
    here.prefill[0].go.set()
    await asyncio.gather(first, second)
    sums = await part_sums(here)
    assert sums["queue"] >= await metric(here, "kvrouter:request_queue_time_seconds_sum") > 0
    assert sum(sums.values()) == pytest.approx(
        await metric(here, "kvrouter:time_to_first_token_seconds_sum"), rel=1e-9
    )


async def test_a_turn_that_does_not_come_is_logged_as_a_wait_in_the_queue(site: Open) -> None:
    written = BytesIO()
    here = await site(
        lines=RequestLog(written, plain=False), max_concurrent_requests=1, queue_timeout_s=0.05
    )
    here.prefill[0].mode = "held"
    first = asyncio.create_task(here.post(text()))
    await here.prefill[0].next_began()
    assert (await here.post(text()))[0] == 503
    here.prefill[0].go.set()
    await first
    refused, _ = await lines_of(here, written)
    assert refused["status"] == 503
    assert refused["queue_ms"] > refused["total_ms"] / 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_defect_is_counted_and_logged_as_an_error_and_ends_the_answer(
    site: Open, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def defect(*_: object) -> None:
        raise KeyError("planted")

    broken: type = Relay if stream else Orchestrator
    monkeypatch.setattr(broken, "run", defect)
    written = BytesIO()
    here = await site(lines=RequestLog(written, plain=False))
    status, _, body = await here.post(text(stream=stream))
    assert status == (200 if stream else 500)
    assert FAILED.message.encode() in body
    assert await metric(here, "kvrouter:request_success_total") == 0
    assert await metric(here, f'kvrouter:request_errors_total{{code="{status}",') == 1
    (line,) = await lines_of(here, written)
    assert (line["status"], line["outcome"], line["error"]) == (status, "error", FAILED.message)


@pytest.mark.parametrize("mode", ["at-once", "chunk"])
async def test_legs_that_overlap_are_no_time_counted_twice(
    ahead: Open, node: StoreProcess, mode: str
) -> None:
    here = await ahead(mode, policy="prefix")
    task = asyncio.create_task(here.post(text(prompt=IDS)))
    await here.prefill[0].next_began()
    await land(node)
    await here.decode[0].next_began()
    for engine in (*here.prefill, *here.decode):
        engine.go.set()
    assert (await task)[0] == 200
    sums = await part_sums(here)
    whole = await metric(here, "kvrouter:time_to_first_token_seconds_sum")
    assert sum(sums.values()) == pytest.approx(whole, rel=1e-9)
    assert min(sums.values()) >= 0


async def test_prompt_tokens_by_source_add_up_to_the_prompt_tokens(
    site: Open, node: StoreProcess
) -> None:
    await land(node, 3)
    here = await site(store=node.url, policy="prefix", landing_timeout_s=0.1, prepare=announce)
    here.prefill[0].cached_tokens = 7
    assert (await here.post(text(prompt=IDS)))[0] == 200
    source = 'kvrouter:prefix_hit_tokens_total{model="m",source="%s"}'
    assert await metric(here, source % "store") == 48
    assert await metric(here, source % "none") == len(IDS) - 48
    assert await metric(here, "kvrouter:prompt_tokens_total") == len(IDS)
    assert await metric(here, "kvrouter:prefill_cached_tokens_total") == 7


async def test_series_of_an_engine_go_with_it(site: Open) -> None:
    here = await site(2, 1, admin=True)
    await here.post(text())
    gone, stays = here.prefill
    _, page = await here.get("/metrics")
    assert gone.address.encode() in page
    async with here.http.delete(here.url(f"/workers/{gone.address}?force=true")) as answer:
        assert answer.status == 200
    _, page = await here.get("/metrics")
    assert gone.address.encode() not in page
    assert stays.address.encode() in page


async def test_the_build_is_told(site: Open) -> None:
    here = await site()
    assert await metric(here, 'kvrouter:build_info{python="') == 1


async def test_clients_are_not_told_where_it_ran_unless_asked_for(site: Open) -> None:
    here = await site()
    _, headers, _ = await here.post(text())
    assert "x-request-id" in headers
    assert not [name for name in headers if name.startswith("x-kvrouter")]
    assert "server-timing" not in headers


@pytest.mark.parametrize("stream", [False, True])
async def test_route_headers_name_the_engines_the_hits_and_the_times(
    site: Open, node: StoreProcess, stream: bool
) -> None:
    await land(node, 3)
    here = await site(store=node.url, policy="prefix", route_headers=True, prepare=announce)
    task = asyncio.create_task(here.post(text(prompt=IDS, stream=stream)))
    await here.prefill[0].next_began()
    await land(node)
    status, headers, _ = await task
    assert status == 200
    assert headers["x-kvrouter-prefill"] == here.prefill[0].address
    assert headers["x-kvrouter-decode"] == here.decode[0].address
    assert headers["x-kvrouter-hit-tokens"] == "48"
    assert tuple(dur(headers["server-timing"])) == PARTS
    whole_ms = 1000 * await metric(here, "kvrouter:time_to_first_token_seconds_sum")
    assert sum(dur(headers["server-timing"]).values()) == pytest.approx(whole_ms, abs=0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_route_headers_of_several_prompts_name_their_engines(
    site: Open, stream: bool
) -> None:
    here = await site(1, 1, route_headers=True)
    _, headers, _ = await here.post(text(prompt=["one", "two"], stream=stream))
    assert headers["x-kvrouter-prefill"] == here.prefill[0].address
    assert headers["x-kvrouter-decode"] == here.decode[0].address


async def test_route_headers_of_an_error_say_what_there_is(site: Open) -> None:
    here = await site(1, 1, route_headers=True)
    here.decode[0].mode = "500"
    status, headers, _ = await here.post(text())
    assert status == 500
    assert headers["x-kvrouter-decode"] == here.decode[0].address
    status, headers, _ = await here.post(b"{")
    assert status == 400
    assert "x-kvrouter-decode" not in headers


async def test_an_endpoint_of_one_engine_tells_that(site: Open) -> None:
    here = await site(1, 1, route_headers=True)
    status, headers, _ = await here.post({"model": "m", "prompt": "a"}, "/tokenize")
    assert (status, headers["x-kvrouter-decode"]) == (200, here.decode[0].address)


def documented_fields() -> set[str]:
    table = PAGE.read_text().split("## The line of a request", 1)[1].split("\n## ", 1)[0]
    cells = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"\w+", cell)}


async def test_every_field_of_a_line_is_documented_and_there(site: Open) -> None:
    written = BytesIO()
    here = await site(lines=RequestLog(written, plain=False))
    await here.post(text(stream=True))
    await here.post({"model": "m", "prompt": "a"}, "/tokenize")
    lines = {line["path"]: set(line) for line in await lines_of(here, written)}
    assert set(RequestLine.__struct_fields__) == documented_fields()
    without = {"key", "trace_id", "version", "shares", "landed_blocks", "nothing_landed", "error"}
    without.add("predicted_ms")
    assert lines["/v1/completions"] == documented_fields() - without
    assert lines["/tokenize"] <= documented_fields()


async def test_a_line_explains_its_request(site: Open, node: StoreProcess) -> None:
    await land(node, 3)
    written = BytesIO()
    lines = RequestLog(written, plain=False)
    here = await site(store=node.url, policy="prefix", lines=lines, prepare=announce)
    here.prefill[0].cached_tokens = 48
    task = asyncio.create_task(here.post(text(prompt=IDS, stream=True), **{"x-request-id": "one"}))
    await here.prefill[0].next_began()
    await land(node)
    await task
    (line,) = await lines_of(here, written)
    assert (line["request_id"], line["path"], line["stream"]) == ("one", "/v1/completions", True)
    assert line["client"].startswith("127.0.0.1:")
    assert (line["status"], line["outcome"], "error" in line) == (200, "length", False)
    assert (line["plan"], line["attempts"], line["landed_blocks"]) == ("prefill", 1, 5)
    assert line["prefill"] == here.prefill[0].address
    assert line["decode"] == here.decode[0].address
    tokens = [line[f"{name}_tokens"] for name in ("prompt", "hit_engine", "hit_store", "cached")]
    assert tokens == [len(IDS), 0, 48, 48]
    assert line["generated"] == 4
    parts = [line[f"{part}_ms"] for part in PARTS]
    assert sum(parts) == pytest.approx(line["ttft_ms"], abs=0.06)  # each is rounded
    assert line["total_ms"] >= line["ttft_ms"]


def named(body: bytes) -> RequestContext:
    NAMED.exchange.body = body
    context = RequestContext(cast("Any", NAMED.exchange), "id", b"", Timing(10.0))
    for names, value in NAMED.context.items():
        owner, _, name = names.rpartition(".")
        setattr(attrgetter(owner)(context) if owner else context, name, value)
    return context


async def test_each_value_of_a_line_has_its_own_name() -> None:
    written = BytesIO()
    lines = RequestLog(written, plain=False)
    witness = SimpleNamespace(evidence=lambda unit: Evidence(prompt=1))
    ended = Settler(Metrics(), lines, None, witness=cast("Any", witness))
    before_s = time()
    ended.take(named(b""), monotonic())
    ended.settle()
    lines.flush()
    line = json.loads(written.getvalue())
    assert before_s - 0.001 <= line.pop("time") <= time() + 0.001
    assert line.pop("total_ms") > 500
    assert line == NAMED.line
    fields = [name for name in RequestLine.__struct_fields__ if name not in ("total_ms", "time")]
    assert list(NAMED.line) == fields


async def test_lines_for_people_leave_out_what_has_no_value() -> None:
    written = BytesIO()
    lines = RequestLog(written, plain=True)
    lines.write(RequestLine(request_id="one", status=200))
    lines.write(RequestLine(request_id="two", error="it broke"))
    lines.flush()
    first, second = written.getvalue().decode().splitlines()
    assert re.fullmatch(r"request_id=one status=200 time=[\d.]+", first)
    assert re.fullmatch(r"request_id=two error=it broke time=[\d.]+", second)


async def test_lines_are_written_soon_and_in_their_order(site: Open) -> None:
    written = BytesIO()
    lines = RequestLog(written, plain=False)
    for number in range(300):
        lines.write(RequestLine(request_id=str(number), error="e" * 400))
    assert 100 < written.getvalue().count(b"\n") < 300  # what is held is bounded
    await until(lambda: written.getvalue().count(b"\n") == 300)
    found = [json.loads(line)["request_id"] for line in written.getvalue().splitlines()]
    assert found == [str(number) for number in range(300)]


async def test_a_request_is_counted_and_logged_soon_after_its_end(site: Open) -> None:
    written = BytesIO()
    here = await site(lines=RequestLog(written, plain=False))
    await here.post(text())
    await until(lambda: written.getvalue().endswith(b"\n"))
    assert here.app.core.metrics.success == {("length", "m"): 1}
    assert here.app.core.metrics.plans == {"prefill": 1}


@pytest.mark.parametrize(("body_bytes", "kept"), [(0, 15), (65_536, 15), (65_537, 0)])
async def test_few_requests_that_have_ended_are_kept(body_bytes: int, kept: int) -> None:
    metrics = Metrics()
    ended = Settler(metrics, None, None)
    context = named(bytes(body_bytes))
    for _ in range(kept):
        ended.take(context, 10.5)
    assert metrics.success == {}
    ended.take(context, 10.5)
    assert metrics.success == {("stop", "v"): kept + 1}


async def test_a_request_that_cannot_be_settled_is_lost_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics()
    ended = Settler(metrics, None, None)
    wrong = named(b"")
    wrong.timing = cast("Any", None)
    for context in (named(b""), wrong, named(bytes(65_537))):
        ended.take(context, 10.5)
    assert metrics.success == {("stop", "v"): 2}
    assert "request id is not counted or logged" in caplog.text


async def test_lines_tell_when_their_requests_ended(site: Open) -> None:
    written, before_s = BytesIO(), time()
    here = await site(lines=RequestLog(written, plain=False))
    await here.post(text())
    after_s = time()
    (line,) = await lines_of(here, written)
    assert before_s - 0.001 <= line["time"] <= after_s + 0.001


async def test_the_line_of_a_failure_says_how_far_it_came(site: Open) -> None:
    written = BytesIO()
    here = await site(lines=RequestLog(written, plain=False))
    here.decode[0].mode = "500"
    assert (await here.post(text()))[0] == 500
    (line,) = await lines_of(here, written)
    assert (line["status"], line["outcome"], "ttft_ms" in line) == (500, "error", False)
    assert "it answers 500" in line["error"]
    parts = [line[f"{part}_ms"] for part in PARTS]
    assert sum(parts) == pytest.approx(line["total_ms"], abs=0.06)


async def test_the_line_of_all_shares_sums_their_tokens(site: Open, node: StoreProcess) -> None:
    await land(node, 3)
    written = BytesIO()
    lines = RequestLog(written, plain=False)
    here = await site(
        store=node.url, policy="prefix", lines=lines, prepare=announce, landing_timeout_s=0.1
    )
    await here.post(text(prompt=[IDS, IDS]))
    (line,) = await lines_of(here, written)
    assert (line["shares"], line["hit_store_tokens"]) == (2, 96)


async def test_no_line_is_written_where_nobody_wants_one(site: Open) -> None:
    written = BytesIO()
    here = await site(lines=RequestLog(written, plain=False), access_log=False)
    await here.post(text())
    await here.post({"model": "m", "prompt": "a"}, "/tokenize")
    assert await lines_of(here, written) == []


async def test_a_scrape_tells_how_full_the_caches_are(site: Open, node: StoreProcess) -> None:
    here = await site(store=node.url, policy="prefix", landing_timeout_s=0.1, prepare=announce)
    for cache in ("tokens", "block_hashes"):
        assert await metric(here, f'kvrouter:cache_entries{{cache="{cache}"}}') == 0
    await here.post(text(prompt="word " * 400))
    for cache in ("tokens", "block_hashes"):
        assert await metric(here, f'kvrouter:cache_entries{{cache="{cache}"}}') == 1
        taken = await metric(here, f'kvrouter:cache_bytes{{cache="{cache}"}}')
        assert 0 < taken < await metric(here, f'kvrouter:cache_max_bytes{{cache="{cache}"}}')
    taken = await metric(here, "kvrouter:kv_index_bytes")
    assert 0 < taken < await metric(here, "kvrouter:kv_index_max_bytes")


async def test_what_is_in_flight_takes_memory_until_it_ends(site: Open) -> None:
    here = await site(0, 2, policy="prefix", max_concurrent_requests=10)
    for engine in here.decode:
        engine.mode = "held"
    task = asyncio.create_task(here.post(text(prompt="word " * 2000)))
    await until(lambda: any(engine.requests for engine in here.decode))
    taken = await metric(here, 'kvrouter:cache_bytes{cache="in_flight"}')
    assert 0 < taken < await metric(here, 'kvrouter:cache_max_bytes{cache="in_flight"}')
    for engine in here.decode:
        engine.go.set()
    assert (await task)[0] == 200
    assert await metric(here, 'kvrouter:cache_bytes{cache="in_flight"}') == 0


async def test_the_start_says_how_much_memory_is_used_at_most(
    site: Open, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "kvrouter.app.build"):
        await site(index_blocks=1024, max_body_memory="256MiB")
    (line,) = [r.getMessage() for r in caplog.records if r.name == "kvrouter.app.build"]
    assert line.startswith("memory at most: kv_index ")
    assert line.endswith(", bodies 256.0MiB")
    assert {"tokens", "block_hashes", "in_flight"} <= set(line.split())


async def test_what_is_due_ten_times_a_second_goes_on_after_a_defect(
    site: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, turns, again = await site(), itertools.count(), asyncio.Event()

    def sweep() -> bool:
        if next(turns) == 0:
            raise KeyError("planted")
        again.set()
        return True

    monkeypatch.setattr(here.app.core.index, "sweep", sweep)
    async with asyncio.timeout(60):
        await again.wait()
    assert "KeyError: 'planted'" in caplog.text

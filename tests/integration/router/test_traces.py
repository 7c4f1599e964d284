"""Traces of requests across both legs, at a collector that decodes what comes over the wire."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from io import BytesIO

import pytest
import pytest_asyncio
from tests.fakes.collector import Collector, Seen, collector
from tests.fakes.engine import FakeEngine
from tests.fakes.patience import until
from tests.fakes.store import StoreProcess
from tests.integration.router.ahead import IDS, MANIFEST, land
from tests.integration.router.conftest import Open, chat, metric, text

from kvrouter.telemetry.request_log import RequestLog

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{SPAN}-01"
LEGS = ("kvrouter.prefill", "kvrouter.decode")


@pytest_asyncio.fixture
async def taker() -> AsyncIterator[Collector]:
    async with collector() as made:
        yield made


def announce(engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.manifest = MANIFEST.digest.hex()


def by_name(spans: list[Seen]) -> dict[str, Seen]:
    return {span.name: span for span in spans}


def span_above(engine: FakeEngine) -> tuple[str, str, str]:
    _, trace, span, flags = engine.headers[-1]["traceparent"].split("-")
    return trace, span, flags


async def test_a_trace_shows_both_legs_and_the_landing_between_them(
    site: Open, node: StoreProcess, taker: Collector
) -> None:
    here = await site(
        store=node.url, policy="prefix", prepare=announce, otlp_traces_endpoint=taker.url
    )
    body = text(prompt=IDS, stream=True, temperature=0.5, top_p=0.9)
    task = asyncio.create_task(here.post(body, **{"x-request-id": "one"}))
    await here.prefill[0].next_began()
    await land(node)
    assert (await task)[0] == 200
    await here.app.close()
    spans = await taker.trace_of()
    names = ["request", "plan", "prefill", "landing", "decode"]
    assert [span.name for span in spans] == [f"kvrouter.{name}" for name in names]
    request, plan, prefill, landing, decode = spans
    assert request.parent_id == ""
    assert {span.parent_id for span in spans[1:]} == {request.span_id}
    assert (request.kind, prefill.kind, landing.kind) == ("server", "client", "internal")
    times = [plan.begun_ns, prefill.begun_ns, prefill.ended_ns, landing.ended_ns, decode.ended_ns]
    assert times == sorted(times)
    assert decode.ended_ns <= request.ended_ns
    for engine, leg in ((here.prefill[0], prefill), (here.decode[0], decode)):
        assert span_above(engine) == (request.trace_id, leg.span_id, "01")
        assert leg.attributes["kvrouter.engine"] == engine.address
        assert leg.attributes["server.port"] == engine.port
    assert landing.attributes == {"kvrouter.outcome": "landed", "kvrouter.blocks": 5}
    assert taker.headers["path"] == "/v1/traces"
    assert request.resource["service.name"] == "kvrouter"


async def test_the_span_of_a_request_says_what_vllm_and_llm_d_say(
    site: Open, taker: Collector
) -> None:
    here = await site(otlp_traces_endpoint=taker.url)
    here.prefill[0].cached_tokens = 3
    body = chat(stream=True, temperature=0.5, top_p=0.9)
    await here.post(body, "/v1/chat/completions", **{"x-request-id": "one"})
    await here.app.close()
    (request, *_) = await taker.trace_of()
    told = request.attributes
    assert told["gen_ai.request.id"] == "one"
    assert (told["gen_ai.request.model"], told["gen_ai.operation.name"]) == ("m", "chat")
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.n"]) == (4, 1)
    assert told["gen_ai.usage.completion_tokens"] == 4
    assert told["gen_ai.usage.prompt_tokens"] > 0
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    ttft_s = told["gen_ai.latency.time_to_first_token"]
    assert told["llm_d.pd_proxy.true_ttft_ms"] == pytest.approx(1000 * ttft_s)
    assert 0 < ttft_s <= told["gen_ai.latency.e2e"]
    assert told["llm_d.pd_proxy.coordinator_overhead_ms"] == 0  # no landing was awaited
    assert told["kvrouter.cached_tokens"] == 3
    assert told["http.response.status_code"] == 200


async def test_a_client_s_trace_goes_on_through_both_legs(site: Open, taker: Collector) -> None:
    here = await site(otlp_traces_endpoint=taker.url, otlp_traces_sampling_ratio=0.0)
    written = {"traceparent": GIVEN, "tracestate": "a=1", "baggage": "k=v"}
    await here.post(text(), **written)
    await here.app.close()
    request, *rest = await taker.trace_of()
    assert (request.trace_id, request.parent_id, request.state) == (TRACE, SPAN, "a=1")
    legs = by_name(rest)
    for engine, name in zip((*here.prefill, *here.decode), LEGS, strict=True):
        assert span_above(engine) == (TRACE, legs[name].span_id, "01")
        assert engine.headers[-1]["tracestate"] == "a=1"
        assert engine.headers[-1]["baggage"] == "k=v"


@pytest.mark.parametrize("given", ["00-a-b-01", f"{GIVEN}-more"])
async def test_a_traceparent_that_breaks_the_rules_begins_a_new_trace(
    site: Open, taker: Collector, given: str
) -> None:
    here = await site(otlp_traces_endpoint=taker.url)
    await here.post(text(), traceparent=given)
    await here.app.close()
    (request, *_) = await taker.trace_of()
    assert request.parent_id == ""
    assert span_above(here.decode[0])[0] == request.trace_id


async def test_what_is_not_sampled_is_not_traced_by_engines_either(
    site: Open, taker: Collector
) -> None:
    here = await site(otlp_traces_endpoint=taker.url, otlp_traces_sampling_ratio=0.0)
    await here.post(text())
    await here.post(text(), traceparent=GIVEN[:-1] + "0")
    for engine in (*here.prefill, *here.decode):
        first, second = (headers["traceparent"].split("-") for headers in engine.headers)
        assert first[3] == "00"
        assert second == ["00", TRACE, SPAN, "00"]
    await here.app.close()
    assert taker.spans == []


@pytest.mark.parametrize(("client", "trace"), [("join", TRACE), ("ignore", None)])
async def test_strangers_do_not_decide_what_is_recorded(
    site: Open, taker: Collector, client: str, trace: str | None
) -> None:
    here = await site(
        otlp_traces_endpoint=taker.url, otlp_traces_sampling_ratio=0.0, otlp_traces_client=client
    )
    await here.post(text(), traceparent=GIVEN)
    found, _, flags = span_above(here.decode[0])
    assert (found == trace, flags) == (trace is not None, "00")
    await here.app.close()
    assert taker.spans == []


async def test_an_attempt_that_failed_is_a_span_with_its_error(
    site: Open, taker: Collector
) -> None:
    here = await site(1, 2, otlp_traces_endpoint=taker.url)
    here.decode[0].mode = here.decode[1].mode = "500"
    assert (await here.post(text()))[0] == 500
    await here.app.close()
    request, *rest = await taker.trace_of()
    attempts = [span for span in rest if span.name == "kvrouter.decode"]
    assert len(attempts) == 2
    assert all("it answers 500" in span.error for span in (request, *attempts))


async def test_a_client_that_leaves_ends_its_spans(site: Open, taker: Collector) -> None:
    here = await site(otlp_traces_endpoint=taker.url)
    here.decode[0].mode = "hang"
    task = asyncio.create_task(here.post(text()))
    await here.decode[0].next_began()
    task.cancel()
    await here.decode[0].next_left()
    await until(lambda: here.app.core.metrics.running == 0)
    await here.app.close()
    spans = by_name(await taker.trace_of())
    assert spans["kvrouter.decode"].attributes["kvrouter.cancelled"] is True
    assert spans["kvrouter.request"].attributes["kvrouter.outcome"] == "client_left"
    assert not spans["kvrouter.request"].error


async def test_waiting_and_tokenising_are_spans(site: Open, taker: Collector) -> None:
    here = await site(
        policy="prefix",
        prepare=announce,
        max_concurrent_requests=1,
        otlp_traces_endpoint=taker.url,
    )
    here.prefill[0].mode = "held"
    tasks = [asyncio.create_task(here.post(text(prompt="One two three four")))]
    await here.prefill[0].next_began()
    tasks.append(asyncio.create_task(here.post(text(prompt="One two three four five"))))
    await until(lambda: here.app.core.queue_wait.waiting == 1)
    here.prefill[0].go.set()
    await asyncio.gather(*tasks)
    await here.app.close()
    spans = by_name(await taker.trace_of(traces=2))
    assert spans["kvrouter.queue"].attributes == {"kvrouter.reason": "capacity"}
    assert spans["kvrouter.tokenise"].attributes["kvrouter.tokens"] > 0
    assert spans["kvrouter.tokenise"].ended_ns <= spans["kvrouter.plan"].begun_ns


async def test_every_prompt_of_a_list_has_its_legs_in_one_trace(
    site: Open, taker: Collector
) -> None:
    here = await site(otlp_traces_endpoint=taker.url)
    await here.post(text(prompt=["one", "two"]), **{"x-request-id": "mine"})
    await here.app.close()
    spans = await taker.trace_of()
    assert [span.name for span in spans].count("kvrouter.decode") == 2
    assert {headers["x-request-id"] for headers in here.decode[0].headers} == {"mine-0", "mine-1"}
    assert {headers["traceparent"].split("-")[2] for headers in here.decode[0].headers} == {
        span.span_id for span in spans if span.name == "kvrouter.decode"
    }


async def test_an_endpoint_of_one_engine_is_traced(site: Open, taker: Collector) -> None:
    here = await site(otlp_traces_endpoint=taker.url)
    await here.post({"model": "m", "prompt": "a"}, "/tokenize")
    await here.app.close()
    request, forward = await taker.trace_of()
    assert (request.attributes["url.path"], forward.name) == ("/tokenize", "kvrouter.forward")


async def test_the_exporter_does_not_keep_the_interpreter_from_the_loop(
    site: Open, taker: Collector
) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        await site(otlp_traces_endpoint=taker.url)
        assert sys.getswitchinterval() <= 0.0005
    finally:
        sys.setswitchinterval(before)


async def test_a_line_names_its_trace(site: Open, taker: Collector) -> None:
    written = BytesIO()
    lines = RequestLog(written, plain=False)
    here = await site(otlp_traces_endpoint=taker.url, lines=lines)
    await here.post(text(), traceparent=GIVEN)
    await here.app.close()
    assert json.loads(written.getvalue())["trace_id"] == TRACE


@pytest.mark.parametrize("how", ["dead", "refuses", "hangs"])
async def test_a_collector_that_does_not_take_traces_is_not_noticed(
    site: Open, taker: Collector, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    if how == "dead":
        await taker.stop()
    taker.mode = {"dead": "ok", "refuses": "400", "hangs": "hang"}[how]
    here = await site(otlp_traces_endpoint=taker.url)
    for _ in range(3):
        assert (await here.post(text()))[0] == 200
    if how == "hangs":
        await taker.asked.wait()
        assert (await here.post(text()))[0] == 200
        await taker.stop()
    exporter = here.app.exporter
    assert exporter is not None
    await until(lambda: dict(exporter.counts())[("dropped",)] >= 12)
    assert await metric(here, 'kvrouter:trace_spans_total{outcome="dropped"}') >= 12
    assert await metric(here, 'kvrouter:trace_spans_total{outcome="exported"}') == 0

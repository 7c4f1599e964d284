"""What OpenTelemetry reads of the environment holds at a collector that is told of a trace."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.fakes.certificates import Authority
from tests.fakes.collector import Collector, collector

from kvrouter.telemetry.tracing.otlp import otlp_exporter
from kvrouter.telemetry.tracing.trace import Trace, Tracing

OTLP = "OTEL_EXPORTER_OTLP"
PATIENCE_S = 30.0


@pytest_asyncio.fixture
async def taker() -> AsyncIterator[Collector]:
    async with collector() as made:
        yield made


def a_trace() -> Trace:
    trace, _ = Tracing(1.0, "follow", lambda _: None).begin({})
    assert trace is not None
    return trace


async def sent(taker: Collector, times: int = 1) -> bool:
    """Whether a new exporter, as the environment has it now, had all of them taken."""
    made = otlp_exporter(f"{taker.url}/v1/traces", "h:1")
    for _ in range(times):
        made.take(a_trace())
    await asyncio.to_thread(made.close, PATIENCE_S)
    outcomes = {labels[0]: count for labels, count in made.counts()}
    assert sum(outcomes.values()) == times
    return outcomes["exported"] == times


async def test_headers_of_traces_win_over_those_of_every_signal(
    taker: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{OTLP}_HEADERS", "authorization=Bearer%20all")
    assert await sent(taker)
    assert taker.headers["authorization"] == "Bearer all"
    assert taker.headers["content-type"] == "application/x-protobuf"
    assert taker.headers["user-agent"].startswith("kvrouter/")
    monkeypatch.setenv(f"{OTLP}_TRACES_HEADERS", "authorization=Bearer%20traces,x-tenant=a")
    assert await sent(taker)
    assert (taker.headers["authorization"], taker.headers["x-tenant"]) == ("Bearer traces", "a")


@pytest.mark.parametrize("how", ["gzip", "deflate", "none", ""])
async def test_what_is_sent_is_compressed_as_told(
    taker: Collector, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv(f"{OTLP}_COMPRESSION", how)
    assert await sent(taker, times=2)
    assert len(taker.spans) == 2
    assert taker.headers.get("content-encoding", "none") == (how or "none")


async def test_what_cannot_be_meant_is_told_and_not_heeded(
    taker: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(f"{OTLP}_COMPRESSION", "brotli")
    monkeypatch.setenv(f"{OTLP}_TIMEOUT", "soon")
    with caplog.at_level(logging.WARNING, "opentelemetry"):
        assert await sent(taker)
    assert ["brotli" in line or "soon" in line for line in caplog.messages] == [True, True]


async def test_a_collector_is_trusted_by_the_authority_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    shown, own = authority.sign("127.0.0.1"), authority.sign("router")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca_file)
    tls.load_cert_chain(shown.cert_file, shown.key_file)
    tls.verify_mode = ssl.CERT_REQUIRED
    for wins in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(wins, raising=False)
    monkeypatch.setenv(f"{OTLP}_TIMEOUT", "1")
    async with collector(tls) as taker:
        assert not await sent(taker)
        monkeypatch.setenv(f"{OTLP}_CERTIFICATE", authority.ca_file)
        assert not await sent(taker)
        monkeypatch.setenv(f"{OTLP}_CLIENT_CERTIFICATE", own.cert_file)
        monkeypatch.setenv(f"{OTLP}_CLIENT_KEY", own.key_file)
        assert await sent(taker)
    assert len(taker.spans) == 1


async def test_a_collector_that_is_busy_is_asked_again(taker: Collector) -> None:
    taker.mode = "busy"
    assert await sent(taker)
    assert (taker.asks, len(taker.spans)) == (2, 1)


@pytest.mark.parametrize("status", ["400", "500"])
async def test_what_a_collector_refuses_is_not_sent_again(taker: Collector, status: str) -> None:
    taker.mode = status
    assert not await sent(taker)
    assert taker.asks == 1


async def test_a_collector_that_is_busy_for_longer_than_it_may_take_is_left(
    taker: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{OTLP}_TRACES_TIMEOUT", "0.5")
    taker.mode = "503"
    assert not await sent(taker)
    assert taker.asks == 1

"""The gate's short way: it does what the long way does, or leaves the request as it is."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter._native import QuickGate
from kvrouter.access.caller import Caller, KeyRing
from kvrouter.access.gate import GUARDED, Gate
from kvrouter.access.keys import Key, digest
from kvrouter.http.exchange import Exchange
from kvrouter.metrics import Metrics

KEYS = (
    Key("free", (digest("free"),)),
    Key("models", (digest("models"),), models=frozenset({"m"})),
    Key("few", (digest("few"),), max_concurrent=1),
    Key("none", (digest("none"),), requests_per_s=1e-9, request_burst=0),
)
PATHS = ("/v1/completions", "/v1/", "/v1", "/v10", "/", "/metrics", "/workers/a", "/v1/models", "*")
GIVEN = (None, "", "Bearer", "Basic free", "Bearer nobody", "bearer\tfree", "Bearer \xe9")


class Wire:
    """A connection that keeps what is written."""

    def __init__(self) -> None:
        self.transport: Any = self
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def date_line(self) -> bytes:
        return b""

    async def writable(self) -> None:
        """At once."""

    def paused(self) -> bool:
        return False


def asked(wire: Wire, method: str, path: str, headers: dict[str, str]) -> Exchange:
    return Exchange(
        wire,
        method=method,
        path=path,
        query="",
        headers=headers,
        body=b"",
        peer="h:1",
        keep_alive=True,
        http_1_1=True,
    )


def let_in(exchange: Exchange) -> Any:
    exchange.on_close(lambda: None)
    return exchange


def seen(method: str, path: str, headers: dict[str, str], *, quick: bool) -> tuple[object, ...]:
    """What becomes of a request, and of whoever asked."""
    ring, wire = KeyRing(lambda: 0.0), Wire()
    ring.follow(KEYS)
    gate = Gate(ring, let_in, Metrics(), None)
    if not quick:
        gate._admit = lambda *_: False
    exchange = asked(wire, method, path, dict(headers, **{"x-request-id": "id"}))
    left: Any = gate.handle(exchange)
    if left is not exchange:
        with pytest.raises(StopIteration):
            left.send(None)
    caller, counted_by = exchange.caller, exchange.counted_by
    names = [each.name if each is not None else None for each in (caller, counted_by)]
    counts = [(each.requests, dict(each.refused)) for each in ring.all()]
    return left is exchange, names, exchange.headers, counts, ring.unknown, wire.written


@given(
    st.sampled_from(["POST", "GET", "DELETE"]),
    st.sampled_from(PATHS),
    st.sampled_from([*GIVEN, *(f"Bearer {key.name}" for key in KEYS)]),
)
def test_the_short_way_does_what_the_long_way_does(
    method: str, path: str, given: str | None
) -> None:
    headers = {"host": "h"} if given is None else {"host": "h", "authorization": given}
    assert seen(method, path, headers, quick=True) == seen(method, path, headers, quick=False)


def test_the_usual_request_is_let_in_and_counted() -> None:
    ring = KeyRing()
    ring.follow(KEYS)
    caller = ring.all()[0]
    exchange = asked(Wire(), "POST", "/v1/completions", {"a": "b", "authorization": "Bearer free"})
    for count in (1, 2):
        exchange.headers["authorization"] = "Bearer free"
        assert QuickGate(GUARDED).admit(exchange, ring.by_digest)
        assert (exchange.caller, exchange.counted_by, caller.requests) == (caller, caller, count)
        assert exchange.headers == {"a": "b"}


@pytest.mark.parametrize("wrong", ["headers", "path", "method"])
def test_what_is_no_request_is_not_let_in(wrong: str) -> None:
    ring = KeyRing()
    ring.follow(KEYS)
    headers = {"authorization": "Bearer free"}
    parts = {"headers": headers, "path": "/v1/completions", "method": "POST"}
    plain = SimpleNamespace(**parts)
    assert QuickGate(GUARDED).admit(plain, ring.by_digest)
    assert isinstance(plain.caller, Caller)
    headers["authorization"] = "Bearer free"
    assert not QuickGate(GUARDED).admit(SimpleNamespace(**(parts | {wrong: None})), ring.by_digest)
    with pytest.raises(AttributeError):
        QuickGate(GUARDED).admit(object(), ring.by_digest)

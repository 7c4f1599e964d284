"""Trace context as W3C has it, and which requests are traced."""

from collections import Counter
from random import Random

import pytest

from kvrouter.telemetry.tracing.trace import Client, Parent, Tracing, context_lines, read_parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GIVEN = f"00-{TRACE}-{SPAN}-01"


def test_a_parent_is_read() -> None:
    parent = read_parent({"traceparent": GIVEN, "tracestate": "rojo=00f067, congo=t61rc"})
    assert parent == Parent(int(TRACE, 16), int(SPAN, 16), True, "rojo=00f067,congo=t61rc")
    later = read_parent({"traceparent": f"cc-{TRACE}-{SPAN}-00-what-comes-later"})
    assert later == Parent(int(TRACE, 16), int(SPAN, 16), False)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00-a-b-01",
        GIVEN.upper(),
        f"{GIVEN}-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"{GIVEN}, {GIVEN}",
        f" {GIVEN}",
        f"00-{TRACE}-{SPAN}-0g",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 5000}",
    ],
)
def test_a_parent_that_breaks_the_rules_is_none(given: str) -> None:
    assert read_parent({"traceparent": given}) is None


@pytest.mark.parametrize(
    "state",
    ["a=" + "x" * 600, ",".join(f"k{i}=v" for i in range(33)), "a=1,a=2", "A=1", "a", "a=b=c", "="],
)
def test_a_state_that_breaks_the_rules_goes_no_further(state: str) -> None:
    parent = read_parent({"traceparent": GIVEN, "tracestate": state})
    assert parent is not None
    assert parent.state == ""


def test_engines_are_told_of_the_span_above_theirs() -> None:
    lines = context_lines(int(TRACE, 16), int(SPAN, 16), "a=1", sampled=True)
    assert lines == f"traceparent: {GIVEN}\r\ntracestate: a=1\r\n".encode()


def decided(
    ratio: float, client: Client, headers: dict[str, str], count: int = 2000
) -> Counter[bool]:
    tracing = Tracing(ratio, client, lambda _: None, Random(1))
    return Counter(tracing.begin(headers)[0] is not None for _ in range(count))


def test_the_ratio_is_kept() -> None:
    assert decided(0.0, "follow", {}) == {False: 2000}
    assert decided(1.0, "follow", {}) == {True: 2000}
    assert 150 < decided(0.1, "follow", {})[True] < 250


@pytest.mark.parametrize(
    ("client", "flag", "ratio", "traced"),
    [
        ("follow", "01", 0.0, True),
        ("follow", "00", 1.0, False),
        ("join", "01", 0.0, False),
        ("join", "00", 1.0, True),
        ("ignore", "01", 0.0, False),
        ("ignore", "00", 1.0, True),
    ],
)
def test_a_client_decides_what_it_may(
    client: Client, flag: str, ratio: float, traced: bool
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-{flag}"}
    assert decided(ratio, client, headers, 10) == {traced: 10}
    trace, context = Tracing(ratio, client, lambda _: None).begin(headers)
    ours = trace.hex_id if trace is not None else context.decode()[16:48]
    assert (ours == TRACE) == (client != "ignore")
    assert (context == b"") == traced


def test_engines_are_told_not_to_trace_what_is_not_traced() -> None:
    trace, context = Tracing(0.0, "follow", lambda _: None).begin({})
    assert trace is None
    parent = read_parent({"traceparent": context.decode().strip().removeprefix("traceparent: ")})
    assert parent is not None
    assert not parent.sampled

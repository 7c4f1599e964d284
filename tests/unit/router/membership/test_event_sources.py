"""What engines say of where they publish KV events, and what is used of it."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.router.membership.test_detect import VLLM, Pages

from kvrouter.engines.engine import Engine, Role
from kvrouter.engines.families import AUTO, Families
from kvrouter.engines.families.pages import MAX_RANKS, ProbeFailed
from kvrouter.membership.detect import EngineDetector, read_event_sources

PAGE = "/kv_event_sources"


def source(endpoint: str, replay: str | None = None) -> dict[str, object]:
    """A `KVEventsConfig`, as far as it is read, and one more field."""
    return {"endpoint": endpoint, "replay_endpoint": replay, "topic": ""}


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("10.0.0.7", "tcp://*:5557"),
        ("10.0.0.7", "tcp://0.0.0.0:5557"),
        ("10.0.0.7", "tcp://[::]:5557"),
        ("10.0.0.7", "tcp://127.0.0.1:5557"),
        ("10.0.0.7", "tcp://localhost:5557"),
        ("10.0.0.7", "tcp://10.0.0.7:5557"),
        ("fd00::7", "tcp://[fd00:0::7]:5557"),
        ("no-such-name.invalid", "tcp://no-such-name.invalid:5557"),
        ("localhost", "tcp://127.0.0.1:5557"),
    ],
)
async def test_an_engines_own_host_by_any_name_is_the_one_by_which_it_is_known(
    host: str, endpoint: str
) -> None:
    told = {"0": source(endpoint)}
    assert await read_event_sources(host, told) == ({0: (5557, 0)}, None)


async def test_the_addresses_of_an_engines_name_are_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def resolved(host: str, port: None) -> list[object]:
        return [(0, 0, 0, "", (address, 0)) for address in ("10.0.0.7", "fd00::7")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved)
    told = {str(n): source(f"tcp://{a}:1") for n, a in enumerate(("10.0.0.7", "[fd00::7]", "a"))}
    ports, refused = await read_event_sources("engine.svc", told)
    assert ports == {0: (1, 0), 1: (1, 0)}
    assert refused == "'tcp://a:1' is on another host"


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://10.0.0.8:1", "tcp://metadata.example:80", "tcp://10.0.0.7@10.0.0.8:1", "tcp://[::2]:1"],
)
async def test_an_endpoint_on_another_host_is_refused(endpoint: str) -> None:
    told = {"0": source(endpoint), "1": source("tcp://*:5558"), "2": source("tcp://*:1", endpoint)}
    ports, refused = await read_event_sources("10.0.0.7", told)
    assert ports == {1: (5558, 0)}
    assert refused == f"{endpoint!r} is on another host"


async def test_each_rank_has_its_ports() -> None:
    told = {str(n): source(f"tcp://*:{5557 + n}", f"tcp://*:{5567 + n}") for n in (0, 1)}
    ports, _ = await read_event_sources("10.0.0.7", told)
    assert ports == {0: (5557, 5567), 1: (5558, 5568)}


@pytest.mark.parametrize(
    "endpoint", ["ipc:///tmp/a", "inproc://a", "tcp://*:*", "tcp://*:0", "tcp://*", "", "tcp://["]
)
async def test_what_is_no_tcp_address_with_a_port_is_not_used(endpoint: str) -> None:
    ports, refused = await read_event_sources("10.0.0.7", {"0": source(endpoint)})
    assert ports == {}
    assert refused


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
)
endpoints = st.text(max_size=12) | st.builds("tcp://{}".format, st.text("[]:@*/19a.", max_size=12))
ranks = st.integers(-9, 9).map(str) | st.text(max_size=4)


@given(
    st.dictionaries(ranks, values)
    | st.dictionaries(ranks, st.builds(source, endpoints, endpoints | st.none()), max_size=3)
)
def test_whatever_an_engine_says_is_a_port_or_a_sentence(told: dict[str, Any]) -> None:
    ports, refused = asyncio.run(read_event_sources("127.0.0.1", told))
    assert all(0 < events < 65536 and 0 <= replays < 65536 for events, replays in ports.values())
    assert refused is None or len(refused) < 1000


async def test_no_more_ranks_are_read_than_an_engine_may_have() -> None:
    told = {str(number): source("tcp://*:1") for number in range(MAX_RANKS + 9)}
    ports, _ = await read_event_sources("10.0.0.7", told)
    assert len(ports) == MAX_RANKS


@pytest.mark.parametrize(
    ("page", "ports", "refused"),
    [
        (json.dumps({"0": source("tcp://*:5557")}).encode(), {0: (5557, 0)}, None),
        (b"{}", {}, None),
        (b"[]", {}, None),
        (b"<html>", {}, None),
        (None, {}, None),
        (b'{"detail":"no"}', {}, "not told as vLLM does"),
        (b'{"0":{"endpoint":1}}', {}, "not told as vLLM does"),
        (b'{"a":' * 100_000, {}, None),
    ],
)
async def test_an_engine_joins_whatever_it_says_of_its_events(
    page: bytes | None, ports: dict[int, tuple[int, int]], refused: str | None
) -> None:
    pages = Pages(VLLM if page is None else {**VLLM, PAGE: page})
    detector = EngineDetector(Families(), pages.ask, connector=AUTO, asks_events=lambda _: True)
    identity = await detector.identify(Engine("10.0.0.7:8000", Role.DECODE))
    assert identity.event_ports == ports
    assert (refused or "None") in str(identity.events_refused)


async def test_a_page_of_events_that_fails_keeps_no_engine_out() -> None:
    pages = Pages(VLLM)

    async def ask(engine: Engine, path: str, body: bytes | None) -> bytes:
        if path == PAGE:
            raise ProbeFailed(f"{path} answers 500", 500)
        return await pages.ask(engine, path, body)

    detector = EngineDetector(Families(), ask, connector=AUTO, asks_events=lambda _: True)
    identity = await detector.identify(Engine("10.0.0.7:8000", Role.DECODE))
    assert (identity.event_ports, identity.events_refused) == ({}, f"{PAGE} answers 500")


async def test_an_engine_whose_ports_are_given_is_not_asked() -> None:
    pages = Pages(VLLM)
    detector = EngineDetector(Families(), pages.ask, connector=AUTO, asks_events=lambda _: False)
    await detector.identify(Engine("10.0.0.7:8000", Role.DECODE))
    assert PAGE not in pages.asked

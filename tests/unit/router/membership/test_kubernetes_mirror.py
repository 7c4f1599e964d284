"""What was seen of a collection, whatever came in whichever pieces."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.pods import endpoint, endpoint_slice, pod

from kvrouter.membership.kubernetes.engines import of_pod, of_slice, read_url
from kvrouter.membership.kubernetes.mirror import (
    MAX_LINE_BYTES,
    Expired,
    Mirror,
    Unreadable,
)
from kvrouter.membership.kubernetes.objects import EndpointSlice, Pod

Json = dict[str, Any]
WANTED = read_url("k8s://test?selector=app=engine")
MOST = 500
NAMES = ("a", "b", "c", "d")
CHANGES = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(["ready", "waits", "leaves", "odd", "gone"])),
    max_size=30,
)


def mirror() -> Mirror[Pod]:
    return Mirror(Pod, lambda each: of_pod(each, WANTED), MOST)


def shown(name: str, state: str = "ready", version: int = 1) -> Json:
    made = pod(
        f"10.0.0.{NAMES.index(name) + 1}" if name in NAMES else "10.0.0.9",
        ready=state != "waits",
        leaving=state == "leaves",
        role="draft" if state == "odd" else None,
    )
    made["metadata"] |= {"name": name, "resourceVersion": str(version)}
    return made


def page(*items: Json, version: str = "7", more: str = "") -> bytes:
    metadata = {"resourceVersion": version} | ({"continue": more} if more else {})
    return json.dumps({"metadata": metadata, "items": list(items)}).encode()


def line(type_: str, seen: Json) -> bytes:
    return json.dumps({"type": type_, "object": seen}).encode() + b"\n"


def listed(*items: Json) -> Mirror[Pod]:
    made = mirror()
    made.begin_list()
    assert made.page(page(*items)) == ""
    made.begin_watch()
    return made


def names(of: Mirror[Pod]) -> set[str]:
    return {each.owner for each in of.engines()}


@given(before=CHANGES, after=CHANGES, cuts=st.lists(st.integers(1, 400), max_size=40))
def test_it_names_exactly_the_ready_pods_however_events_are_cut(
    before: list[tuple[str, str]], after: list[tuple[str, str]], cuts: list[int]
) -> None:
    there = {name: state for name, state in before if state != "gone"}
    seen = listed(*(shown(name, state) for name, state in there.items()))
    events = b""
    for version, (name, state) in enumerate(after, start=8):
        known = name in there
        if state == "gone":
            if known:
                events += line("DELETED", shown(name, there.pop(name), version))
            continue
        there[name] = state
        events += line("MODIFIED" if known else "ADDED", shown(name, state, version))
    for size in [*cuts, len(events)]:
        was = seen.engines()
        changed = seen.feed(events[:size])
        assert changed or seen.engines() == was
        events = events[size:]
    assert names(seen) == {name for name, state in there.items() if state == "ready"}
    assert seen.odd.keys() == {name for name, state in there.items() if state == "odd"}


@given(st.binary(max_size=200))
def test_anything_else_is_told_as_unreadable(garbage: bytes) -> None:
    seen = listed(shown("a"))
    for take in (seen.feed, seen.page):
        with suppress(Unreadable):
            take(garbage + b"\n")
        assert names(seen) == {"a"}


def test_a_list_counts_only_when_its_last_page_is_there() -> None:
    seen = listed(shown("a"))
    seen.begin_list()
    assert seen.page(page(shown("b"), more="next")) == "next"
    assert (names(seen), seen.version) == ({"a"}, "")
    assert seen.page(page(shown("c"), version="9")) == ""
    assert (names(seen), seen.version) == ({"b", "c"}, "9")


def test_a_watch_brings_no_more_than_a_list_may() -> None:
    seen = listed()
    pods = [shown("x") for _ in range(MOST + 1)]
    for number, each in enumerate(pods):
        each["metadata"]["name"] = f"x{number}"
    seen.feed(b"".join(line("ADDED", each) for each in pods[:MOST]))
    with pytest.raises(Unreadable, match=f"more than {MOST} members; select fewer"):
        seen.feed(line("ADDED", pods[MOST]))


def test_a_list_that_broke_off_leaves_nothing_behind() -> None:
    seen = listed(shown("a"))
    seen.begin_list()
    seen.page(page(shown("b"), more="next"))
    seen.begin_list()
    seen.page(page(shown("c")))
    assert names(seen) == {"c"}


def test_events_and_bookmarks_say_from_where_to_go_on() -> None:
    seen = listed()
    assert seen.version == "7"
    assert seen.feed(line("ADDED", shown("a", version=8)))
    assert seen.version == "8"
    assert not seen.feed(line("BOOKMARK", {"metadata": {"resourceVersion": "12"}}))
    assert (seen.version, names(seen)) == ("12", {"a"})


def test_an_event_without_news_for_the_router_is_no_change() -> None:
    seen = listed(shown("a"))
    assert not seen.feed(line("MODIFIED", shown("a", version=8)))
    assert not seen.feed(line("ADDED", shown("b", "waits", 9)))
    assert seen.feed(line("MODIFIED", shown("a", "leaves", 10)))
    assert names(seen) == set()


def test_an_error_of_410_asks_for_a_list_and_names_no_one_else() -> None:
    seen = listed(shown("a"))
    with pytest.raises(Expired):
        seen.feed(line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}))
    assert (seen.version, names(seen)) == ("", {"a"})


def test_another_error_is_told_in_the_servers_words() -> None:
    seen = listed(shown("a"))
    with pytest.raises(Unreadable, match="etcd has no leader"):
        seen.feed(line("ERROR", {"kind": "Status", "code": 500, "message": "etcd has no leader"}))
    assert names(seen) == {"a"}


def test_a_cut_line_of_a_watch_that_broke_is_not_mixed_with_the_next() -> None:
    seen = listed()
    seen.feed(line("ADDED", shown("a", version=8))[:50])
    seen.begin_watch()
    assert seen.feed(line("ADDED", shown("b", version=9)))
    assert names(seen) == {"b"}


def test_a_line_without_end_is_refused() -> None:
    seen = listed()
    with pytest.raises(Unreadable, match="an event of more than"):
        seen.feed(b"x" * (MAX_LINE_BYTES + 1))


def test_a_list_without_end_is_refused() -> None:
    seen = mirror()
    seen.begin_list()
    many = [shown(f"p-{n}") | {"status": shown("a")["status"]} for n in range(MOST + 1)]
    with pytest.raises(Unreadable, match="select fewer"):
        seen.page(page(*many, more="next"))


def test_a_pod_in_two_slices_counts_once() -> None:
    wanted = read_url("k8s://test?service=engines&role=decode")
    seen = Mirror(EndpointSlice, lambda each: of_slice(each, wanted), most=2)
    slices = []
    for kind, prefix in (("IPv4", "10.0.0."), ("IPv6", "fd00::")):
        ends = (endpoint(f"{prefix}{n}", f"p-{n}") for n in (1, 2))
        made = endpoint_slice(*ends, address_type=kind)
        made["metadata"] |= {"name": kind.lower(), "resourceVersion": "1"}
        slices.append(made)
    seen.begin_list()
    seen.page(page(*slices))
    assert {each.address for each in seen.engines()} == {"p-1=10.0.0.1:8000", "p-2=10.0.0.2:8000"}


def test_a_slice_without_engines_still_tells_that_a_service_has_ipv4() -> None:
    wanted = read_url("k8s://test?service=engines&role=decode")
    seen = Mirror(EndpointSlice, lambda each: of_slice(each, wanted), MOST)
    seen.begin_list()
    six = endpoint_slice(endpoint("fd00::1", "p"), address_type="IPv6")
    four = endpoint_slice(endpoint("10.0.0.1", "p"))
    for made, name in ((six, "six"), (four, "four")):
        made["metadata"] |= {"name": name, "resourceVersion": "1"}
    seen.page(page(six, four))
    seen.begin_watch()
    four["endpoints"] = []
    assert seen.feed(line("MODIFIED", four))
    assert seen.engines() == []

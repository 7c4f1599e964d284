"""What a router announces, and what is no announcement."""

import math
from typing import Any

import pytest

from kvrouter_store.connectors.vllm_tier.announced import Announced, announced, fetch_hint


def test_blocks_that_will_land_are_announced_with_the_time_to_wait_for_them() -> None:
    assert announced({"kvstore": {"coming_blocks": 4, "wait_s": 30}}) == Announced(4, 30.0)


def test_nobody_waits_longer_than_a_day() -> None:
    assert announced({"kvstore": {"coming_blocks": 4, "wait_s": 1e9}}) == Announced(4, 86400.0)


def test_a_node_is_named_where_blocks_are_or_will_be() -> None:
    url = "kv://a:7400"
    assert announced({"kvstore": {"source": url}}) == Announced(None, 0.0, url)
    coming = {"coming_blocks": 4, "wait_s": 30, "source": url}
    assert announced({"kvstore": coming}) == Announced(4, 30.0, url)
    assert announced({"kvstore": {**coming, "source": 3}}) == Announced(4, 30.0)
    assert announced({"kvstore": {**coming, "wait_s": "long"}}) == Announced(None, 0.0, url)


def hinted(**changes: Any) -> dict[str, Any]:
    """An envelope as Dynamo's router builds it; `changes` of its action to fetch."""
    action = {
        "action_id": "a2",
        "action_type": "kv.fetch",
        "action_version": "1.0",
        "payload": {"source_control_endpoint": "tcp://b:7400", "block_hashes": [123, 456]},
    }
    future = {"action_id": "a1", "action_type": "kv.new", "action_version": "9.0", "payload": {}}
    actions = [future, {**action, **changes}]
    return {"protocol_version": "0.1", "message_id": "m", "actions": actions}


def fetching(**changes: Any) -> dict[str, Any]:
    """The same with changes of what is to be fetched."""
    return hinted(
        payload={"source_control_endpoint": "tcp://b:7400", "block_hashes": [1], **changes}
    )


def test_the_hint_of_any_router_names_a_node_in_either_place() -> None:
    expected = Announced(None, 0.0, "tcp://b:7400", 2)
    assert announced({"kv_hint": hinted()}) == announced(None, hinted()) == expected
    coming = {"coming_blocks": 4, "wait_s": 30, "source": "kv://a:7400"}
    told = announced({"kvstore": coming, "kv_hint": hinted()})
    assert told == Announced(4, 30.0, "tcp://b:7400", 2)


def test_what_this_router_hints_is_understood() -> None:
    hint = fetch_hint("m", "kv://b:7400", [0, (1 << 64) - 1])
    assert announced({"kv_hint": hint}) == Announced(None, 0.0, "kv://b:7400", 2)


@pytest.mark.parametrize(
    "envelope",
    [
        "kv.fetch",
        {},
        {"actions": "bad"},
        {"actions": ["bad"]},
        hinted(action_type="kv.retain"),
        hinted(action_version="2.0"),
        hinted(payload="bad"),
        hinted(payload={}),
        fetching(source_control_endpoint=""),
        fetching(source_control_endpoint=3),
        fetching(block_hashes=[]),
        fetching(block_hashes=[True]),
        fetching(block_hashes=[-1]),
        fetching(block_hashes=[1 << 64]),
        fetching(mode="move"),
    ],
)
def test_a_hint_that_cannot_be_meant_announces_nothing(envelope: Any) -> None:
    assert announced({"kv_hint": envelope}, envelope) is None
    own = {"source": "kv://a:7400"}
    assert announced({"kvstore": own}, envelope) == Announced(None, 0.0, "kv://a:7400")


@pytest.mark.parametrize(
    "params",
    [
        None,
        "kvstore",
        {},
        {"kvstore": 3},
        {"kvstore": {"source": 3}},
        {"kvstore": {"source": ""}},
        {"kvstore": {"wait_s": 3}},
        {"kvstore": {"coming_blocks": 4}},
        {"kvstore": {"coming_blocks": 0, "wait_s": 3}},
        {"kvstore": {"coming_blocks": True, "wait_s": 3}},
        {"kvstore": {"coming_blocks": 4, "wait_s": math.nan}},
        {"kvstore": {"coming_blocks": 4, "wait_s": 0}},
        {"kvstore": {"coming_blocks": 4, "wait_s": True}},
        {"kvstore": {"coming_blocks": 4.5, "wait_s": 3}},
    ],
)
def test_what_cannot_be_meant_announces_nothing(params: Any) -> None:
    assert announced(params) is None

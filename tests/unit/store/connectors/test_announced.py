"""What a router announces, and what is no announcement."""

import math
from typing import Any

import pytest

from kvrouter_store.connectors.vllm_tier.announced import Announced, announced


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

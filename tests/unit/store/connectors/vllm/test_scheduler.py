"""What the connector asks to be loaded and saved, step by step, without an engine."""

import logging
from typing import Any, cast

import pytest
from tests.fakes.vllm import (
    FakeClient,
    FakeLandings,
    FakeOutput,
    FakeRequest,
    chain_of,
    identity,
    request_of,
)

from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.vllm.arrivals import Arrivals
from kvrouter_store.connectors.vllm.scheduler import SchedulerSide
from kvrouter_store.connectors.vllm.settings import SaveScope
from kvrouter_store.errors import StoreUnavailable
from kvrouter_store.identity.chain import hash_tokens, root_hash

BLOCK = 16
ROOT = root_hash(None)


def side(client: FakeClient, save: SaveScope = "all", refusal: str = "") -> SchedulerSide:
    who = identity(BLOCK, refusal)
    link = StoreLink(cast("Any", client), who.manifest, logging.getLogger("test"))
    arrivals = Arrivals(cast("Any", FakeLandings()))
    return SchedulerSide(who, save, link, arrivals, logging.getLogger("test"))


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


def test_a_prefix_that_the_store_holds_is_loaded_between_steps(client: FakeClient) -> None:
    request = request_of(100, BLOCK)
    client.held.update(request.block_hashes[:4])
    assert side(client).matched_tokens(request, 0) == (64, True)


def test_only_what_lies_beyond_the_local_hit_is_loaded(client: FakeClient) -> None:
    request = request_of(100, BLOCK)
    client.held.update(request.block_hashes)
    planner = side(client)
    assert planner.matched_tokens(request, 32) == (64, True)
    planner.allocated(request, [7, 3, 9, 1, 5, 8, 2], 64)
    (order,) = planner.plan(FakeOutput({})).loads
    assert (order.first, order.block_ids) == (2, (9, 1, 5, 8))
    assert order.span == range(2, 6)
    assert order.hashes == b"".join(request.block_hashes[:6])


def test_the_last_token_is_always_computed(client: FakeClient) -> None:
    request = request_of(96, BLOCK)
    client.held.update(request.block_hashes)
    assert side(client).matched_tokens(request, 0) == (80, True)
    one_block = request_of(16, BLOCK, "short")
    client.held.update(one_block.block_hashes)
    assert side(client).matched_tokens(one_block, 0) == (0, False)


def test_a_local_hit_longer_than_the_store_loads_nothing(client: FakeClient) -> None:
    request = request_of(100, BLOCK)
    client.held.update(request.block_hashes[:2])
    assert side(client).matched_tokens(request, 80) == (0, False)


def test_a_load_is_ordered_once(client: FakeClient) -> None:
    request = request_of(100, BLOCK)
    client.held.update(request.block_hashes)
    planner = side(client)
    planner.matched_tokens(request, 0)
    planner.allocated(request, list(range(7)), 96)
    assert len(planner.plan(FakeOutput({})).loads) == 1
    planner.allocated(request, list(range(7)), 0)
    assert planner.plan(FakeOutput({"r": 4})).loads == []


def test_a_request_whose_load_failed_is_computed_and_not_loaded_for_ever(
    client: FakeClient,
) -> None:
    request = request_of(100, BLOCK)
    client.held.update(request.block_hashes)
    planner = side(client)
    planner.matched_tokens(request, 0)
    planner.allocated(request, list(range(7)), 96)
    assert planner.matched_tokens(request, 0) == (0, False)
    request.num_preemptions = 1
    assert planner.matched_tokens(request, 0) == (96, True)


@pytest.mark.parametrize(
    "why",
    [
        {"prompt_embeds": object()},
        {"pooling_params": object()},
        {"resumable": True},
        {"skip_reading_prefix_cache": True},
    ],
)
def test_what_may_not_be_shared_is_not_even_looked_up(
    client: FakeClient, why: dict[str, Any]
) -> None:
    request = request_of(100, BLOCK, **why)
    client.held.update(request.block_hashes)
    assert side(client).matched_tokens(request, 0) == (0, False)
    assert client.calls == []


def test_blocks_are_saved_as_their_chunks_are_computed(client: FakeClient) -> None:
    request = request_of(100, BLOCK)
    planner = side(client)
    planner.matched_tokens(request, 0)
    planner.allocated(request, list(range(7)), 0)
    blocks = {"r": [4, 5, 6, 7, 8, 9, 10]}
    (first,) = planner.plan(FakeOutput({"r": 40}, blocks)).saves
    assert (first.span, first.block_ids) == (range(2), (4, 5))
    request.num_computed_tokens = 40
    (second,) = planner.plan(FakeOutput({"r": 60}, blocks)).saves
    assert (second.span, second.block_ids) == (range(2, 6), (6, 7, 8, 9))
    assert second.hashes == b"".join(request.block_hashes[:6])


def test_a_step_that_completes_no_block_saves_nothing(client: FakeClient) -> None:
    request = request_of(100, BLOCK)
    planner = side(client)
    planner.allocated(request, list(range(7)), 0)
    assert planner.plan(FakeOutput({"r": 15}, {"r": [1]})).saves == []


def test_a_generated_block_is_saved_once_its_tokens_are_known(client: FakeClient) -> None:
    request = request_of(30, BLOCK)
    planner = side(client)
    planner.allocated(request, [0, 1], 0)
    assert planner.plan(FakeOutput({"r": 30}, {"r": [0, 1]})).saves[0].span == range(1)
    request.num_computed_tokens = 31
    assert planner.plan(FakeOutput({"r": 1}, {"r": [0, 1]})).saves == []
    request.block_hashes = chain_of(2, "r")
    assert planner.plan(FakeOutput({"r": 1}, {"r": [0, 1]})).saves[0].span == range(1, 2)


def test_with_save_prompt_generated_blocks_stay_here(client: FakeClient) -> None:
    request = request_of(30, BLOCK)
    planner = side(client, save="prompt")
    planner.allocated(request, [0, 1], 0)
    request.block_hashes, request.num_computed_tokens = chain_of(2, "r"), 31
    assert planner.plan(FakeOutput({"r": 1}, {"r": [0, 1]})).saves[0].span == range(1)


def test_with_save_none_nothing_is_saved(client: FakeClient) -> None:
    request = request_of(100, BLOCK)
    planner = side(client, save="none")
    planner.allocated(request, list(range(7)), 0)
    assert planner.plan(FakeOutput({"r": 100}, {"r": list(range(7))})).saves == []


def test_a_preempted_request_is_looked_up_again_and_not_saved_twice(client: FakeClient) -> None:
    request = request_of(100, BLOCK)
    planner = side(client)
    planner.matched_tokens(request, 0)
    planner.allocated(request, list(range(7)), 0)
    planner.plan(FakeOutput({"r": 100}, {"r": list(range(7))}))
    client.held.update(request.block_hashes)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert planner.matched_tokens(request, 0) == (96, True)
    planner.allocated(request, list(range(20, 27)), 96)
    plan = planner.plan(FakeOutput({"r": 4}, {"r": list(range(20, 27))}))
    assert plan.loads[0].block_ids == (20, 21, 22, 23, 24, 25)
    assert plan.saves == []


def test_a_finished_request_tells_the_router_its_manifest(client: FakeClient) -> None:
    request = request_of(100, BLOCK)
    planner = side(client)
    planner.allocated(request, list(range(7)), 0)
    planner.plan(FakeOutput({"r": 100}, {"r": list(range(7))}))
    assert planner.finished(request) == {
        "kvstore": {
            "manifest": identity(BLOCK).manifest.digest.hex(),
            "blocks": 6,
            "block_tokens": BLOCK,
            "root": ROOT.hex(),
            "waits": True,
        }
    }


def test_a_request_that_finished_while_the_store_was_away_promises_no_blocks(
    client: FakeClient,
) -> None:
    request = request_of(100, BLOCK)
    planner = side(client)
    planner.allocated(request, list(range(7)), 0)
    planner.plan(FakeOutput({"r": 100}, {"r": list(range(7))}))
    client.failure = StoreUnavailable("away")
    planner.matched_tokens(request_of(100, BLOCK), 0)
    assert planner.finished(request)["kvstore"]["blocks"] == 0


def test_an_aborted_request_is_forgotten(client: FakeClient) -> None:
    request = request_of(100, BLOCK)
    planner = side(client)
    planner.allocated(request, list(range(7)), 0)
    planner.finished(request)
    assert planner.plan(FakeOutput({"r": 100}, {"r": list(range(7))})).saves == []


def test_an_engine_that_shares_nothing_says_why(client: FakeClient) -> None:
    request = request_of(100, BLOCK)
    client.held.update(request.block_hashes)
    planner = side(client, refusal="a sliding window")
    assert planner.matched_tokens(request, 0) == (0, False)
    planner.allocated(request, list(range(7)), 0)
    assert planner.plan(FakeOutput({"r": 100}, {"r": list(range(7))})).saves == []
    assert planner.finished(request)["kvstore"]["refusal"] == "a sliding window"
    assert client.calls == []


def plain_request(hashes: list[bytes]) -> FakeRequest:
    tokens = list(range(100))
    return FakeRequest(
        "p", hashes, num_tokens=100, num_prompt_tokens=100, prompt_token_ids=tokens,
        lora_request=None,
    )  # fmt: skip


def test_an_engine_whose_hashes_are_those_of_its_manifest_shares(client: FakeClient) -> None:
    hashes = list(hash_tokens(list(range(100)), BLOCK, root=ROOT))
    client.held.update(hashes)
    assert side(client).matched_tokens(plain_request(hashes), 0) == (96, True)


def test_an_engine_that_hashes_otherwise_shares_nothing(client: FakeClient) -> None:
    hashes = chain_of(6)
    client.held.update(hashes)
    planner = side(client)
    assert planner.matched_tokens(plain_request(hashes), 0) == (0, False)
    other = request_of(100, BLOCK, "other")
    client.held.update(other.block_hashes)
    assert planner.matched_tokens(other, 0) == (0, False)
    assert "hashes" in planner.finished(other)["kvstore"]["refusal"]

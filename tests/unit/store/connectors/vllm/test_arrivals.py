"""A request whose prefix is on its way is not computed: it waits, takes blocks, loads pieces."""

import logging
import math
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from tests.fakes.vllm import (
    FakeClient,
    FakeLandings,
    FakeOutput,
    FakeRequest,
    identity,
    request_of,
)

from kvrouter_store.connectors.link import StoreLink
from kvrouter_store.connectors.vllm.arrivals import Arrivals, announced
from kvrouter_store.connectors.vllm.plan import LoadOrder
from kvrouter_store.connectors.vllm.scheduler import SchedulerSide

BLOCK = 16
IDS = list(range(50, 57))
BUSY = FakeOutput({"other": 1})
IDLE = FakeOutput({})


@dataclass
class Core:
    """The scheduler's side of one engine, its store and what it follows there."""

    client: FakeClient = field(default_factory=FakeClient)
    landings: FakeLandings = field(default_factory=FakeLandings)

    def __post_init__(self) -> None:
        who, log = identity(BLOCK), logging.getLogger("arrivals")
        link = StoreLink(cast("Any", self.client), who.manifest, log)
        self.side = SchedulerSide(who, "none", link, Arrivals(cast("Any", self.landings)), log)

    def asked(self, request: FakeRequest, local_tokens: int = 0) -> tuple[int | None, bool]:
        return self.side.matched_tokens(cast("Any", request), local_tokens)

    def loads(self, output: FakeOutput = BUSY) -> list[LoadOrder]:
        return self.side.plan(output).loads

    def landed(self, blocks: int, *, over: bool = False) -> None:
        coming = self.landings.coming
        coming.landed = blocks
        coming.over = over or blocks == coming.blocks

    def takes(self, request: FakeRequest, tokens: int, local_blocks: int = 0) -> None:
        assert self.asked(request, local_blocks * BLOCK) == (tokens, True)
        ids = IDS[: local_blocks + tokens // BLOCK]
        self.side.allocated(cast("Any", request), ids, tokens)


@pytest.fixture
def core() -> Core:
    return Core()


def coming_request(tokens: int = 100, blocks: int = 6, **more: Any) -> FakeRequest:
    params = {"kvstore": {"coming_blocks": blocks, "wait_s": 30}}
    return request_of(tokens, BLOCK, kv_transfer_params=params, **more)


def test_nothing_is_computed_and_no_block_taken_while_nothing_has_landed(core: Core) -> None:
    request = coming_request()
    for _ in range(3):
        assert core.asked(request) == (None, False)
    assert len(core.landings.followed) == 1
    coming, wait_s = core.landings.followed[0]
    assert (coming.hashes, coming.first, wait_s) == (b"".join(request.block_hashes), 0, 30)
    assert core.client.calls == ["match"]
    assert core.loads() == []


def test_pieces_are_loaded_as_they_land_and_reported_with_the_last(core: Core) -> None:
    request = coming_request()
    core.asked(request)
    core.landed(2)
    core.takes(request, 96)
    (first,) = core.loads()
    assert (first.span, first.block_ids, first.last) == (range(2), (50, 51), False)
    assert core.loads() == []
    core.landed(5)
    (second,) = core.loads()
    assert (second.span, second.block_ids, second.last) == (range(2, 5), (52, 53, 54), False)
    assert second.hashes == b"".join(request.block_hashes[:5])
    core.landed(6)
    (third,) = core.loads()
    assert (third.span, third.block_ids, third.last, third.lost) == (range(5, 6), (55,), True, ())
    assert core.loads() == []


def test_what_the_engine_holds_itself_is_not_loaded(core: Core) -> None:
    request = coming_request()
    core.asked(request, 3 * BLOCK)
    core.landed(1)
    core.takes(request, 48, local_blocks=3)
    assert core.loads() == []
    core.landed(5)
    (order,) = core.loads()
    assert (order.span, order.block_ids) == (range(3, 5), (53, 54))


def test_a_prefix_that_the_store_held_before_is_no_sign_that_the_rest_comes(core: Core) -> None:
    request = coming_request()
    core.client.held.update(request.block_hashes[:4])
    assert core.asked(request) == (None, False)
    assert core.asked(request) == (None, False)
    core.landed(5)
    core.takes(request, 96)
    assert [order.span for order in core.loads()] == [range(5)]


def test_what_has_all_landed_is_loaded_at_once(core: Core) -> None:
    request = coming_request()
    core.client.held.update(request.block_hashes)
    core.takes(request, 96)
    assert core.landings.followed == []
    assert [(order.span, order.last) for order in core.loads()] == [(range(6), True)]


def test_all_that_landed_before_blocks_were_taken_is_one_load(core: Core) -> None:
    request = coming_request()
    core.asked(request)
    core.landed(6)
    core.takes(request, 96)
    assert [(order.span, order.last) for order in core.loads()] == [(range(6), True)]


def test_what_does_not_come_is_computed_behind_what_came(core: Core) -> None:
    request = coming_request()
    core.asked(request)
    core.landed(2)
    core.takes(request, 96)
    core.loads()
    core.landed(3, over=True)
    (order,) = core.loads()
    assert (order.span, order.last, order.lost) == (range(2, 3), True, (53, 54, 55))
    assert core.asked(request) == (0, False)
    assert core.loads() == []


def test_a_wait_that_ends_before_blocks_were_taken_loads_what_is_there(core: Core) -> None:
    request = coming_request()
    core.asked(request)
    core.client.held.update(request.block_hashes[:3])
    core.landed(3, over=True)
    core.takes(request, 48)
    assert [(order.span, order.last) for order in core.loads()] == [(range(3), True)]


def test_without_a_landing_in_time_the_prompt_is_computed(core: Core) -> None:
    request = coming_request()
    core.asked(request)
    core.landed(0, over=True)
    assert core.asked(request) == (0, False)
    assert core.asked(request) == (0, False)
    assert len(core.landings.followed) == 1


def test_an_aborted_request_gives_its_blocks_back_in_the_next_step(core: Core) -> None:
    request = coming_request()
    core.asked(request)
    core.landed(2)
    core.takes(request, 96)
    core.loads()
    core.side.finished(cast("Any", request))
    (order,) = core.loads(IDLE)
    assert (order.request_id, order.block_ids, order.last, order.lost) == ("r", (), True, ())
    core.landed(5)
    assert core.loads() == []


def test_a_request_that_leaves_while_it_waits_leaves_nothing(core: Core) -> None:
    request = coming_request()
    core.asked(request)
    core.side.finished(cast("Any", request))
    assert core.loads(IDLE) == []
    assert core.landings.waits == []


def test_an_idle_engine_waits_for_news_and_a_busy_one_does_not(core: Core) -> None:
    request = coming_request()
    core.loads(IDLE)
    assert core.landings.waits == []
    core.asked(request)
    core.loads(BUSY)
    assert core.landings.waits == []
    core.loads(IDLE)
    assert len(core.landings.waits) == 1
    core.landed(6)
    core.takes(request, 96)
    core.loads(BUSY)
    core.loads(IDLE)
    assert len(core.landings.waits) == 1


def test_a_preempted_request_is_looked_up_and_not_awaited_again(core: Core) -> None:
    request = coming_request()
    core.asked(request)
    core.landed(6)
    core.takes(request, 96)
    core.loads()
    core.client.held.update(request.block_hashes[:4])
    request.num_preemptions = 1
    assert core.asked(request) == (64, True)


def test_no_more_is_awaited_than_the_request_can_use(core: Core) -> None:
    request = coming_request(96, blocks=9)
    core.asked(request)
    assert core.landings.coming.blocks == 5


@pytest.mark.parametrize(
    "params",
    [
        None,
        [],
        {},
        {"kvstore": 3},
        {"kvstore": {"coming_blocks": 4}},
        {"kvstore": {"coming_blocks": 0, "wait_s": 3}},
        {"kvstore": {"coming_blocks": True, "wait_s": 3}},
        {"kvstore": {"coming_blocks": 4, "wait_s": math.nan}},
        {"kvstore": {"coming_blocks": 4, "wait_s": "3"}},
        {"kvstore": {"coming_blocks": "4", "wait_s": 3}},
    ],
)
def test_what_makes_no_sense_announces_nothing(params: Any) -> None:
    assert announced(params) is None


def test_no_request_waits_for_ever() -> None:
    told = announced({"kvstore": {"coming_blocks": 4, "wait_s": math.inf}})
    assert told is not None
    assert told.wait_s == 86400

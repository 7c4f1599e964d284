"""Random walks of an engine's scheduler: what is loaded and saved always names the right blocks."""

import logging
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
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
from kvrouter_store.connectors.vllm.plan import LoadOrder, SaveOrder
from kvrouter_store.connectors.vllm.scheduler import SchedulerSide

BLOCK = 16
WHERE = 1000  # block ids are never block numbers


class Engine:
    """One request in a scheduler that allocates, chunks, generates and preempts as it likes."""

    def __init__(self, prompt_tokens: int, held: int) -> None:
        self.client = FakeClient()
        self.request: FakeRequest = request_of(prompt_tokens, BLOCK)
        self.client.held.update(self.request.block_hashes[:held])
        who = identity(BLOCK)
        log = logging.getLogger("walk")
        link = StoreLink(cast("Any", self.client), who.manifest, log)
        arrivals = Arrivals(cast("Any", FakeLandings()))
        self.side = SchedulerSide(who, "all", link, arrivals, log)
        self.saved: list[int] = []
        self.lives = 0

    def ids(self, tokens: int) -> list[int]:
        """Block ids of this life of the request: other ones after each preemption."""
        return [WHERE * (self.lives + 1) + index for index in range(-(-tokens // BLOCK))]

    def admit(self, local_blocks: int, load_fails: bool) -> None:
        """Look up, allocate and load; a failed load is asked about again."""
        request = self.request
        local = min(local_blocks, (request.num_tokens - 1) // BLOCK) * BLOCK
        tokens, later = self.side.matched_tokens(cast("Any", request), local)
        assert tokens is not None
        assert tokens % BLOCK == 0
        assert later == (tokens > 0)
        assert local + tokens < request.num_tokens
        self.side.allocated(cast("Any", request), self.ids(local + tokens), tokens)
        loads = self.side.plan(FakeOutput({})).loads
        assert len(loads) == (tokens > 0)
        for order in loads:
            self.check(order)
            assert order.span == range(local // BLOCK, (local + tokens) // BLOCK)
        if tokens and load_fails:
            assert self.side.matched_tokens(cast("Any", request), 0) == (0, False)
            request.num_computed_tokens = 0
        else:
            request.num_computed_tokens = local + tokens

    def compute(self, tokens: int) -> None:
        """One step; past the prompt's end each step's token is known after the next."""
        request = self.request
        tokens = min(tokens, request.num_tokens - request.num_computed_tokens)
        blocks = {request.request_id: self.ids(request.num_tokens)}
        for order in self.side.plan(FakeOutput({request.request_id: tokens}, blocks)).saves:
            self.check(order)
            assert order.span.stop * BLOCK <= request.num_computed_tokens + tokens
            self.saved.extend(order.span)
        request.num_computed_tokens += tokens
        if request.num_computed_tokens == request.num_tokens:
            request.num_tokens += 1
            request.block_hashes = chain_of(request.num_tokens // BLOCK, request.request_id)

    def preempt(self) -> None:
        """The request loses its blocks and starts again in others."""
        self.lives += 1
        self.request.num_computed_tokens = 0
        self.request.num_preemptions += 1

    def check(self, order: LoadOrder | SaveOrder) -> None:
        """Hashes and block ids of an order belong together."""
        assert order.hashes == b"".join(self.request.block_hashes[: order.span.stop])
        assert order.block_ids == tuple(WHERE * (self.lives + 1) + block for block in order.span)


STEPS = st.one_of(st.integers(1, 70), st.just("preempt"))


@given(
    prompt_tokens=st.integers(1, 200),
    held=st.integers(0, 12),
    local_blocks=st.integers(0, 12),
    load_fails=st.booleans(),
    steps=st.lists(STEPS, max_size=12),
)
def test_every_order_names_the_blocks_of_its_request(
    prompt_tokens: int,
    held: int,
    local_blocks: int,
    load_fails: bool,
    steps: list[int | str],
) -> None:
    engine = Engine(prompt_tokens, held)
    engine.admit(local_blocks, load_fails)
    for step in steps:
        if isinstance(step, int):
            engine.compute(step)
        else:
            engine.preempt()
            engine.admit(local_blocks, load_fails)
    assert engine.saved == list(range(len(engine.saved)))
    about = engine.side.finished(cast("Any", engine.request))["kvstore"]
    assert about["blocks"] == len(engine.saved)

"""What the router asks a store for while a prompt's KV is on its way."""

import asyncio
from typing import Any, cast

from tests.contract.stores.backends import BLOCK_TOKENS, BLOCKS, MODEL, Prompt, question_of
from tests.fakes.foreign_stores import FakeCoordinator

from kvrouter.engines.families.base import Handoff, PendingKv
from kvrouter.prefix.hash_cache import HashCache
from kvrouter.prefix.stores import foreign_store
from kvrouter.prefix.stores.base import LandingOutcome
from kvrouter.serving.legs.early import begin_wait, first_landed
from kvrouter.serving.legs.prefill import LandingWaiter
from kvrouter.serving.request.context import PromptFacts, RequestContext, Timing
from kvrouter.serving.request.limits import ServingLimits
from kvrouter.telemetry.metrics import Metrics

CHUNK_TOKENS = 2 * BLOCK_TOKENS
LIMITS = ServingLimits(1, 1, landing_timeout_s=20.0, prefill_threshold=0, model_thresholds={})


async def test_the_first_chunk_is_awaited_where_a_store_names_blocks_in_its_own_way() -> None:
    store, prompt = FakeCoordinator(f"?chunk_size={CHUNK_TOKENS}", CHUNK_TOKENS), Prompt()
    await store.start()
    view = foreign_store(store.url)
    waiter = LandingWaiter(store=view, hash_cache=HashCache(), limits=LIMITS, metrics=Metrics())
    facts = PromptFacts(hashes=prompt.hashes, origin=prompt.origin)
    context = RequestContext(cast("Any", None), "id", b"", Timing(0.0), prompt=facts)
    try:
        async with asyncio.timeout(20):
            await view.start(10)
            first = first_landed(waiter, context, MODEL, PendingKv(BLOCKS, 20.0), 2)
            waiting = asyncio.create_task(first)
            await store.asked.wait()
            assert not waiting.done()
            for key in store.keys_of(question_of(prompt) | {"world_size": 1})[:1]:
                store.hold(key)
            assert await waiting
    finally:
        await view.close()
        await store.stop()


async def test_what_the_prefill_engine_reused_need_not_be_reported_again() -> None:
    prompt, view = Prompt(), foreign_store(f"lmcache://asked-nothing:1?chunk_size={CHUNK_TOKENS}")
    waiter = LandingWaiter(store=view, hash_cache=HashCache(), limits=LIMITS, metrics=Metrics())
    facts = PromptFacts(hashes=prompt.hashes, origin=prompt.origin)
    context = RequestContext(cast("Any", None), "id", b"", Timing(0.0), prompt=facts)
    context.route.note_handoff(Handoff(reused_tokens=BLOCKS * BLOCK_TOKENS))
    task = begin_wait(waiter, context, MODEL, PendingKv(BLOCKS, 20.0)).task
    async with asyncio.timeout(20):
        assert (await task).outcome is LandingOutcome.LANDED
    assert context.route.landed_blocks == BLOCKS

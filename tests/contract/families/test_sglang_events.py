"""SGLang's KV events: pages under its own names, which the router maps by their tokens."""

import struct
from array import array
from collections.abc import Sequence
from hashlib import sha256
from itertools import count
from typing import Any

import msgspec
import zmq
from tests.contract.families.conftest import Open, Site
from tests.contract.families.test_ranks import free_ports
from tests.fakes.patience import until
from tests.fakes.pd import PdEngine
from tests.fakes.pd_sglang import SglangEngine
from tests.unit.router.prefix.events.test_tracker import make_wire

from kvrouter.engines.engine import Identity
from kvrouter_store.identity.chain import hash_tokens, root_hash

PAGE = 16
TEXT = " ".join(str(number) for number in range(200))


def pages(tokens: Sequence[int]) -> list[Any]:
    """The event of a prompt: its whole pages, named by SGLang's mem_cache/utils.py `get_hash_str`.

    Names are signed 64 bits (`hash_str_to_int64`), in one event (mem_cache/events.py `enqueue`).
    tests/sglang holds a real engine to it.
    """
    names, digest, end = list[int](), b"", len(tokens) // PAGE * PAGE
    for at in range(0, end, PAGE):
        digest = sha256(digest + array("I", tokens[at : at + PAGE]).tobytes()).digest()
        names += struct.unpack(">q", digest[:8])
    told = {"block_hashes": names, "parent_block_hash": None, "token_ids": list(tokens[:end])}
    return [{"type": "BlockStored", **told, "block_size": PAGE, "lora_id": None, "medium": "GPU"}]


def paged(engines: list[PdEngine]) -> None:
    for engine in engines:
        assert isinstance(engine, SglangEngine)
        engine.page_size = PAGE


async def publish(here: Site, engine: PdEngine, bind: str, events: list[Any], end: bytes) -> None:
    """As the engine's publisher does, until the index has the block `end`."""
    target = here.app.core.pool.find(engine.address)
    assert target is not None
    context, sequence = zmq.Context(), count()
    try:
        publisher = context.socket(zmq.PUB)
        publisher.connect(bind)
        topic, payload = f"kv@{engine.address}".encode(), msgspec.msgpack.encode([0.0, events])

        def publish() -> None:  # again and again: a PUB drops early ones
            publisher.send_multipart([topic, struct.pack(">Q", next(sequence)), payload])

        index = here.app.core.index
        await until(lambda: index.match(end).get(target), meanwhile=publish)
    finally:
        context.destroy(linger=0)


async def test_a_completion_goes_to_the_engine_whose_events_say_that_it_holds_it(
    open_site: Open,
) -> None:
    bind = f"tcp://127.0.0.1:{free_ports(2)}"
    here = await open_site("sglang", 3, 1, prepare=paged, policy="prefix", kv_events_bind=bind)
    tokens = here.decode[0]._tokenizer.encode(TEXT)
    hashes = hash_tokens(tokens, PAGE, root=root_hash(None)).data
    await publish(here, here.prefill[1], bind, pages(tokens), hashes[-32:])
    for _ in range(3):
        await here.same({"model": "m", "prompt": TEXT, "max_tokens": 2})
    assert [len(engine.requests) for engine in here.prefill] == [0, 3, 0]
    naming = f'kvrouter:kv_index_naming{{engine="{here.prefill[1].address}",naming="mapped"}}'
    assert await here.metric(naming) == 1


async def test_engines_without_events_or_with_pages_of_one_token_name_no_blocks(
    open_site: Open,
) -> None:
    here = await open_site("sglang", 1, 2, policy="prefix")
    assert here.app.core.pool.domain("m") is None


def test_pages_of_salted_prompts_are_known_under_their_salt_alone() -> None:
    wire, root = make_wire(), root_hash(None)
    wire.pool.join(wire.engine, Identity(("m",), None, PAGE, None, root))
    (event,) = pages(range(4 * PAGE))
    salted = {**event, "block_hashes": [1, 2, 3, 4], "cache_salt": "pepper"}
    wire.tracker.receive([wire.topic, bytes(8), msgspec.msgpack.encode([0.0, [salted]])])
    plain, peppered = (
        hash_tokens(list(range(4 * PAGE)), PAGE, root=root, cache_salt=salt).data
        for salt in (None, "pepper")
    )
    assert wire.matched(peppered) == 4
    assert wire.matched(plain) == 0

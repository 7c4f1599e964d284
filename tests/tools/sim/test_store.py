"""Simulated engines around a real store: what is shared, what is checked, what is lost."""

import json
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.patience import eventually
from tests.tools.sim.conftest import LiveSim

from kvrouter.tools.sim.settings import SimSettings
from kvrouter_store._core import Segments, StoreServer
from kvrouter_store.client.blocking import StoreClient
from kvrouter_store.identity.chain import hash_tokens, root_hash

Start = Callable[..., LiveSim]
BLOCK = 16
KV_BYTES = 256
PROMPT = list(range(100, 200))
LOADABLE = 96
MANIFEST = SimSettings(model="tiny", block_size=BLOCK, kv_bytes_per_token=KV_BYTES).manifest


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreServer]:
    server = StoreServer(
        host="127.0.0.1",
        port=0,
        unix_path=str(tmp_path / "store.sock"),
        pool_bytes=16 << 20,
        granule_bytes=4096,
    )
    server.start()
    yield server
    server.stop()


@pytest.fixture
def engine(live_sim: Start, store: StoreServer) -> Start:
    """Starts engines that use the store."""

    def start(**settings: object) -> LiveSim:
        url = f"kv://127.0.0.1:{store.port}"
        return live_sim(**{"store": url, "kv_bytes_per_token": KV_BYTES, **settings})

    return start


@pytest.fixture
def alone(live_sim: Start) -> LiveSim:
    """An engine that has no store to be misled by."""
    return live_sim(kv_bytes_per_token=KV_BYTES)


@pytest.fixture
def client(store: StoreServer) -> Iterator[StoreClient]:
    with StoreClient(f"kv://127.0.0.1:{store.port}") as connected:
        connected.register(MANIFEST)
        yield connected


def put_wrong_bytes(client: StoreClient, hashes: bytes, block: int) -> None:
    """Store bytes under the name of a block that are not its own."""
    wrong = bytearray(b"\xee" * (BLOCK * KV_BYTES))
    segments = Segments.over(wrong, BLOCK * KV_BYTES, writable=True)
    client.delete(MANIFEST, hashes[block * 32 : block * 32 + 32])
    span = range(block, block + 1)
    result = client.put(MANIFEST, 0, hashes[: (block + 1) * 32], span, segments, [0])
    assert result.stored == 1


def test_a_prefix_computed_on_one_engine_is_loaded_by_another(
    engine: Start, alone: LiveSim
) -> None:
    prefill, decode = engine(role="prefill"), engine(role="decode")
    prefill.complete(PROMPT, 1)
    assert decode.text(PROMPT, 40) == alone.text(PROMPT, 40)
    assert decode.tokens_from("external_kv_transfer") == LOADABLE
    assert decode.tokens_from("local_compute") == len(PROMPT) - LOADABLE
    assert prefill.metric("kvsim:saved_blocks_total") == LOADABLE / BLOCK
    assert decode.metric("kvsim:store_transport", transport="shm") == 1


def test_a_second_prefill_engine_loads_what_the_first_computed(engine: Start) -> None:
    first, second = engine(role="prefill"), engine(role="prefill")
    first.complete(PROMPT, 1)
    second.complete([*PROMPT, *range(500, 600)], 1)
    assert second.tokens_from("external_kv_transfer") == LOADABLE
    assert second.metric("kvsim:saved_blocks_total") == 200 // BLOCK - LOADABLE / BLOCK


def test_a_prefill_answer_hands_over_the_manifest(engine: Start, store: StoreServer) -> None:
    handed = engine(role="prefill").complete(PROMPT, 1)["kv_transfer_params"]
    assert handed == {
        "kvstore": {
            "manifest": MANIFEST.digest.hex(),
            "blocks": LOADABLE // BLOCK,
            "block_tokens": BLOCK,
            "root": root_hash(None).hex(),
            "node": f"kv://127.0.0.1:{store.port}",
        }
    }


@pytest.fixture
def near() -> Iterator[str]:
    """Another node, the own one of some engines."""
    server = StoreServer(pool_bytes=16 << 20, granule_bytes=4096)
    server.start()
    yield f"kv://127.0.0.1:{server.port}"
    server.stop()


def from_store(store: StoreServer) -> dict[str, Any]:
    """What a router adds to a request where the first store has its blocks."""
    return {"kv_transfer_params": {"kvstore": {"source": f"kv://127.0.0.1:{store.port}"}}}


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_blocks_of_another_node_are_loaded_where_a_request_names_it(
    engine: Start, alone: LiveSim, store: StoreServer, near: str, transport: str
) -> None:
    engine(role="prefill").complete(PROMPT, 1)
    decode = engine(role="decode", store=near, store_neighbours="any", store_transport=transport)
    assert decode.text(PROMPT, 40, **from_store(store)) == alone.text(PROMPT, 40)
    assert decode.tokens_from("external_kv_transfer") == LOADABLE


def test_an_engine_that_saves_puts_what_it_loaded_from_another_node_into_its_own(
    engine: Start, store: StoreServer, near: str
) -> None:
    engine(role="prefill").complete(PROMPT, 1)
    second = engine(role="prefill", store=near, store_neighbours=f"127.0.0.1:{store.port}")
    handed = second.complete(PROMPT, 1, **from_store(store))["kv_transfer_params"]["kvstore"]
    assert second.tokens_from("external_kv_transfer") == LOADABLE
    assert (handed["node"], handed["blocks"]) == (near, LOADABLE // BLOCK)
    third = engine(role="decode", store=near)
    third.complete(PROMPT, 1)
    assert third.tokens_from("external_kv_transfer") == LOADABLE


def test_the_end_of_a_prefix_comes_from_another_node(
    engine: Start, alone: LiveSim, store: StoreServer, near: str
) -> None:
    engine(role="prefill").complete(PROMPT, 1)
    engine(role="prefill", store=near).complete(PROMPT[:40], 1)
    decode = engine(role="decode", store=near, store_neighbours="any")
    assert decode.text(PROMPT, 40, **from_store(store)) == alone.text(PROMPT, 40)
    assert decode.tokens_from("external_kv_transfer") == LOADABLE


def test_a_node_that_is_not_allowed_is_never_connected_to(
    engine: Start, alone: LiveSim, store: StoreServer, near: str
) -> None:
    engine(role="prefill").complete(PROMPT, 1)
    before = store.stats()["connections_total"]
    decode = engine(role="decode", store=near)
    assert decode.text(PROMPT, 40, **from_store(store)) == alone.text(PROMPT, 40)
    assert decode.tokens_from("external_kv_transfer") == 0
    assert store.stats()["connections_total"] == before


def test_another_node_that_is_away_costs_a_computation(
    engine: Start, alone: LiveSim, store: StoreServer, near: str
) -> None:
    engine(role="prefill").complete(PROMPT, 1)
    decode = engine(role="decode", store=near, store_neighbours="any")
    named = from_store(store)
    store.stop()
    assert decode.text(PROMPT, 40, **named) == alone.text(PROMPT, 40)


def test_a_probe_of_one_token_learns_the_manifest_from_any_role(engine: Start) -> None:
    for role in ("prefill", "decode", "both"):
        handed = engine(role=role).complete("x", 1)["kv_transfer_params"]["kvstore"]
        assert handed["manifest"] == MANIFEST.digest.hex()
        assert handed["blocks"] == 0


def test_only_the_role_both_saves_its_answers_and_decode_saves_nothing(
    engine: Start, client: StoreClient
) -> None:
    blocks = {}
    for role, first in (("prefill", 0), ("decode", 1000), ("both", 2000)):
        prompt = list(range(first, first + 20))
        answer = engine(role=role).complete(prompt, 30, return_token_ids=True)
        tokens = prompt + answer["choices"][0]["token_ids"]
        hashes = hash_tokens(tokens, BLOCK, root=root_hash(None))
        blocks[role] = client.match(MANIFEST, hashes.data).blocks
    assert blocks == {"prefill": 1, "decode": 0, "both": 3}


def test_wrong_bytes_are_counted_and_computed_again_and_the_text_is_right(
    engine: Start, alone: LiveSim, client: StoreClient
) -> None:
    hashes = hash_tokens(PROMPT, BLOCK, root=root_hash(None)).data
    engine(role="prefill").complete(PROMPT, 1)
    put_wrong_bytes(client, hashes, 2)
    decode = engine(role="decode")
    assert decode.text(PROMPT, 20) == alone.text(PROMPT, 20)
    assert decode.metric("kvsim:wrong_blocks_total") == 1
    assert decode.tokens_from("external_kv_transfer") == 2 * BLOCK
    assert client.match(MANIFEST, hashes).blocks == 2, "the wrong block is gone from the store"


def test_with_verification_off_wrong_bytes_make_wrong_text(
    engine: Start, alone: LiveSim, client: StoreClient
) -> None:
    hashes = hash_tokens(PROMPT, BLOCK, root=root_hash(None)).data
    engine(role="prefill").complete(PROMPT, 1)
    put_wrong_bytes(client, hashes, 2)
    trusting = engine(role="decode", verify_kv=False)
    assert trusting.text(PROMPT, 20) != alone.text(PROMPT, 20)
    assert trusting.tokens_from("external_kv_transfer") == LOADABLE


def test_engines_of_other_weights_share_nothing(engine: Start) -> None:
    engine(role="prefill").complete(PROMPT, 1)
    other = engine(role="decode", weights_revision="another")
    other.complete(PROMPT, 1)
    assert other.tokens_from("external_kv_transfer") == 0


def test_what_the_store_lost_is_saved_again_from_the_engines_own_cache(
    engine: Start, client: StoreClient
) -> None:
    prefill, decode = engine(role="prefill"), engine(role="decode")
    prefill.complete(PROMPT, 1)
    client.purge()
    prefill.complete(PROMPT, 1)
    assert prefill.tokens_from("local_cache_hit") == LOADABLE
    decode.complete(PROMPT, 1)
    assert decode.tokens_from("external_kv_transfer") == LOADABLE


def test_without_its_store_an_engine_computes_and_says_the_same(
    engine: Start, alone: LiveSim, store: StoreServer
) -> None:
    prefill = engine(role="prefill", store_deadline="200ms")
    store.stop()
    assert prefill.text(PROMPT, 20) == alone.text(PROMPT, 20)
    assert prefill.metric("kvsim:store_errors_total") >= 1
    assert prefill.ask("GET", "/health")[0] == 200


def test_an_engine_that_starts_without_its_store_says_so(
    engine: Start, store: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    store.stop()
    engine(role="prefill", store_deadline="200ms")
    assert "does not answer" in caplog.text


def test_many_requests_at_once_all_say_what_one_engine_alone_says(
    engine: Start, alone: LiveSim
) -> None:
    engines = [engine(role="both"), engine(role="both"), engine(role="decode")]
    prompts = [[*range(n % 3 * 1000, n % 3 * 1000 + 80), n, *range(7, 40)] for n in range(24)]
    for prompt in prompts[:3]:  # so that the others find each prefix in the store, however they run
        assert engines[0].text(prompt, 20) == alone.text(prompt, 20)
    with ThreadPoolExecutor(8) as pool:
        asked = enumerate(prompts)
        said = list(pool.map(lambda each: engines[each[0] // 3 % 3].text(each[1], 20), asked))
    assert said == [alone.text(prompt, 20) for prompt in prompts]
    assert sum(each.metric("kvsim:wrong_blocks_total") for each in engines) == 0
    assert sum(each.tokens_from("external_kv_transfer") for each in engines) > 0


@pytest.mark.parametrize(("step", "blocks"), [(BLOCK, 1), (4 * BLOCK, 4)])
def test_blocks_are_saved_after_each_step(
    engine: Start, client: StoreClient, step: int, blocks: int
) -> None:
    prompt = PROMPT[: 4 * BLOCK]
    slow = engine(role="prefill", prefill_time_per_token="10s", max_num_batched_tokens=step)
    hashes = hash_tokens(array("I", prompt), BLOCK, root=root_hash(None)).data
    asking = HTTPConnection("127.0.0.1", slow.port, timeout=30)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    asking.request("POST", "/v1/completions", json.dumps(body))
    assert eventually(lambda: client.match(MANIFEST, hashes).blocks >= blocks)
    assert client.match(MANIFEST, hashes).blocks == blocks
    asking.close()

"""URLs, names and questions of stores of other projects; answers that cannot be used."""

from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
from tests.contract.stores.backends import (
    BLOCK_TOKENS,
    BLOCKS,
    CHUNK_BLOCKS,
    IDENTITY,
    MODEL,
    RANKS,
    Prompt,
    question_of,
)
from tests.fakes.foreign_stores import FakeCoordinator, FakeForeignStore, FakeMaster
from tests.unit.router.conftest import Clock

from kvrouter.engines.engine import Identity
from kvrouter.prefix.stores import foreign_store, lmcache, polling, store_urls
from kvrouter.prefix.stores.base import LandingOutcome, Origin, WantedBlocks
from kvrouter.prefix.stores.mooncake import BATCH_KEYS
from kvrouter.prefix.stores.polling import PollingView
from kvrouter_store.identity.chain import hash_tokens, root_hash

CHUNK_TOKENS = CHUNK_BLOCKS * BLOCK_TOKENS


@pytest_asyncio.fixture
async def asked() -> AsyncIterator[Callable[[FakeForeignStore], "object"]]:
    """Starts a fake, and a view of it that has its health."""
    opened = []

    async def start(store: FakeForeignStore) -> PollingView:
        await store.start()
        view = foreign_store(store.url)
        opened.append((view, store))
        await view.start(10)
        assert view.peer.connected is not store.wrong
        return view

    yield start
    for view, store in opened:
        await view.close()
        await store.stop()


async def manifest_of(view: PollingView) -> str:
    return (await view.joins(IDENTITY)).manifest or ""


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://",
        "mooncake://host",
        "mooncake://host:0",
        "mooncake://host:99999",
        "mooncake://user@host:9003",
        "mooncake://host:9003/path",
        "mooncake://host:9003?tp=0",
        "mooncake://host:9003?tp=many",
        "mooncake://host:9003?groups=all",
        "mooncake://host:9003?prefix=a,b",
        "mooncake://host:9003?world_size=2",
        "lmcache://host:9300?tp=2",
        "lmcache://host:9300?chunk_size=-1",
        "lmcache://host:9300?tier=l3",
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_its_form(url: str) -> None:
    with pytest.raises(ValueError, match=r"write (mooncake|lmcache)://HOST:PORT"):
        store_urls([url])


def test_a_wrong_option_is_refused_with_the_options_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"with options of tp=COUNT, pp=COUNT, .*seed=TEXT$"):
        store_urls(["mooncake://host:9003?tpp=2"])


@pytest.mark.parametrize("scheme", ["redis", "rediss+cluster", "valkey", "infinistore"])
def test_a_tier_is_sent_to_the_flag_of_tiers_and_its_password_to_no_message(scheme: str) -> None:
    with pytest.raises(ValueError, match="give it to `kvrouter store --tier`") as refused:
        store_urls([f"{scheme}://:secret@host:6379"])
    assert "secret" not in str(refused.value)


async def test_an_engine_whose_blocks_do_not_divide_chunks_is_warned_of_when_it_joins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for size, warned in ((BLOCK_TOKENS * 4, False), (BLOCK_TOKENS * 4 + 1, True)):
        await foreign_store(f"lmcache://host:9300?chunk_size={size}").joins(IDENTITY)
        assert ("do not divide chunks" in caplog.text) is warned


async def test_a_server_that_refuses_connections_is_named_in_one_sentence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    view = foreign_store("mooncake://127.0.0.1:1")
    await view.start(10)
    await view.close()
    (line,) = caplog.messages
    assert line == (
        "store mooncake://127.0.0.1:1 is away: Connection refused; see that it runs, and that this "
        "is the --metrics_port of a Mooncake master"
    )


def test_nodes_of_the_store_are_named_as_before() -> None:
    assert store_urls(["kv://Host:7400/", "kvs://b:1"]) == ["kv://host:7400", "kvs://b:1"]
    with pytest.raises(ValueError, match="kv://HOST:PORT"):
        store_urls(["mooncak://host:9003"])


@pytest.mark.parametrize("beside", ["kv://host:7400", "lmcache://h:2", "mooncake://h:1?tp=2"])
def test_a_store_of_another_project_is_the_only_one(beside: str) -> None:
    assert store_urls(["mooncake://h:1", "mooncake://h:1"]) == ["mooncake://h:1"]
    for both in (["mooncake://h:1", beside], [beside, "mooncake://h:1"]):
        with pytest.raises(ValueError, match="is a whole store"):
            store_urls(both)


async def test_an_engine_is_named_by_the_path_of_its_model() -> None:
    mooncake = foreign_store("mooncake://h:1")
    lmcache = foreign_store("lmcache://h:1")
    assert await manifest_of(mooncake) == "model-tiny"
    assert await manifest_of(lmcache) == "/models/model-tiny"
    for view in (mooncake, lmcache):
        for other in (Identity(("m",), family="store"), Identity(("m",), family="sglang")):
            assert (await view.joins(other)).manifest is None


async def test_a_seed_is_the_root_of_hashes() -> None:
    view = foreign_store("mooncake://h:1?seed=0")
    domain = (await view.joins(IDENTITY)).domain
    assert domain is not None
    assert domain.root == root_hash("0") != root_hash(None)


async def test_keys_name_every_rank_and_group(asked: Callable) -> None:  # type: ignore[type-arg]
    """As `PoolKey` in store/data.py of vLLM 0.32 spells them."""
    options = "?tp=2&pp=2&groups=0,3&prefix=blue"
    store, prompt = FakeMaster(options), Prompt()
    view = await asked(store)
    store.keys = {
        f"blue@model-tiny@tp_rank:{tp}@pcp0@dcp0@pp_rank:{pp}@group:{group}"
        f"@{prompt.hashes[:32].hex()}"
        for tp in range(2)
        for pp in range(2)
        for group in (0, 3)
    }
    assert (await view.match(await manifest_of(view), prompt.hashes)).blocks == 1


async def test_a_long_prompt_takes_a_question_per_batch(asked: Callable) -> None:  # type: ignore[type-arg]
    store = FakeMaster()
    view = await asked(store)
    blocks = 2 * BATCH_KEYS + 1
    ids = array("I", range(blocks * BLOCK_TOKENS))
    hashes = bytes(hash_tokens(ids, BLOCK_TOKENS, root=root_hash(None)).data)
    name = "model-tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"
    store.keys = {name + hashes[32 * n : 32 * n + 32].hex() for n in range(blocks)}
    assert (await view.match("model-tiny", hashes)).blocks == blocks
    assert store.questions == 3
    store.keys.remove(name + hashes[32:64].hex())
    assert (await view.match("model-tiny", hashes)).blocks == 1
    assert store.questions == 4


async def test_a_model_whose_name_would_break_the_query_has_none() -> None:
    view = foreign_store("mooncake://h:1?prefix=blue")
    for path in ("/a,b", "/a b", "/a&b", "/a%20b", "/ü", "/a#b", "/a\n", "/", None):
        assert (await view.joins(replace(IDENTITY, model_path=path))).manifest is None


async def test_lmcache_holds_whole_chunks_and_no_adapters(asked: Callable) -> None:  # type: ignore[type-arg]
    store, prompt = FakeCoordinator(), Prompt()  # chunks of 256 tokens, which the prompt has not
    view = await asked(store)
    landing = await view.wait(WantedBlocks("/m", prompt.hashes, BLOCKS, origin=prompt.origin), 5.0)
    assert (landing.outcome, landing.blocks) == (LandingOutcome.LANDED, BLOCKS)
    odd = Origin(prompt.origin.ids, 48, None, None)  # blocks that fill no chunk
    assert (await view.match("/m", prompt.hashes, odd)).blocks == 0
    adapted = Prompt(adapter=("a", "/adapters/a"))
    assert (await view.match("/m", adapted.hashes, adapted.origin)).blocks == 0
    assert (await view.match("/m", adapted.hashes)).blocks == 0
    assert store.questions == 0


async def test_tokens_of_a_landing_are_sent_once_and_then_few_keys(asked: Callable) -> None:  # type: ignore[type-arg]
    """Those of the last chunk that is not there, and when it is, the others."""
    store, prompt = (
        FakeCoordinator(f"?chunk_size={CHUNK_TOKENS}&world_size={RANKS}", CHUNK_TOKENS),
        Prompt(),
    )
    view = await asked(store)
    keys = store.keys_of(question_of(prompt))
    comes = iter([[], [], [], keys[-2:-1], keys[1:], keys[:1]])  # before each look

    async def pause(seconds: float) -> None:
        for key in next(comes):
            store.hold(key)

    view.sleep = pause
    landing = await view.wait(WantedBlocks(MODEL, prompt.hashes, BLOCKS, origin=prompt.origin), 5.0)
    assert (landing.outcome, landing.blocks) == (LandingOutcome.LANDED, BLOCKS)
    sent = [[keys.index(key) for key in body.get("keys", [])] for body in store.bodies]
    last = len(keys) - 1
    assert sent == [[], [6, 7], [6, 7], [6, 7], [last], [0, 1, 2, 3, 4, 5], [0]]
    assert [len(body.get("token_ids", ())) for body in store.bodies] == [128, 0, 0, 0, 0, 0, 0]


async def test_a_landing_that_does_not_come_is_asked_for_by_few_keys_at_its_end(
    asked: Callable,  # type: ignore[type-arg]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polling, "ANSWER_S", 60.0)  # the coordinator answers on the same loop
    store, blocks = FakeCoordinator(f"?chunk_size={BLOCK_TOKENS}", BLOCK_TOKENS), 3 * BATCH_KEYS
    view, ids = await asked(store), array("I", range(blocks * BLOCK_TOKENS))
    origin = Origin(ids.tobytes(), BLOCK_TOKENS, None, None)
    for key in store.keys_of({**question_of(Prompt()), "token_ids": list(ids), "world_size": 1})[
        :8
    ]:
        store.hold(key)
    clock = Clock()

    async def pause(seconds: float) -> None:
        clock.pass_s(seconds)

    view.clock, view.sleep = clock, pause
    landing = await view.wait(
        WantedBlocks(MODEL, bytes(32 * blocks), blocks, origin=origin, reused=1), 2.0
    )
    assert (landing.outcome, landing.blocks) == (LandingOutcome.TIMEOUT, 8)
    asked_for = [len(body.get("keys", ())) for body in store.bodies]
    assert asked_for == [0, *[1] * (len(asked_for) - 2), lmcache.BATCH_KEYS]


async def test_chunks_of_another_size_are_refused_with_the_remedy(
    asked: Callable,  # type: ignore[type-arg]
    caplog: pytest.LogCaptureFixture,
) -> None:
    view = await asked(FakeCoordinator("?chunk_size=64", 32))
    prompt = Prompt()
    for _ in range(3):
        assert (await view.match("/m", prompt.hashes, prompt.origin)).blocks == 0
    assert view.counts == {"match_failed": 3}
    assert caplog.text.count("chunk_size=TOKENS") == 1


async def test_a_question_of_some_megabytes_is_asked(
    asked: Callable,  # type: ignore[type-arg]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(polling, "ANSWER_S", 60.0)  # the coordinator reads it on the same loop
    store = FakeCoordinator()
    view = await asked(store)
    many = 500_000
    origin = Origin((array("I", [100_000]) * many).tobytes(), 64, None, None)
    assert (await view.match("/m", bytes(32 * (many // 64)), origin)).blocks == 0
    assert view.counts == {}
    assert len(store.bodies[0]["token_ids"]) == many // 256 * 256


@pytest.mark.parametrize("kind", [FakeMaster, FakeCoordinator])
@pytest.mark.parametrize(
    ("garbage", "away"),
    [
        ((200, b"not JSON"), True),
        ((200, b"[]"), True),
        ((200, b'{"data": 3, "results": {}}'), True),
        ((200, b"[" * 100_000), True),
        ((200, b"x" * (17 << 20)), False),
        ((302, b""), True),
        ((500, b"{}"), True),
        ((503, b"STANDBY"), True),
        ((400, b"bad"), False),
        ((404, b"none"), False),
    ],
    ids=str,
)
async def test_what_cannot_be_used_matches_nothing(
    asked: Callable,  # type: ignore[type-arg]
    kind: type[FakeForeignStore],
    garbage: tuple[int, bytes],
    away: bool,
) -> None:
    store, prompt = kind("?chunk_size=32" if kind is FakeCoordinator else ""), Prompt()
    view = await asked(store)
    store.garbage = garbage
    assert (await view.match(await manifest_of(view), prompt.hashes, prompt.origin)).blocks == 0
    assert view.peer.connected is not away
    assert view.counts == {"match_failed": 1}


async def test_a_server_of_another_kind_is_away(
    asked: Callable,  # type: ignore[type-arg]
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = FakeMaster()
    store.wrong = True
    view = await asked(store)
    assert not view.peer.connected
    assert "/batch_query_keys answers 404; see that it runs, and that this is the" in caplog.text
    await view.close()
    await view.close()

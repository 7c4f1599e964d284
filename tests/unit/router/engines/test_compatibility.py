"""Which engines share KV, and that the reason is logged where they do not."""

import pytest
from tests.unit.router.conftest import Clock, joined
from tests.unit.router.prefix.stores.test_node import MANIFEST, NAME, FakeStore, view_of

from kvrouter.engines.compatibility import CompatibilityMonitor
from kvrouter.engines.engine import Engine, Identity, Role
from kvrouter.engines.pool import EnginePool
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.chain import root_hash
from kvrouter_store.identity.layout import Layout

HALVES = Manifest(
    CacheSpec("m", "r1", "bfloat16", 16, "sha256_cbor", root_hash(None).hex()),
    tuple(Part((0, 2), (head, head + 1), 0, 32, Layout.opaque("fake")) for head in (0, 1)),
)


@pytest.fixture
def pool(clock: Clock) -> EnginePool:
    made = EnginePool(clock)
    made.on_join(CompatibilityMonitor(made, lambda one, other: f"{one} and {other}").engine_joined)
    return made


def refused(pool: EnginePool) -> list[tuple[str, str, str]]:
    pairs = CompatibilityMonitor(pool, lambda one, other: f"{one} and {other}").incompatible()
    return [(prefill.address, decode.address, reason) for prefill, decode, reason in pairs]


def test_engines_of_one_manifest_share_and_nothing_is_logged(
    pool: EnginePool, caplog: pytest.LogCaptureFixture
) -> None:
    joined(pool, "p:1", Role.PREFILL, manifest="x")
    joined(pool, "d:1", Role.DECODE, manifest="x")
    assert refused(pool) == []
    assert caplog.text == ""


def test_engines_of_different_manifests_are_logged_with_the_difference(
    pool: EnginePool, caplog: pytest.LogCaptureFixture
) -> None:
    joined(pool, "p:1", Role.PREFILL, manifest="x")
    joined(pool, "p:2", Role.PREFILL, manifest="y")
    joined(pool, "d:1", Role.DECODE, manifest="y")
    assert refused(pool) == [("p:1", "d:1", "x and y")]
    assert caplog.text.count("share no KV") == 1
    assert "x and y" in caplog.text


def test_an_engine_whose_connector_refuses_shares_no_kv(
    pool: EnginePool, caplog: pytest.LogCaptureFixture
) -> None:
    joined(pool, "p:1", Role.PREFILL, manifest="x")
    engine = pool.add("d:1", Role.DECODE)
    pool.join(engine, Identity(("m",), manifest="x", refusal="sliding window"))
    assert refused(pool) == [("p:1", "d:1", "d:1: sliding window")]
    assert caplog.text.count("sliding window") == 1


def test_engines_of_different_models_are_not_compared(pool: EnginePool) -> None:
    joined(pool, "p:1", Role.PREFILL, manifest="x", models=("a",))
    joined(pool, "d:1", Role.DECODE, manifest="y", models=("b",))
    assert refused(pool) == []
    joined(pool, "d:2", Role.DECODE, manifest="y", models=("a", "b"))
    assert [pair[:2] for pair in refused(pool)] == [("p:1", "d:2")]


def test_an_engine_for_both_legs_is_not_compared_with_itself(pool: EnginePool) -> None:
    engine = pool.add("b:1", Role.BOTH)
    pool.join(engine, Identity(("m",), manifest="x", refusal="why"))
    assert refused(pool) == []


def test_an_engine_that_left_is_no_longer_reported(pool: EnginePool) -> None:
    engine = joined(pool, "p:1", Role.PREFILL, manifest="x")
    joined(pool, "d:1", Role.DECODE, manifest="y")
    pool.leave(engine)
    assert refused(pool) == []


async def test_the_difference_names_what_differs(clock: Clock) -> None:
    view = view_of(FakeStore(registered=[MANIFEST, HALVES]), clock)
    other = HALVES.digest.hex()
    assert view.manifests.difference(NAME, other) == f"manifests {NAME[:12]} and {other[:12]}"
    await view.learn(NAME)
    assert (
        view.manifests.difference(NAME, other)
        == "parts: 1 and 2; spec.kv_dtype: float32 and bfloat16"
    )


async def test_a_store_that_is_away_keeps_no_engine_from_joining(clock: Clock) -> None:
    view = view_of(FakeStore(away=True), clock)
    await view.learn(NAME)
    assert "manifests" in view.manifests.difference(NAME, "other")


def test_engines_are_named_by_what_matters_of_them() -> None:
    identity = Identity(("m", "l"), None, 16, "ab" * 32)
    assert str(identity) == "m, l; blocks of 16 tokens; manifest abababababab"
    assert str(Identity(("m",))) == "m; unknown blocks; no connector of the store"
    assert repr(Engine("e:1", Role.BOTH)) == "<Engine e:1 both: 0 requests, 0 tokens>"


def test_an_engine_with_several_ranks_is_logged_once(
    pool: EnginePool, caplog: pytest.LogCaptureFixture
) -> None:
    joined(pool, "p:1", Role.PREFILL, manifest="x")
    divided = Identity(("m",), manifest="y", ranks=(0, 1, 2))
    pool.join(pool.add("d:1", Role.DECODE), divided)
    assert refused(pool) == [("p:1", "d:1", "x and y")]
    assert [record.getMessage().count("p:1 and d:1 share no KV") for record in caplog.records] == [
        1
    ]
    pool.join(pool.add("d:2", Role.DECODE), Identity(("m",), refusal="why", ranks=(0, 1)))
    assert caplog.text.count("engine d:2 shares no KV: why") == 1

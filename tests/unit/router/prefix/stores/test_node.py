import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from tests.unit.router.conftest import Clock

from kvrouter.engines.engine import CacheGroup
from kvrouter.prefix.stores.base import LandingOutcome, WantedBlocks
from kvrouter.prefix.stores.node import MOST_MANIFESTS, RELOAD_INTERVAL_S, Manifests, NodeView
from kvrouter_store.client.results import Match, RegisteredManifest
from kvrouter_store.errors import StoreUnavailable
from kvrouter_store.identity.block import CacheSpec, Manifest, Part
from kvrouter_store.identity.chain import root_hash
from kvrouter_store.identity.layout import Layout

SPEC = CacheSpec("m", "r1", "float32", 16, "sha256_cbor", root_hash(None).hex())
MANIFEST = Manifest(SPEC, (Part((0, 2), (0, 1), 0, 64, Layout.opaque("fake")),))
NAME = MANIFEST.digest.hex()
RENEWED = Manifest(replace(SPEC, weights_revision="r2"), MANIFEST.parts)
HASHES = bytes(32 * 4)


@dataclass
class FakeLease:
    held: bool = True

    def release(self) -> None:
        self.held = False


@dataclass
class FakeWaited:
    landed: bool
    blocks: int
    lease: FakeLease | None = None


@dataclass
class FakeStore:
    """A store that answers as told; `away` raises, `asked` notes every call."""

    blocks: int = 0
    away: bool = False
    slow: bool = False
    registered: list[Manifest] = field(default_factory=lambda: [MANIFEST])
    asked: list[str] = field(default_factory=list)
    matched: list[Manifest] = field(default_factory=list)
    go_away: asyncio.Event = field(default_factory=asyncio.Event)  # ends what is slow

    async def _asked(self, what: str) -> None:
        self.asked.append(what)
        if self.away:
            raise StoreUnavailable("away")
        if self.slow:
            await self.go_away.wait()
            raise StoreUnavailable("away")

    async def manifests(self) -> Sequence[RegisteredManifest]:
        await self._asked("manifests")
        return [RegisteredManifest(n, m.digest, m, ()) for n, m in enumerate(self.registered)]

    async def match(self, manifest: Manifest, hashes: bytes, *, promote: bool = False) -> Match:
        self.matched.append(manifest)
        await self._asked("match" if promote else "match without a word of what comes")
        return Match(self.blocks)

    async def wait(
        self, manifest: Manifest, hashes: bytes, upto: int, deadline_s: float, lease: bool = False
    ) -> FakeWaited:
        await self._asked("wait")
        landed = self.blocks >= upto
        return FakeWaited(landed, self.blocks, FakeLease() if landed and lease else None)


def view_of(store: FakeStore, clock: Clock) -> NodeView:
    return NodeView(store, clock)  # type: ignore[arg-type]


async def test_a_match_is_what_the_store_says(clock: Clock) -> None:
    view = view_of(FakeStore(3), clock)
    assert await view.match(NAME, HASHES) == 3
    assert await view.match(NAME, b"") == 0


async def test_an_engine_that_renamed_its_blocks_is_matched_by_their_new_names(
    clock: Clock,
) -> None:
    store = FakeStore(3, registered=[MANIFEST, RENEWED])
    view = view_of(store, clock)
    assert await view.match(NAME, HASHES) == 3
    view.manifests.rename(NAME, RENEWED.digest.hex(), ())
    assert await view.match(NAME, HASHES) == 3
    assert store.matched == [MANIFEST, RENEWED]


async def test_a_store_that_is_away_matches_nothing_and_fails_no_request(clock: Clock) -> None:
    view = view_of(FakeStore(3, away=True), clock)
    assert await view.match(NAME, HASHES) == 0
    assert (
        await view.wait(WantedBlocks(NAME, HASHES, 4), 1.0)
    ).outcome is LandingOutcome.STORE_AWAY
    assert view.counts == {"match_failed": 1, "store_away": 1}


async def test_a_landing_brings_a_lease_that_its_owner_releases(clock: Clock) -> None:
    view = view_of(FakeStore(4), clock)
    landing = await view.wait(WantedBlocks(NAME, HASHES, 4), 1.0)
    assert (landing.outcome, landing.blocks) == (LandingOutcome.LANDED, 4)
    assert landing.lease is not None
    (lease,) = landing.lease.held
    landing.lease.release()
    assert not lease.held  # type: ignore[attr-defined]


async def test_a_landing_that_does_not_come_says_how_far_it_came(clock: Clock) -> None:
    view = view_of(FakeStore(2), clock)
    landing = await view.wait(WantedBlocks(NAME, HASHES, 4), 1.0)
    assert (landing.outcome, landing.blocks, landing.lease) == (LandingOutcome.TIMEOUT, 2, None)


async def test_nothing_to_wait_for_has_landed_without_a_question(clock: Clock) -> None:
    store = FakeStore()
    assert (
        await view_of(store, clock).wait(WantedBlocks(NAME, b"", 0), 1.0)
    ).outcome is LandingOutcome.LANDED
    assert store.asked == []


def test_of_engines_that_come_back_with_others_for_ever_the_latest_are_remembered() -> None:
    manifests = Manifests()
    for number in range(MOST_MANIFESTS + 2):
        manifests.rename(f"joined {number}", f"{number}", (CacheGroup(f"group {number}"),))
        manifests.rename("joined 0", f"new {number}", ())  # an engine that stays is told of
    assert len(manifests.renamed) == len(manifests.groups) == MOST_MANIFESTS
    assert manifests.current("joined 0") == f"new {MOST_MANIFESTS + 1}"
    assert manifests.current("joined 1") == "joined 1"


async def test_an_unknown_manifest_is_asked_for_once_per_interval(clock: Clock) -> None:
    store = FakeStore(4, registered=[])
    view = view_of(store, clock)
    for _ in range(3):
        assert (
            await view.wait(WantedBlocks(NAME, HASHES, 4), 1.0)
        ).outcome is LandingOutcome.UNKNOWN_MANIFEST
    assert store.asked == ["manifests"]
    store.registered.append(MANIFEST)
    clock.pass_s(RELOAD_INTERVAL_S)
    assert (await view.wait(WantedBlocks(NAME, HASHES, 4), 1.0)).outcome is LandingOutcome.LANDED
    assert store.asked == ["manifests", "manifests", "wait"]


async def test_requests_at_once_share_one_question_for_the_manifests(clock: Clock) -> None:
    store = FakeStore(4)
    view = view_of(store, clock)
    found = await asyncio.gather(*(view.match(NAME, HASHES) for _ in range(5)))
    assert found == [4] * 5
    assert store.asked.count("manifests") == 1


async def test_a_request_that_is_cancelled_leaves_the_question_to_the_others(clock: Clock) -> None:
    store = FakeStore(4, slow=True)
    view = view_of(store, clock)
    first = asyncio.create_task(view.wait(WantedBlocks(NAME, HASHES, 4), 1.0))
    second = asyncio.create_task(view.wait(WantedBlocks(NAME, HASHES, 4), 1.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not second.done()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert store.asked == ["manifests"]


async def test_a_question_that_fails_after_all_left_is_no_unhandled_error(clock: Clock) -> None:
    store, unhandled = FakeStore(slow=True), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, told: unhandled.append(told))
    view = view_of(store, clock)
    only = asyncio.create_task(view.match(NAME, HASHES))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    only.cancel()
    with pytest.raises(asyncio.CancelledError):
        await only
    store.go_away.set()
    for _ in range(5):
        await asyncio.sleep(0)
    del only
    gc.collect()
    assert unhandled == []
